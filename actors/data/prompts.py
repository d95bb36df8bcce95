"""Load prompts for sampling and demonstrations for training. Applies the `data:` options to records, and counts the
ones left out; file formats, templates and order are in other modules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from actors.data.errors import DataError
from actors.data.files import resolve
from actors.data.readers import BadRecord, Record, read_file
from actors.data.success import SuccessRates, rates
from actors.data.templates import BadPromptError, Template, make_template
from actors.data.tokenizers import Tokenizer
from config.data import DataOptions, PromptsOptions
from config.learner import WarmupOptions
from contracts.training import Demonstration

_EXAMPLES = 5  # bad records quoted in a report
MAX_SOURCES = 64  # of one set
_COUNTS = ("records", "used", "too_long", "bad", "by_success")  # of a LoadReport
_OWN = ("prompt_field", "answer_field", "id_field", "source_field", "limit")  # options that a set may override


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt."""

    prompt_id: int  # its index in the PromptSet
    uid: str  # data.id_field, else "<set>/<0-based record number>": independent of skipped records
    text: str  # as the model sees it, with the template
    tokens: NDArray[np.int32]  # [L], L <= data.max_prompt_tokens
    record: dict[str, Any]  # all fields, with data.answer_field also under "answer"
    where: str = ""  # "train.jsonl, line 3", with the full path
    source: str = ""  # data.source_field
    raw: Any = None  # data.prompt_field, as in the record
    set: str = ""  # name of its set, if there are several training sets
    success: float | None = None  # success rate before this run, 0 to 1 (data.success)

    @property
    def asked(self) -> str:
        """`raw` as readable text: the text, or the last message's; `text` if it is neither."""
        last = self.raw[-1] if isinstance(self.raw, list) and self.raw else self.raw
        said = last.get("content") if isinstance(last, dict) else last
        return said if isinstance(said, str) else self.text


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """Counts of one split's records: used and left out."""

    records: int = 0  # read, including bad ones
    used: int = 0
    too_long: int = 0  # prompts above data.max_prompt_tokens, dropped
    bad: int = 0  # skipped under data.on_bad_line=skip
    by_success: int = 0  # dropped because of their success rate (data.success)
    bad_examples: list[str] = field(default_factory=list)  # the first few, with file and line

    def summary(self) -> str:
        """Return one line for the log."""
        return (
            f"{self.used} of {self.records} records used; {self.too_long} prompts too long, "
            f"{self.bad} bad records skipped"
            + (f", {self.by_success} left out for their success rate" if self.by_success else "")
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One of several sets in a PromptSet."""

    name: str
    weight: float
    report: LoadReport


@dataclass(frozen=True, slots=True)
class PromptSet(Sequence[Prompt]):
    """The usable prompts of one split, in file order; with data.sets one set after another."""

    prompts: list[Prompt]
    report: LoadReport
    sets: tuple[Part, ...] = ()  # its sets; empty: it is data.train, data.eval or a held-out set

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        return self.prompts[index]

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(
    options: DataOptions, split: Literal["train", "eval"], tokenizer: Tokenizer, tools: Sequence[dict[str, Any]] = ()
) -> PromptSet:
    """Load the prompts of data.train or data.sets, or of data.eval. Raises DataError if a file is missing or damaged,
    or nothing is usable. `tools`: see `make_template`."""
    if split == "train" and options.sets:
        return _mixture(options, tokenizer, tools)
    if options.reasoning_gym:
        raise DataError("data.reasoning_gym: its files are not made yet; launch.config.hub.converted makes them")
    path = options.train if split == "train" else options.eval
    if path is None:
        raise DataError(f"data.{split} is not set: there are no such prompts")
    return load_set(options, PromptsOptions(name=split, path=path), f"data.{split}", split, tokenizer, tools)


def load_set(
    options: DataOptions,
    one: PromptsOptions,
    key: str,
    split: Literal["train", "eval"],
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]] = (),
) -> PromptSet:
    """Load the prompts of one set, whose path is the value of `key`. Raises DataError as load_prompts."""
    if not one.path:
        raise DataError(f"{key}: its files are not made yet; launch.config.hub.converted makes them")
    known = rates(options.success) if split == "train" else SuccessRates()
    own = {name: value for name in _OWN if (value := getattr(one, name)) is not None}
    options = options.model_copy(update=own | ({f"{split}_split": one.split} if one.split else {}))
    template = make_template(options, tokenizer, tools)
    report = LoadReport()
    prompts: list[Prompt] = []
    uids: set[str] = set()
    for record in _records(one.path, _splits(options, split), key, options, report):
        try:
            text, tokens = _prompt(record.fields, options, template)
            uid = _uid(record.fields, f"{one.name}/{report.records - 1}", options)
            if uid in uids:
                raise BadPromptError(f"data.id_field: the id {uid!r} occurs a second time")
            fields = _with_answer(record.fields, options)
            source = _source(record.fields, options)
            success = known.of(record.fields, uid)
        except BadPromptError as error:
            _bad(BadRecord(str(error), record.where), options, report)
            continue
        uids.add(uid)
        if len(tokens) > options.max_prompt_tokens:
            report.too_long += 1
            continue
        if not known.wanted(success):
            report.by_success += 1
            continue
        prompts.append(
            Prompt(
                prompt_id=len(prompts),
                uid=uid,
                text=text,
                tokens=tokens,
                record=fields,
                where=record.where,
                source=source,
                raw=record.fields[options.prompt_field],
                success=success,
            )
        )
    report.used = len(prompts)
    _require_some(report, one.path, key, options)
    if len(sources := {prompt.source for prompt in prompts}) > MAX_SOURCES:
        raise DataError(
            f"data.source_field: {options.source_field!r} has {len(sources)} values in {one.path}, and each would be a "
            f"metric of its own; choose a field with {MAX_SOURCES} at most"
        )
    return PromptSet(prompts, report)


def _mixture(options: DataOptions, tokenizer: Tokenizer, tools: Sequence[dict[str, Any]]) -> PromptSet:
    """Load data.sets; `prompt_id` is unique across all of them."""
    prompts: list[Prompt] = []
    parts: list[Part] = []
    for index, one in enumerate(options.sets):
        found = load_set(options, one, f"data.sets.{index}.path", "train", tokenizer, tools)
        prompts += [replace(prompt, prompt_id=len(prompts) + i, set=one.name) for i, prompt in enumerate(found)]
        parts.append(Part(one.name, one.weight, found.report))
    return PromptSet(prompts, merged([part.report for part in parts]), tuple(parts))


def merged(reports: Sequence[LoadReport]) -> LoadReport:
    """Merge the reports of several sets."""
    counts = {name: sum(getattr(report, name) for report in reports) for name in _COUNTS}
    return LoadReport(**counts, bad_examples=[text for report in reports for text in report.bad_examples][:_EXAMPLES])


def load_demonstrations(
    warmup: WarmupOptions,
    options: DataOptions,
    tokenizer: Tokenizer,
    *,
    tools: Sequence[dict[str, Any]] = (),
    limit: int | None = None,
) -> tuple[list[Demonstration], LoadReport]:
    """The usable demonstrations of warmup.data, in file order: prompts through the same template, responses with the
    end-of-text token. A list as the response is an episode: the model's turns, and between two of them what was
    observed, text or messages.

    A response that is a list is an episode: the model's turns, with observations (text or messages) between them.
    limit: use only this many first records; data.limit does not apply.
    """
    template = make_template(options, tokenizer, tools)
    report = LoadReport()
    demonstrations: list[Demonstration] = []
    own = options.model_copy(update={"limit": limit})
    for record in _records(warmup.data, ["train"], "warmup.data", own, report):
        try:
            _, tokens = _prompt(record.fields, options, template)
            response = _get(record.fields, warmup.response_field, "warmup.response_field")
            encoded, drawn = _demonstrated(response, warmup.response_field, template)
        except BadPromptError as error:
            _bad(BadRecord(str(error), record.where), options, report)
            continue
        if len(tokens) > options.max_prompt_tokens:
            report.too_long += 1
            continue
        demonstrations.append(Demonstration(tokens, encoded, drawn))
    report.used = len(demonstrations)
    _require_some(report, warmup.data, "warmup.data", options)
    return demonstrations, report


def _demonstrated(response: Any, name: str, template: Template) -> tuple[NDArray[np.int32], NDArray[np.bool_] | None]:
    """Return the tokens of a demonstrated response, and the mask of the model's tokens; None: all."""
    parts = response if isinstance(response, list) else [response]
    if len(parts) % 2 == 0 or not all(isinstance(turn, str) and turn for turn in parts[::2]):
        raise BadPromptError(
            f"{name!r} must be text, or turns and observations in alternation that begin and end with a turn "
            f"(warmup.response_field), not {response!r:.80}"
        )
    if len(parts) == 1:
        return template.encode_response(response if isinstance(response, str) else parts[0]), None
    tokens, drawn = list[NDArray[np.int32]](), list[NDArray[np.bool_]]()
    for index, part in enumerate(parts):
        said = index % 2 == 0
        observed = [{"role": "user", "content": part}] if isinstance(part, str) else part
        tokens.append(
            template.encode_response(part) if said else template.encode_between(observed, int(tokens[-1][-1]))
        )
        drawn.append(np.full(len(tokens[-1]), said))
    return np.concatenate(tokens), np.concatenate(drawn)


def _splits(options: DataOptions, split: str) -> list[str]:
    if split == "train":
        return [options.train_split] if options.train_split else ["train"]
    return [options.eval_split] if options.eval_split else ["test", "validation", "valid", "val", "dev", "eval"]


def _records(path: str, splits: Sequence[str], key: str, options: DataOptions, report: LoadReport) -> Iterator[Record]:
    """Yield readable records of all files, at most data.limit of them (bad ones count too)."""
    for file in resolve(path, splits, key):
        for record in read_file(file):
            if options.limit is not None and report.records >= options.limit:
                return
            report.records += 1
            if isinstance(record, BadRecord):
                _bad(record, options, report)
            else:
                yield record


def _bad(record: BadRecord, options: DataOptions, report: LoadReport) -> None:
    if options.on_bad_line == "fail":
        raise DataError(f"{record.where}: {record.reason} (data.on_bad_line=skip leaves such records out)")
    report.bad += 1
    if len(report.bad_examples) < _EXAMPLES:
        report.bad_examples.append(f"{record.where}: {record.reason}")


def _get(fields: dict[str, Any], name: str, key: str) -> Any:
    """Return a field; a dot leads into nested fields, as in `reward_model.ground_truth`."""
    found: Any = fields
    for part in [name] if name in fields else name.split("."):
        if not isinstance(found, dict) or part not in found:
            there = ", ".join(sorted(fields)) or "no fields"
            raise BadPromptError(f"no field {name!r} ({key}); the record has {there}")
        found = found[part]
    return found


def _prompt(fields: dict[str, Any], options: DataOptions, template: Template) -> tuple[str, NDArray[np.int32]]:
    text = template.render(_get(fields, options.prompt_field, "data.prompt_field"))
    tokens = template.encode(text)
    if not len(tokens):
        raise BadPromptError(f"the prompt in {options.prompt_field!r} is empty")
    return text, tokens


def _uid(fields: dict[str, Any], default: str, options: DataOptions) -> str:
    return default if options.id_field is None else str(_get(fields, options.id_field, "data.id_field"))


def _source(fields: dict[str, Any], options: DataOptions) -> str:
    if options.source_field is None:
        return ""
    return str(_get(fields, options.source_field, "data.source_field")).strip() or "none"


def _with_answer(fields: dict[str, Any], options: DataOptions) -> dict[str, Any]:
    """Return the fields with the answer under "answer". The default name may be absent: not every reward needs an
    answer."""
    if options.answer_field == "answer":
        return fields
    return {**fields, "answer": _get(fields, options.answer_field, "data.answer_field")}


def _require_some(report: LoadReport, path: str, key: str, options: DataOptions) -> None:
    if report.used == 0:
        raise DataError(
            f"{key}: {path} has nothing to use ({report.summary()}; data.max_prompt_tokens={options.max_prompt_tokens})"
            + "".join(f"\n  {example}" for example in report.bad_examples)
        )
