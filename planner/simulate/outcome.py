"""The outcome of a simulated run. Plain data, and the definitions of reported numbers."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Limit = Literal["learner", "weights", "tail", "decoding", "interruptions", "checkpoints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One RL step, in seconds of the wall clock."""

    rollout_s: float
    tail_s: float  # part of it: from the first idle worker, while nothing waited, to the end
    stop_s: float  # until drafters' trainers had stopped
    grade_s: float
    learn_s: float
    weights_s: float
    checkpoint_s: float
    stall_s: float  # waiting for a lost learner
    responses: int
    tokens: int  # of responses
    longest: int
    idle_s: float  # of workers within the rollout: up, without work or training
    training_s: float  # of workers, drafter training
    quality: float  # of the trained drafter, as used

    @property
    def step_s(self) -> float:
        return sum(
            (self.rollout_s, self.stop_s, self.grade_s, self.learn_s, self.weights_s, self.checkpoint_s, self.stall_s)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run. Worker-seconds are those of all workers' places from the beginning to the end, whether up or not.

    ettr, the effective training time ratio (Kokolis et al. 2024, arXiv 2410.21680: productive over available time), in
    worker-seconds: 1 - (down_s + again_s + held_s) / (places * wall_s). Lost are: a drained or lost place until its
    successor is ready; tokens computed a second time; and all places while a checkpoint is written or the learner
    recovers. An idle worker in a tail is not lost: that is the step's shape, counted in `idle_share`. Other costs of
    interruptions, such as a longer tail, are only in `goodput`.
    """

    name: str
    gpus: int  # all GPUs
    workers: int
    steps: tuple[SimulatedStep, ...]
    wall_s: float
    step_s: float  # mean
    rollout_s: float
    tail_s: float
    learn_s: float
    weights_s: float
    tokens: int
    tokens_s: float
    idle_share: float  # of workers' seconds within rollouts
    training_share: float  # likewise, drafter training
    speculating_share: float  # of decoding seconds
    worker_hours: float
    gpu_hours: float  # paid GPU-hours
    cost: float
    cost_per_million: float  # response tokens
    interruptions: int
    moved: int  # requests moved to another worker
    learner_failures: int
    down_s: float  # worker-seconds, see above
    again_s: float
    held_s: float
    ettr: float
    goodput: float | None  # tokens/s relative to the same run undisturbed; None: not requested
    limit: Limit  # the largest part of a step
    headroom: dict[str, float]  # share of a step that would be saved if this cost nothing: see `headroom_of`
    events: int  # of the simulation

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def headroom_of(steps: tuple[SimulatedStep, ...], worker_rollout_s: float) -> dict[str, float]:
    """Return the headroom. Idle: rollouts as long as with all workers busy to their end. The others: their
    own seconds."""
    whole_s = sum(one.step_s for one in steps)
    rollout_s = sum(one.rollout_s for one in steps)
    idle_s = sum(one.idle_s + one.training_s for one in steps) / worker_rollout_s * rollout_s
    parts = {
        "learner": sum(one.learn_s for one in steps),
        "idle workers": idle_s,
        "weights": sum(one.weights_s for one in steps),
        "checkpoints": sum(one.checkpoint_s for one in steps),
        "lost learners": sum(one.stall_s for one in steps),
    }
    return {name: seconds / whole_s for name, seconds in parts.items()}


def limit_of(steps: tuple[SimulatedStep, ...]) -> Limit:
    parts: dict[Limit, float] = {
        "learner": sum(one.learn_s for one in steps),
        "weights": sum(one.weights_s for one in steps),
        "tail": sum(one.tail_s for one in steps),
        "decoding": sum(one.rollout_s - one.tail_s for one in steps),
        "interruptions": sum(one.stall_s for one in steps),
        "checkpoints": sum(one.checkpoint_s for one in steps),
    }
    return max(parts, key=parts.__getitem__)
