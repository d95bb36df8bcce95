"""`paceline chat`: query a model in the terminal, with the template, the sampling and the stop rules of its run.

Owns the conversation and its output. One native engine in this process, without Ray and without drafts.
"""

import sys
from collections.abc import Iterator

from actors.data.templates import Template, make_template
from actors.data.tokenizers import Tokenizer
from actors.engine.native.core import build
from actors.engine.wire import Start
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from contracts.engine import Abort, Submit
from contracts.rollout import Finished, FinishReason, IntArray, Progress, Rejected, Request, Rollout
from launch.batch import sampling_params, stop_rule
from launch.config import Config
from launch.config.paths import replaced
from launch.errors import PacelineError
from launch.interrupt import Interrupt, Interrupted, interrupt_flag
from launch.run.inputs import stop_tokens_of, tokenizer_of
from models.config import longest_sequence, read_config
from models.noise import noise_key

EPOCH = -(10**6)  # shares no noise with training (0 and up) and held-out sets (-1 and down)
NEW = "/new"
UNKNOWN = "\ufffd"  # decoded form of an incomplete character


class Chat:
    """A model and the conversation so far. `config.model.path` is a Hugging Face folder."""

    def __init__(self, config: Config, *, single: bool = False) -> None:
        """`single`: each prompt is a conversation of its own. Loads the model; raises DataError and the engine's
        errors."""
        self._config = config
        self._tokenizer: Tokenizer = tokenizer_of(config)
        self._template: Template = make_template(config.data, self._tokenizer)
        self.single = single or not self._template.chat
        self._sampling = sampling_params(config.rollout.sampling, stop_tokens_of(config, self._tokenizer))
        self._stop = stop_rule(config.rollout.sampling, self._tokenizer)
        self._messages: list[dict[str, str]] = []
        self._asked = 0  # prompts in all conversations; each gets its own noise
        options = _engine_options(config)
        self._engine = build(
            Start(
                model=config.model,
                options=options,
                seed=config.run.seed,
                weights_version=0,
                niceness=0,
                speculation=SpeculationOptions(mode="off"),
                quantization=config.rollout.quantization,
            )
        )

    def new(self) -> None:
        """Start a new conversation."""
        self._messages.clear()

    def answer(self, prompt: str, interrupt: Interrupt) -> "Iterator[str | Rollout]":
        """Yield the response's text in pieces as it is sampled, and last its Rollout. `interrupt` ends it early.

        Raises PacelineError if the engine refuses the prompt, which is then not kept in the conversation."""
        if self.single:
            self.new()
        said = [*self._messages, {"role": "user", "content": prompt}]
        tokens = self._template.encode(self._template.render(said if self._template.chat else prompt))
        request = Request(
            request_id=self._asked,
            prompt_id=self._asked,
            prompt_tokens=tokens,
            noise_key=noise_key(self._config.run.seed, EPOCH, self._asked, 0),
            sampling=self._sampling,
            stop=self._stop,
        )
        self._asked += 1
        text = Pieces(self._tokenizer)
        stopping = False
        self._engine.apply(Submit((request,)), None)
        rollout = None
        while self._engine.has_work:
            for event in self._engine.step():
                if isinstance(event, Progress):
                    yield text.add(event.delta.tokens)
                elif isinstance(event, Rejected):
                    raise PacelineError(event.reason, remedy=f"a shorter prompt, or {NEW} for a new conversation")
                elif isinstance(event, Finished):
                    rollout = event.rollout
            if interrupt and not stopping:
                stopping = True
                self._engine.apply(Abort((request.request_id,)), None)
        assert rollout is not None
        yield text.rest(rollout.tokens)
        response = self._tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        self._messages = [*said, {"role": "assistant", "content": response}]
        yield rollout

    def cut(self, rollout: Rollout) -> str:
        """Return why a response has no end of its own, in words; empty if it has one."""
        if rollout.finish_reason is not FinishReason.LENGTH:
            return ""
        most = self._sampling.max_new_tokens
        if len(rollout.tokens) < most:
            return f"cut: the model takes no more tokens; {NEW} begins a new conversation"
        return f"cut at {most} tokens; --max-tokens {4 * most} lets it write more"


class Pieces:
    """Decodes tokens that come one by one to text. A character is held back until all its tokens are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._from = self._shown = 0  # tokens: those before _shown are printed, decoding starts again at _from

    def add(self, tokens: IntArray) -> str:
        """Add tokens and return the text that can be printed now."""
        self._tokens += tokens.tolist()
        return self._next(final=False)

    def rest(self, tokens: IntArray) -> str:
        """Return the unprinted rest of the whole response `tokens`."""
        self._tokens = tokens.tolist()
        return self._next(final=True)

    def _next(self, *, final: bool) -> str:
        before, now = (self._decode(self._tokens[self._from : end]) for end in (self._shown, None))
        if now.endswith(UNKNOWN) and not final:
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _note(text: str) -> None:
    """Print to stderr what is not an answer."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)


def _answer(model: Chat, prompt: str, *, terminal: bool) -> None:
    """Print the answer as it arrives. Raises Interrupted; on a terminal Ctrl-C only ends the answer."""
    with interrupt_flag() as interrupt:
        for piece in model.answer(prompt, interrupt):
            if isinstance(piece, str):
                print(piece, end="", flush=True)
                continue
            print(flush=True)
            if why := model.cut(piece):
                _note(f"[{why}]")
    if interrupt and not (terminal and interrupt.signal_name == "SIGINT"):
        raise Interrupted(interrupt.signal_name)


def chat(
    config: Config,
    what: str,
    *,
    prompt: str | None = None,
    single: bool = False,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
) -> None:
    """Answer `prompt`; without one, every line of stdin, with `/new` between conversations. `what`: the model's name
    for people. `single`: each prompt is a conversation of its own. `temperature`, `max_new_tokens` replace
    rollout.sampling's."""
    for name, value in (("temperature", temperature), ("max_new_tokens", max_new_tokens)):
        if value is not None:
            config = replaced(config, f"rollout.sampling.{name}", value)
    terminal = prompt is None and sys.stdin.isatty()
    model = Chat(config, single=single)
    if prompt is not None:
        _answer(model, prompt, terminal=terminal)
        return
    if terminal:
        _note(_greeting(config, what, model))
    for line in _lines(terminal):
        if line == NEW:
            model.new()
        elif line:
            try:
                _answer(model, line, terminal=terminal)
            except PacelineError as error:
                _note(f"[{error.message}: {error.remedy}]")


def _greeting(config: Config, what: str, model: Chat) -> str:
    drawn = config.rollout.sampling
    turns = "each prompt by itself" if model.single else f"{NEW} begins a new conversation"
    played = "" if config.environment is None else "; no environment answers here"
    return (
        f"{what}: temperature {drawn.temperature:g}, at most {drawn.max_new_tokens} tokens{played}\n"
        f"{turns}; Ctrl-C ends an answer, Ctrl-D ends"
    )


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin, stripped; on a terminal until Ctrl-C or Ctrl-D."""
    if not terminal:
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401 - input() edits its line with it

    while True:
        try:
            yield input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _engine_options(config: Config) -> EngineOptions:
    """Return the run's engine options, for one request at a time, in one process on all cores."""
    options = config.rollout.engine
    most = options.max_model_tokens or longest_sequence(read_config(config.model.path)) or options.kv_tokens
    whole = -(-most // options.block_tokens) * options.block_tokens
    return options.model_copy(
        update={
            "backend": "native",
            "threads": None,
            "tensor_parallel": None,
            "max_running": 1,
            "kv_tokens": min(whole, options.kv_tokens),
            "cuda_graphs": False,
            "progress_every_tokens": 1,
        }
    )
