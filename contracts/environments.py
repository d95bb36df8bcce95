"""Messages to and from an environment's process, and an episode as people and rewards read it. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, str]]  # {"role", "content"} each


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentCall:
    """Request the environment's response to `actions`, of which it has not seen the last; no actions: its start.

    An environment is a function of record, seed and actions. A process that holds the episode at another point, or not
    at all, replays it up to there.
    """

    round: int  # episodes of an earlier round are over
    episode: int  # unique in a round
    record: Mapping[str, Any]
    seed: int  # of the episode, in [0, 2**63)
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentAnswer:
    """The environment's response. If `error` is set, the environment failed, and the episode with it."""

    observation: Messages = ()  # type: ignore[assignment]  # empty: nothing is put before the model's next turn
    reward: float = 0.0  # for the last action
    done: bool = False
    error: str | None = None
    trace: str | None = None  # stack frames of the user's code, if it raised


@dataclass(frozen=True, slots=True)
class Said:
    """One part of an episode, in order. role "assistant": the model's turn, with its reward."""

    role: str
    text: str
    reward: float | None = None
