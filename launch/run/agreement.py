"""Check that sampler and learner agree on the log-probs of the sampled tokens. If not, stop the run and name the
worker.

Wrong weights or wrong numerics show here first, long before they show in the reward.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from actors.engine.capabilities import capabilities_of
from contracts.training import TrainSequence
from launch.config import Config
from launch.errors import PacelineError
from launch.precision import aligned

PER_WORKER = "logprob_gap/worker/"
# Limits on the mean over tokens of |engine - learner| at T = 1 (at the sampling temperature if the engine returns no
# other), by the coarser of their dtypes. Rounding gives about 1e-7 in float32 and 1e-2 in bfloat16. Weights that are
# one small optimizer step old can stay below: versions and checksums catch those.
DEFAULT_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
# Additional limits for low-bit rollouts whose products the learner does not compute: a hundred times the gap of a
# trained model (eight bits 2e-3, four 5e-3). The gap is then a metric, not a fault, and fresh weights have a larger one
# (0.4 in four bits).
LOW_BIT_LIMITS = {"w8a8": 0.25, "fp8": 1.0, "w4a8": 1.0, "w4a16": 1.0, "w3a8": 2.0, "w2a8": 10.0}

# Additional limit for responses of older weights. Their gap includes the policy's change, 0.01 to 0.1 at sensible
# learning rates. A mean of one nat is no policy update, or one that no importance weight corrects.
MOVED = 1.0
LEAST_TOKENS = 256  # of older weights, needed to judge a worker: a mean over fewer reflects a few surprises


def gap_limit(config: Config) -> float:
    """Return `rollout.max_logprob_gap`, or the default for the numerics of engine and learner."""
    coarse = "bfloat16" if config.learner.autocast_bf16 else config.model.dtype
    same = aligned(config) and capabilities_of(config).learner_network
    apart = 0.0 if same else LOW_BIT_LIMITS.get(config.rollout.quantization, 0.0)
    return config.rollout.max_logprob_gap or DEFAULT_LIMITS[coarse] + apart


def check_agreement(
    config: Config,
    step: int,
    metrics: Mapping[str, float],
    sequences: Sequence[TrainSequence] = (),
    *,
    stale: bool = False,
) -> None:
    """Raise PacelineError if some worker's mean gap (`logprob_gap/worker/<name>`) exceeds the limit, or is none.
    `stale`: `sequences` were sampled with older weights than they are compared under."""
    limit = gap_limit(config)
    if stale and config.rollout.max_logprob_gap is None:
        limit += MOVED
    gaps = {name.removeprefix(PER_WORKER): gap for name, gap in metrics.items() if name.startswith(PER_WORKER)}
    if stale:
        drawn = Counter[str]()
        for sequence in sequences:
            drawn[sequence.sampler] += len(sequence.response_tokens)
        gaps = {worker: gap for worker, gap in gaps.items() if drawn[worker] >= LEAST_TOKENS}
    wrong = {worker: gap for worker, gap in gaps.items() if not gap <= limit}
    if wrong:
        named = ", ".join(f"{worker}: {gap:.2g}" for worker, gap in sorted(wrong.items()))
        raise PacelineError(
            f"step {step}: log-probs of the sampled tokens differ between engine and learner by more than {limit:g} "
            f"on average ({named}; workers in all: {len(gaps)})",
            remedy="one worker: its weights are stale or its hardware is faulty, see its log; all: compare dtype and "
            "numerics of engine and learner, or raise rollout.max_logprob_gap",
        )
