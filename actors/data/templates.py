"""Convert a prompt field to text and tokens, by chat and plain templates. Never reads a file.

`chat` renders the tokenizer's chat template (or `data.chat_template`) with the generation prompt; `plain` uses the text
itself, with the special tokens that the tokenizer puts before a text. In an episode, the template also gives the text
between two turns of the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.data.errors import DataError
from actors.data.tokenizers import Tokenizer
from config.data import DataOptions

# What every chat template is given, by us and by transformers.
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
_PROBE = "a prompt, to see that the template works before the data is read"


class BadPromptError(Exception):
    """This prompt field cannot be rendered: one record is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Renders prompts. `make_template` makes it and checks that it works."""

    tokenizer: Tokenizer
    chat: bool
    chat_template: str | None
    system_prompt: str | None
    tools: Sequence[dict[str, Any]] = ()  # schemas, as chat templates take them
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template

    def render(self, prompt: Any, observed: Sequence[Mapping[str, str]] = ()) -> str:
        """Return the text of a prompt field: a string, or for chat a list of {"role", "content"} messages; then the
        messages `observed` before the first turn."""
        if not self.chat:
            if not isinstance(prompt, str):
                raise BadPromptError(f"data.template=plain needs text, not {_name(prompt)}; use data.template=chat")
            return prompt + "".join(_plain(message) for message in observed)
        messages = [*_messages(prompt), *map(dict, observed)]
        if self.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise BadPromptError("it begins with a system message, and data.system_prompt is set too")
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self._apply(messages)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Tokens of a rendered prompt, int32 [L]."""
        tokens = list(self.tokenizer.encode(text, add_special_tokens=not self.chat))
        eos = self.tokenizer.eos_token_id
        if not self.chat and tokens and tokens[-1] == eos and not text.endswith(self.tokenizer.eos_token):
            tokens.pop()  # added by the tokenizer: a response cannot begin after the end
        return np.asarray(tokens, dtype=np.int32)

    def encode_response(self, text: str) -> NDArray[np.int32]:
        """Tokens of a response with the end-of-text token, int32 [T]."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray([*tokens, self.tokenizer.eos_token_id], dtype=np.int32)

    def between(self, observed: Sequence[Mapping[str, str]]) -> str:
        """Return the text between a turn of the model and its next one, with these observations; for chat from the end
        of its message on. Raises BadPromptError if the template does not render it."""
        if not self.chat:
            return "".join(_plain(message) for message in observed)
        said = "what the model said"
        turns = [*_messages("a question"), {"role": "assistant", "content": said}, *map(dict, observed)]
        _, found, behind = self._apply(turns).partition(said)
        if not found:
            raise BadPromptError(f"the chat template ({self.source}) leaves out what the model said in an earlier turn")
        return behind

    def encode_between(self, observed: Sequence[Mapping[str, str]], last_token: int) -> NDArray[np.int32]:
        """Return the tokens of `between`, int32 [C], behind a turn that ended with `last_token`, which is not
        repeated."""
        tokens = self.tokenizer.encode(self.between(observed), add_special_tokens=False)
        return np.asarray(tokens[1:] if self.chat and tokens and tokens[0] == last_token else tokens, dtype=np.int32)

    def turn_end(self) -> int | None:
        """Return the special token behind an assistant's message; None for plain, or if the template has none."""
        if not self.chat:
            return None
        said = "an answer"
        try:
            text = self._apply([*_messages("a question"), {"role": "assistant", "content": said}], to_answer=False)
        except BadPromptError:
            return None  # a template for prompts only
        behind = text.rpartition(said)[2].lstrip()
        tokens = self.tokenizer.encode(behind, add_special_tokens=False) if said in text else []
        special = self.tokenizer.added_tokens_decoder
        return int(tokens[0]) if tokens and tokens[0] in special and special[tokens[0]].special else None

    def _apply(self, messages: list[dict[str, str]], *, to_answer: bool = True) -> str:
        import jinja2

        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=to_answer,
                chat_template=self.chat_template,
                tools=list(self.tools) or None,
                **self.arguments,
            )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{self.source}: the chat template is not valid Jinja: {error}") from error
        except (jinja2.TemplateError, TypeError) as error:
            raise BadPromptError(f"the chat template ({self.source}) refuses it: {error}") from error
        return str(rendered)

    @property
    def source(self) -> str:
        """The source of the chat template, for messages."""
        return "data.chat_template" if self.chat_template is not None else "the tokenizer's"


def make_template(options: DataOptions, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] = ()) -> Template:
    """Make the template of a `data:` section. Raises DataError if the tokenizer has none and one is needed. `tools`:
    schemas for the chat template."""
    if options.template == "plain":
        if options.system_prompt is not None:
            raise DataError("data.system_prompt needs data.template=chat: a plain prompt has no system message")
        return Template(tokenizer=tokenizer, chat=False, chat_template=None, system_prompt=None)
    if options.chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template: use data.template=plain, or give one "
            "with data.chat_template=..."
        )
    template = Template(
        tokenizer=tokenizer,
        chat=True,
        chat_template=options.chat_template,
        system_prompt=options.system_prompt,
        tools=tools,
        arguments=options.chat_template_kwargs,
    )
    if template.arguments:
        _check_arguments(template)
    try:
        rendered = template.render(_PROBE)
    except BadPromptError as error:
        raise DataError(f"data.template=chat: {error}") from error
    for text, what in ((_PROBE, "the prompt"), (options.system_prompt, "data.system_prompt")):
        if text is not None and text.strip() not in rendered:
            raise DataError(
                f"data.template=chat: the chat template ({template.source}) leaves out {what}: it renders a prompt as "
                f"{rendered[:80]!r}. A message's content is a text here, not a list of parts; give another template "
                "with data.chat_template"
            )
    return template


def _check_arguments(template: Template) -> None:
    """Raise DataError where the chat template reads no variable of an argument's name: Jinja ignores such a one."""
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    source = template.tokenizer.get_chat_template(template.chat_template, tools=list(template.tools) or None)
    given = {*_GIVEN, *environment.globals, *template.tokenizer.special_tokens_map}
    try:
        read = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateSyntaxError:
        return  # it has tags of transformers' own, which render above but cannot be looked into here
    own = ", ".join(sorted(read - given))
    for name in template.arguments:
        key = f"data.chat_template_kwargs.{name}"
        if name in given:
            raise DataError(f"{key}: Paceline or the tokenizer gives the template this variable; leave it out")
        if name not in read:
            why = f"the chat template ({template.source}) reads no such variable"
            raise DataError(f"{key}: {why}; {f'it reads {own}' if own else 'it reads none that can be set'}")


def _messages(prompt: Any) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise BadPromptError(f"a prompt is text or a list of messages, not {_name(prompt)}")
    for message in prompt:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadPromptError(f"a message needs text in 'role' and 'content', not {message!r:.80}")
    return list(prompt)


def _plain(message: Mapping[str, str]) -> str:
    """Return a message without a template: a tool's answer in Hermes' tags, any other text unchanged."""
    text = message["content"]
    return f"\n<tool_response>\n{text}\n</tool_response>\n" if message["role"] == "tool" else text


def _name(value: Any) -> str:
    return "nothing" if value is None or value == [] else type(value).__name__
