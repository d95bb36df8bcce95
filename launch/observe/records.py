"""Records of a run. Plain data; written by the training loop, read by files, views and reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from contracts.environments import Said
from launch.observe.drafter import TRAIN_SPAN, StepDrafter
from launch.observe.speculation import StepSpeculation

T = TypeVar("T")
PHASES = ("rollout", "reward_wait", "learn", "publish", "sync")  # parts of seconds["step"]
SPAN_KINDS = (
    "decode",
    "early",
    "idle",
    TRAIN_SPAN,
    "load_weights",
    "train",
    "logprobs",
    "publish",
    "checkpoint",
    "grade",
    "restart",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One RL step, complete. Step numbers start at 1."""

    step: int
    metrics: Mapping[str, float]  # "reward/mean", "tokens_per_s", ...; see docs/reference/metrics.md
    seconds: Mapping[str, float]  # per phase (PHASES) and "step", the total
    lengths: Sequence[int] = ()  # response lengths in tokens; gives length/* if metrics lack them
    # (weights version, tokens sampled with it) of each response; empty: all are of the step's own version
    versions: Sequence[Sequence[tuple[int, int]]] = ()
    speculation: StepSpeculation | None = None  # gives speculation/* and speculation.jsonl; None: it is off
    rollouts_per_prompt: Sequence[int] = ()  # requested, by prompt; gives budget.jsonl; empty: no budget, no abort
    drafter: StepDrafter | None = None  # gives drafter/* and drafter.jsonl; None: no drafter is trained


@dataclass(frozen=True, slots=True)
class Span:
    """A span: `actor` did `kind` (SPAN_KINDS) from start_s to end_s, in seconds since the epoch, for RL step `step`."""

    actor: str
    kind: str
    start_s: float
    end_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A graded response in readable form."""

    prompt: str
    response: str
    reward: float
    tokens: int
    finish_reason: str
    answer: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)  # reward by term
    notes: Sequence[str] = ()  # reasons for the score: "math: no answer in the response"
    error: str | None = None  # why grading failed
    uid: str = ""  # of the prompt: data.id_field, else set and record number
    set: str = ""  # the held-out set; empty: a training response
    version: int | None = None  # of the weights that sampled it: number of RL steps done
    turns: Sequence[Said] = ()  # of an episode, after the prompt; `response` is the model's part of it
    asked: str = ""  # the record's question within `prompt`: no template or system prompt
    sample: int | None = None  # of an evaluation: index of the response to its prompt; equal ones have equal noise


def evenly(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` values, evenly spread from the first to the last."""
    count = min(count, len(values))
    return [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]


def length_metrics(lengths: Sequence[int]) -> dict[str, float]:
    """Return length/mean, p50, p90, p99 and max of response lengths, in tokens. Empty without lengths."""
    if len(lengths) == 0:
        return {}
    values = np.asarray(lengths, dtype=np.float64)
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
    return {
        "length/mean": float(values.mean()),
        "length/p50": float(p50),
        "length/p90": float(p90),
        "length/p99": float(p99),
        "length/max": float(values.max()),
    }
