"""What crosses the boundary of an environment's process, and an episode as people and rewards read it. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, str]]  # {"role", "content"} each


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCall:
    """What the environment says after `actions`, the last of which it has not heard yet; none: when it begins.

    An environment is a function of record, seed and actions: whoever has it at another place, or not at all, plays the
    episode again up to there.
    """

    round: int  # episodes of an earlier one are over
    episode: int  # distinct in a round
    record: Mapping[str, Any]
    seed: int  # of the episode, in [0, 2**63)
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentAnswer:
    """What it said. `error`: it failed, and the episode with it."""

    observation: Messages = ()  # type: ignore[assignment]  # empty: nothing is put before the model's next turn
    reward: float = 0.0  # for the last action
    done: bool = False
    error: str | None = None
    trace: str | None = None  # the frames of the user's code, if that raised


@dataclass(frozen=True, slots=True)
class Said:
    """One part of an episode, in its order. role "assistant": the model's turn, with the reward that it got."""

    role: str
    text: str
    reward: float | None = None
