"""The `data:` section of the configuration. Names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from config.rules import Bounded, Different, NotWith, OnlyWith

_CHAT = OnlyWith("template", ("chat",))
_GENERATED = NotWith(
    "reasoning_gym",
    said="is set, and so is data.reasoning_gym, which is trained on instead",
    remedy="leave one out",
)


class PromptsOptions(BaseModel, frozen=True, extra="forbid"):
    """One of several sets of prompts; what it does not say is as the section `data` has it."""

    name: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", description="name in metrics, ids and messages")
    ]
    path: Annotated[str, Field(description="JSON lines (.jsonl, .jsonl.gz), Parquet file or dataset directory")]
    split: Annotated[str | None, Field(description="split of a dataset directory; default: as for a single set")] = None
    prompt_field: Annotated[str | None, Field(description="default: data.prompt_field")] = None
    answer_field: Annotated[str | None, Field(description="default: data.answer_field")] = None
    id_field: Annotated[str | None, Field(description="default: data.id_field")] = None
    source_field: Annotated[str | None, Field(description="default: data.source_field")] = None
    limit: Annotated[int | None, Field(ge=1, description="use its first N records only; default: data.limit")] = None


class TrainSetOptions(PromptsOptions, frozen=True, extra="forbid"):
    """A set to train on, and how much of it."""

    weight: Annotated[float, Field(gt=0, le=1e9, description="relative share of the prompts")] = 1.0


class ReasoningGymOptions(BaseModel, frozen=True, extra="forbid"):
    """Tasks from a data set of the package reasoning-gym, to train on and held out."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", description="name in metrics and ids")]
    dataset: Annotated[str | None, Field(description="reasoning-gym's name of the data set; default: name")] = None
    size: Annotated[int, Field(ge=1, le=100_000, description="number of training questions")] = 1000
    eval: Annotated[int, Field(ge=0, le=100_000, description="number of held-out questions; 0: none")] = 64
    weight: Annotated[float, Field(gt=0, le=1e9, description="relative share of the prompts")] = 1.0
    seed: Annotated[int, Field(ge=0, le=2**31, description="seed of the questions; held-out ones use seed + 1e6")] = 0
    config: Annotated[dict[str, Any], Field(description="the data set's own keys, e.g. {max_terms: 3}")] = {}

    @property
    def source(self) -> str:
        """The data set's name in reasoning-gym."""
        return self.dataset or self.name


class SuccessOptions(BaseModel, frozen=True, extra="forbid"):
    """Success rate of each training prompt, known before the run."""

    field: Annotated[str | None, Field(description="record field with the success rate, from 0 to 1")] = None
    file: Annotated[
        str | None,
        Field(description="eval_prompts.jsonl of a `paceline eval` of these prompts, matched by id"),
        NotWith("field"),
    ] = None
    min: Annotated[
        float,
        Field(ge=0, le=1, description="leave out prompts that were solved less often"),
        Bounded("<=", "max", remedy="lower it"),
    ] = 0.0
    max: Annotated[float, Field(ge=0, le=1, description="leave out prompts that were solved more often")] = 1.0

    @property
    def known(self) -> bool:
        return self.field is not None or self.file is not None


PROMPTS_ONLY = (
    "source_field",
    "sets",
    "reasoning_gym",
    "success",
)  # keys of DataOptions that do not affect texts and tokens


class DataOptions(BaseModel, frozen=True, extra="forbid"):
    """Where prompts come from and how they become tokens."""

    train: Annotated[
        str | None,
        Field(description="JSON lines (.jsonl, .jsonl.gz), Parquet file or dataset directory"),
        _GENERATED,
    ] = None
    sets: Annotated[
        tuple[TrainSetOptions, ...],
        Field(description="Several named training sets, in place of data.train."),
        NotWith(
            "train",
            said="is set, and data.train is one set beside them",
            remedy="make it one of data.sets, or leave it out",
        ),
        _GENERATED,
        Different("name", "sets"),
    ] = ()
    reasoning_gym: Annotated[
        tuple[ReasoningGymOptions, ...],
        Field(description="Generated tasks for training and evaluation, in place of data.train and data.sets."),
    ] = ()
    success: SuccessOptions = SuccessOptions()
    eval: Annotated[str | None, Field(description="held-out prompts, in the same forms")] = None
    train_split: Annotated[str | None, Field(description="split of a dataset directory; default: train")] = None
    eval_split: Annotated[
        str | None,
        Field(description="split of a directory; default: test, validation, ..."),
    ] = None
    prompt_field: Annotated[str, Field(description="record field with a text or a list of messages")] = "prompt"
    answer_field: Annotated[str, Field(description="record field that is passed to the reward")] = "answer"
    id_field: Annotated[str | None, Field(description="record field with a unique id; default: line number")] = None
    source_field: Annotated[
        str | None,
        Field(description="record field with a prompt's source, for evaluations"),
    ] = None
    system_prompt: Annotated[str | None, Field(description="prepended as a system message"), _CHAT] = None
    template: Annotated[
        Literal["chat", "plain"], Field(description="chat: apply the chat template; plain: keep the text")
    ] = "chat"
    chat_template: Annotated[str | None, Field(description="Jinja template in place of the tokenizer's"), _CHAT] = None
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Field(description="variables that the chat template reads, e.g. {enable_thinking: false}"),
        _CHAT,
    ] = {}
    max_prompt_tokens: Annotated[int, Field(ge=1, description="tokens; longer prompts are dropped and counted")] = 1024
    on_bad_line: Annotated[Literal["fail", "skip"], Field(description="what a malformed record does")] = "fail"
    shuffle: Annotated[bool, Field(description="shuffle every epoch, by run.seed")] = True
    limit: Annotated[int | None, Field(ge=1, description="use the first N records only; default: all")] = None
