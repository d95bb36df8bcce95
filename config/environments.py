"""The `environment:` section of the configuration. Owns names and ranges only; imports neither torch nor ray."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from config.rules import Bounded, NamesCode, NotWith, OnlyWith


class EnvironmentOptions(BaseModel, frozen=True, extra="forbid"):
    """What answers the model, turn by turn: an environment of the user's, or tools (docs/howto/turns_and_tools.md)."""

    factory: Annotated[
        str | None,
        Field(description="'package.module:Class', or a function, that makes an episode's environment"),
        NamesCode(),
    ] = None
    options: Annotated[
        dict[str, Any],
        Field(description="keyword arguments of the factory"),
        NotWith("tools", said="are a factory's; tools take none", remedy="leave them out"),
    ] = {}
    tools: Annotated[
        tuple[str, ...],
        Field(description="'package.module:function' each: tools that the model may call, in place of a factory"),
        NamesCode(),
    ] = ()
    tool_format: Annotated[
        Literal["auto", "hermes"],
        Field(description="how calls are written; auto: as the chat template says, hermes for data.template=plain"),
        OnlyWith("tools", said="is only used with tools", remedy="leave it out"),
    ] = "auto"
    max_turns: Annotated[int, Field(ge=1, le=10_000, description="the model's turns in an episode at most")] = 8
    max_turn_tokens: Annotated[
        int | None,
        Field(ge=1, description="of one turn; default: what rollout.sampling.max_new_tokens leaves"),
        Bounded(
            "<=",
            "rollout.sampling.max_new_tokens",
            said="{value} is more than rollout.sampling.max_new_tokens = {other}, of a whole episode",
            remedy="lower it, or leave it out",
        ),
    ] = None
    max_observation_tokens: Annotated[
        int, Field(ge=1, description="of the text of one observation; what is beyond is cut off")
    ] = 512
    workers: Annotated[int, Field(ge=1, le=10_000, description="processes that play episodes")] = 1
    timeout_s: Annotated[float, Field(gt=0, description="a reset or a step that takes longer has failed")] = 10.0
    max_failures_per_step: Annotated[
        int, Field(ge=0, description="episodes whose environment may fail before the run stops")
    ] = 8
