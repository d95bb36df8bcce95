"""The `reward:` section of the configuration. Owns names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from config.rules import Different, NamesCode, NotWith, OnlyWith, RequiredWith

_PYTHON, _JUDGE = OnlyWith("kind", ("python",)), OnlyWith("kind", ("judge",))
_CALLED = OnlyWith("kind", ("python", "judge"))


class RewardTerm(BaseModel, frozen=True, extra="forbid"):
    """One summand of the reward."""

    kind: Annotated[
        Literal["math", "code", "format", "python", "judge", "environment", "reasoning_gym"],
        Field(
            description="math: math-verify; code: unit tests; format: a pattern; python: your function or class; "
            "judge: a language model behind an OpenAI-compatible endpoint; environment: the sum of what it gave the "
            "turns; reasoning_gym: the data set's own scorer"
        ),
    ]
    name: Annotated[
        str | None,
        Field(pattern=r"^[\w.-]+$", description="what metrics call the term; needed if two are of one kind"),
    ] = None
    weight: Annotated[float, Field(allow_inf_nan=False, description="factor of this term in the sum")] = 1.0
    answer: Annotated[
        Literal["last", "first"],
        Field(
            description="math, code: which \\boxed, or closed fence, of a response counts; first: for responses that "
            "are stopped at it, default with rollout.abort"
        ),
        OnlyWith("kind", ("math", "code")),
    ] = "last"
    fallback: Annotated[
        Literal["none", "gsm8k", "answer_line", "last_number", "auto"],
        Field(
            description="math without \\boxed, reasoning_gym without <answer>: no answer, the last '####' line, "
            "'Answer:' line or number; auto, of reasoning_gym: the last number where the right answer is one, else all "
            "of the response"
        ),
        OnlyWith("kind", ("math", "reasoning_gym")),
        NotWith(
            "kind", ("math",), own="auto", said="only kind reasoning_gym uses auto", remedy="set it to last_number"
        ),
    ] = "none"
    pattern: Annotated[
        str | None,
        Field(
            description="format: regular expression the response must contain; judge: one whose last match in the "
            "reply has the score as its first group, default 'Score: NUMBER'"
        ),
        OnlyWith("kind", ("format", "judge")),
        RequiredWith("kind", "format"),
    ] = None
    function: Annotated[
        str | None,
        Field(description="python: 'package.module:function', or a class with `score` or `__call__`"),
        _PYTHON,
        RequiredWith("kind", "python"),
        NamesCode("function"),
    ] = None
    arguments: Annotated[
        dict[str, Any],
        Field(
            description="python: further keyword arguments, of a class those it is made with; judge: further fields of "
            "the request, as max_tokens"
        ),
        _CALLED,
    ] = {}
    batch_size: Annotated[
        int | None,
        Field(ge=1, description="python: responses of a call, which gets lists and returns a list; null: one, no list"),
        _PYTHON,
    ] = None
    concurrency: Annotated[
        int,
        Field(ge=1, le=10_000, description="judge, python that is async: calls under way at once"),
        _CALLED,
    ] = 32
    cpus: Annotated[
        float,
        Field(ge=0, le=4096, description="python: CPUs of the term's own actor"),
        _PYTHON,
    ] = 0.0
    gpus: Annotated[
        float,
        Field(ge=0, le=1024, description="python: GPUs of the term's own actor, beside those of workers and learner"),
        _PYTHON,
    ] = 0.0
    url: Annotated[
        str | None,
        Field(pattern=r"^https?://", description="judge: the endpoint, up to and with /v1 or the like"),
        _JUDGE,
        RequiredWith("kind", "judge"),
    ] = None
    model: Annotated[
        str | None,
        Field(description="judge: the model's name at the endpoint"),
        _JUDGE,
        RequiredWith("kind", "judge"),
    ] = None
    template: Annotated[
        str | None,
        Field(description="judge: what it is asked, with {prompt}, {response} and fields such as {record[answer]}"),
        _JUDGE,
        RequiredWith("kind", "judge"),
    ] = None
    retries: Annotated[
        int,
        Field(ge=0, le=100, description="judge: after a timeout, a lost connection, a status of 408, 429 or 5xx"),
        _JUDGE,
    ] = 5
    key_env: Annotated[
        str | None,
        Field(description="judge: environment variable, where the run is started, with the endpoint's key"),
        _JUDGE,
    ] = None
    prefix_sufficient: Annotated[
        bool,
        Field(
            description="python: its value is fixed as soon as the answer that rollout.abort.marker names is complete"
        ),
        _PYTHON,
    ] = False
    timeout_s: Annotated[
        float, Field(gt=0, description="a call that takes longer has failed; of a judge one request, by default 60")
    ] = 10.0
    memory_mb: Annotated[
        int,
        Field(ge=16, description="code: address space of the tested program"),
        OnlyWith("kind", ("code",)),
    ] = 1024

    @property
    def label(self) -> str:
        """The term's name in metrics, parts and messages."""
        return self.name or self.kind


class RewardOptions(BaseModel, frozen=True, extra="forbid"):
    """How responses are graded."""

    terms: Annotated[
        tuple[RewardTerm, ...],
        Field(min_length=1, description="summed with their weights"),
        Different("label", "terms"),
    ] = (RewardTerm(kind="math"),)
    right_from: Annotated[
        float, Field(allow_inf_nan=False, description="a response of at least this reward is a right one (pass@k)")
    ] = 1.0
    workers: Annotated[int, Field(ge=1, le=10_000, description="reward workers (processes)")] = 1
    max_failures_per_step: Annotated[
        int, Field(ge=0, description="rollouts whose grading may fail before the run stops")
    ] = 8
