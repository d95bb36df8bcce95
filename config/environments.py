"""The `environment:` section of the configuration. Names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from config.rules import Bounded, NamesCode, NotWith, OnlyWith


class EnvironmentOptions(BaseModel, frozen=True, extra="forbid"):
    """Your environment, or tools, for responses of several turns (docs/howto/turns_and_tools.md)."""

    factory: Annotated[
        str | None,
        Field(description="package.module:NAME that makes an episode's environment"),
        NamesCode(),
    ] = None
    options: Annotated[
        dict[str, Any],
        Field(description="keyword arguments of the factory"),
        NotWith("tools", said="are a factory's; tools take none", remedy="leave them out"),
    ] = {}
    tools: Annotated[
        tuple[str, ...],
        Field(description="in place of factory: functions that the model may call, package.module:NAME"),
        NamesCode(),
    ] = ()
    tool_format: Annotated[
        Literal["auto", "hermes"],
        Field(description="syntax of calls; auto: the chat template's, hermes for data.template=plain"),
        OnlyWith("tools", said="is only used with tools", remedy="leave it out"),
    ] = "auto"
    max_turns: Annotated[int, Field(ge=1, le=10_000, description="turns of an episode at most")] = 8
    max_turn_tokens: Annotated[
        int | None,
        Field(ge=1, description="tokens of one turn at most; default: the rest of rollout.sampling.max_new_tokens"),
        Bounded(
            "<=",
            "rollout.sampling.max_new_tokens",
            said="{value} is more than rollout.sampling.max_new_tokens = {other}, of a whole episode",
            remedy="lower it, or leave it out",
        ),
    ] = None
    max_observation_tokens: Annotated[
        int, Field(ge=1, description="tokens of one observation; longer ones are cut")
    ] = 512
    workers: Annotated[int, Field(ge=1, le=10_000, description="processes that run episodes")] = 1
    timeout_s: Annotated[float, Field(gt=0, description="a reset or step that takes longer has failed")] = 10.0
    max_failures_per_step: Annotated[
        int, Field(ge=0, description="failed episodes per RL step before the run stops")
    ] = 8
