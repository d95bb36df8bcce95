"""The `reward:` section of the configuration. Names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from config.rules import Different, NamesCode, NotWith, OnlyWith, RequiredWith

_PYTHON, _JUDGE = OnlyWith("kind", ("python",)), OnlyWith("kind", ("judge",))
_CALLED = OnlyWith("kind", ("python", "judge"))


class RewardTerm(BaseModel, frozen=True, extra="forbid"):
    """One summand of the reward."""

    kind: Annotated[
        Literal["math", "code", "format", "python", "judge", "environment", "reasoning_gym"],
        Field(description="who grades (docs/howto/rewards.md)"),
    ]
    name: Annotated[
        str | None,
        Field(pattern=r"^[\w.-]+$", description="name in metrics; required if two terms have one kind"),
    ] = None
    weight: Annotated[float, Field(allow_inf_nan=False, description="factor in the sum")] = 1.0
    answer: Annotated[
        Literal["last", "first"],
        Field(description="math, code: which \\boxed or closed fence counts; default: last, with rollout.abort first"),
        OnlyWith("kind", ("math", "code")),
    ] = "last"
    fallback: Annotated[
        Literal["none", "gsm8k", "answer_line", "last_number", "auto"],
        Field(description="math, reasoning_gym: answer where none is marked (docs/howto/rewards.md)"),
        OnlyWith("kind", ("math", "reasoning_gym")),
        NotWith(
            "kind", ("math",), own="auto", said="only kind reasoning_gym uses auto", remedy="set it to last_number"
        ),
    ] = "none"
    pattern: Annotated[
        str | None,
        Field(description="format: regular expression; judge: its first group is the score, default 'Score: NUMBER'"),
        OnlyWith("kind", ("format", "judge")),
        RequiredWith("kind", "format"),
    ] = None
    function: Annotated[
        str | None,
        Field(description="python: package.module:NAME of a function or class"),
        _PYTHON,
        RequiredWith("kind", "python"),
        NamesCode("function"),
    ] = None
    arguments: Annotated[
        dict[str, Any],
        Field(description="python: further keyword arguments; judge: further fields of the request"),
        _CALLED,
    ] = {}
    batch_size: Annotated[
        int | None,
        Field(ge=1, description="python: responses per call, as lists; null: one, without a list"),
        _PYTHON,
    ] = None
    concurrency: Annotated[
        int,
        Field(ge=1, le=10_000, description="judge, async python: calls at once"),
        _CALLED,
    ] = 32
    cpus: Annotated[
        float,
        Field(ge=0, le=4096, description="python: CPUs of the term's own actor"),
        _PYTHON,
    ] = 0.0
    gpus: Annotated[
        float,
        Field(ge=0, le=1024, description="python: GPUs of the term's own actor"),
        _PYTHON,
    ] = 0.0
    url: Annotated[
        str | None,
        Field(pattern=r"^https?://", description="judge: URL of the OpenAI-compatible endpoint, with /v1"),
        _JUDGE,
        RequiredWith("kind", "judge"),
    ] = None
    model: Annotated[
        str | None,
        Field(description="judge: name of the model at the endpoint"),
        _JUDGE,
        RequiredWith("kind", "judge"),
    ] = None
    template: Annotated[
        str | None,
        Field(description="judge: the question, with {prompt}, {response} and fields such as {record[answer]}"),
        _JUDGE,
        RequiredWith("kind", "judge"),
    ] = None
    retries: Annotated[
        int,
        Field(ge=0, le=100, description="judge: retries after timeouts, lost connections, 408, 409, 425, 429 and 5xx"),
        _JUDGE,
    ] = 5
    key_env: Annotated[
        str | None,
        Field(description="judge: environment variable with the endpoint's key"),
        _JUDGE,
    ] = None
    prefix_sufficient: Annotated[
        bool,
        Field(description="python: the value is final once the answer (rollout.abort.marker) is complete"),
        _PYTHON,
    ] = False
    timeout_s: Annotated[
        float, Field(gt=0, description="a call that takes longer has failed; judge: one request, default 60")
    ] = 10.0
    memory_mb: Annotated[
        int,
        Field(ge=16, description="code: memory of the tested program, MiB"),
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
        Field(min_length=1, description="The reward is the weighted sum of its terms."),
        Different("label", "terms"),
    ] = (RewardTerm(kind="math"),)
    right_from: Annotated[
        float, Field(allow_inf_nan=False, description="a response with at least this reward counts as correct (pass@k)")
    ] = 1.0
    workers: Annotated[int, Field(ge=1, le=10_000, description="reward workers (processes)")] = 1
    max_failures_per_step: Annotated[int, Field(ge=0, description="failed grades per RL step before the run stops")] = 8
