"""Advantages of whole responses. Owns the formulas and the report of groups without signal.

Pure numpy on the driver. It never drops a group: the driver does, and counts it (`groups/zero_variance`).

A *group* is the responses to one prompt; groups of one batch may differ in size. An estimator combines a baseline,
subtracted from the reward, and a normalisation (`objective.baseline`, `objective.normalize`):

| estimator            | baseline      | normalize |
| GRPO                 | group         | group     |
| Dr. GRPO             | group         | none      |
| RLOO                 | leave_one_out | none      |
| REINFORCE            | batch or none | none      |
| REINFORCE++          | none          | whiten    |
| REINFORCE++-baseline | group         | whiten    |
| "Lite PPO" (Liu et al. 2025, arXiv 2508.08221), TRL's scale_rewards=batch | group | batch |

All score the response, not its tokens: each token has the advantage of its response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from config.objective import Baseline, Normalize

EPSILON = 1e-6  # added to the std: keeps the quotient finite; relative change of an advantage: EPSILON / std
TIE = 1e-9  # rewards closer than this, relative to max(1, |reward|), are equal: their spread is rounding, not signal
VARIANCE_EPSILON = 1e-8  # added to the variance by `whiten`, as verl and slime do


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages of one group (the responses to one prompt), in the order of the rewards."""

    advantages: NDArray[np.float64]  # [n]; with a group baseline all zero if zero_variance
    mean: float
    std: float  # with n - 1 in the denominator; 0 for one response
    zero_variance: bool  # all rewards equal, or only one: no signal in the group alone


def group_advantages(
    rewards: Sequence[float],
    *,
    normalize_std: bool,
    baseline: Literal["group", "leave_one_out"] = "group",
    epsilon: float = EPSILON,
) -> GroupAdvantages:
    """A_i = r_i - b_i, divided by (std(r) + epsilon) if `normalize_std`; std uses n - 1, as in TRL and verl.

    - baseline "group": b_i = mean(r). Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2, outcome supervision;
      without the division it is Dr. GRPO's (Liu et al. 2025). Since r_i is in its own baseline, the expected gradient
      is (n - 1) / n of the true one without the division. With the division it is no multiple of the true one.
    - baseline "leave_one_out": b_i = mean of the other n - 1 rewards, so A_i = n / (n - 1) * (r_i - mean(r)). Source:
      Kool et al. 2019; Ahmadian et al. 2024 (RLOO), arXiv 2402.14740, section 3.2. Unbiased for any n, undivided.

    If all rewards are equal, or there is only one, all advantages are 0. For a group of one, verl uses its reward as
    the advantage; without a baseline that pushes every token of the response, so nothing is learned from it here.
    Raises ValueError for an empty group and for a reward that is not finite (naming its index).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"a group needs at least one reward, in one dimension; got shape {values.shape}")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"reward {index} of the group is {values[index]}; rewards must be finite")
    mean = float(values.mean())
    if has_zero_variance(values):
        return GroupAdvantages(np.zeros_like(values), mean, 0.0, True)
    std = float(values.std(ddof=1))
    match baseline:
        case "group":
            advantages = values - mean
        case "leave_one_out":
            advantages = values - (values.sum() - values) / (values.size - 1)
        case _:
            assert_never(baseline)
    return GroupAdvantages(advantages / (std + epsilon) if normalize_std else advantages, mean, std, False)


def batch_advantages(
    groups: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]] | None = None,
    *,
    baseline: Baseline,
    normalize: Normalize,
) -> list[GroupAdvantages]:
    """Return the advantages of every group of a batch, in order. `mean` and `std` are always those of the group's
    rewards. A = r - b, with b the mean of the group, of the others of the group, of all responses of the batch, or 0.
    Then, by `normalize`: nothing; divided by (std of the group's rewards + EPSILON); divided by (std of the batch's
    rewards + EPSILON); or `whiten` over the batch, where each response is weighted by its tokens (`lengths`; 0: not
    trained on, so not counted; None: all count once). REINFORCE++: Hu et al. 2025, arXiv 2501.03262, section 3. Values
    with a std of 0 are not divided (as in NeMo-RL), since that would amplify differences below rounding.

    Raises ValueError as `group_advantages`, naming the group, and for lengths that do not fit the rewards.
    """
    made = [_of_group(index, rewards, baseline, normalize) for index, rewards in enumerate(groups)]
    if not made:
        return []
    rewards = [np.asarray(group, dtype=np.float64) for group in groups]
    everything = np.concatenate(rewards)
    match baseline:
        case "group" | "leave_one_out":
            scored = [group.advantages for group in made]  # already divided, if by their own std
        case "batch":
            scored = [group - float(everything.mean()) for group in rewards]
        case "none":
            scored = rewards
        case _:
            assert_never(baseline)
    match normalize:
        case "none":
            pass
        case "group":
            if baseline in ("batch", "none"):
                scored = [a / (g.std + EPSILON) if g.std else a for a, g in zip(scored, made, strict=True)]
        case "batch":
            if not has_zero_variance(everything):
                scored = [a / (float(everything.std(ddof=1)) + EPSILON) for a in scored]
        case "whiten":
            scored = _whitened(scored, lengths)
        case _:
            assert_never(normalize)
    return [replace(group, advantages=advantages) for group, advantages in zip(made, scored, strict=True)]


def whiten(values: Sequence[float], weights: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return (x - mean) / sqrt(var + 1e-8) over all values at once; equal values become 0.

    `weights`: value i counts as this many equal values (None: 1; 0: not counted, but still whitened). With response
    lengths in tokens as weights it is the whitening over response tokens of verl (`masked_whiten`), slime and OpenRLHF,
    as every token of a response has the same value. The variance has (sum of weights) - 1 in the denominator, as in
    verl and slime (OpenRLHF: without - 1).
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    if x.shape != w.shape or x.ndim != 1 or x.size == 0:
        raise ValueError(f"need one weight for each of at least one value; got {w.shape} for {x.shape}")
    if not ((w >= 0).all() and np.isfinite(w).all()):
        raise ValueError("weights must be finite and not negative")
    if not w.any() or has_zero_variance(x[w > 0]):
        return np.zeros_like(x)
    mean = float((w * x).sum() / w.sum())
    variance = float((w * (x - mean) ** 2).sum() / max(w.sum() - 1.0, 1.0))
    return np.asarray((x - mean) / np.sqrt(variance + VARIANCE_EPSILON))


def kl_in_reward(
    advantages: Sequence[float], kl: Sequence[NDArray[np.floating]], *, coef: float, whitened: bool
) -> list[NDArray[np.float64]]:
    """Return A_t = A - coef * (sum of kl from token t on) for every response; if `whitened`, then whiten over all
    tokens.

    The reward of token t is -coef * kl_t, and that of the last one has the response's own added. Undiscounted, the
    return from t on is the formula above. `advantages`: one per response, [n], not whitened. `kl`: [T] each, the
    estimate for every token of a response. Source: Hu et al. 2025 (REINFORCE++), arXiv 2501.03262, section 3, as in
    verl, OpenRLHF and slime with gamma 1.
    """
    made = [
        float(advantage) - coef * np.cumsum(np.asarray(each, dtype=np.float64)[::-1])[::-1]
        for advantage, each in zip(advantages, kl, strict=True)
    ]
    if not whitened or not made:
        return made
    sizes = [tokens.size for tokens in made]
    return np.split(whiten([float(a) for tokens in made for a in tokens]), np.cumsum(sizes)[:-1])


def has_zero_variance(rewards: Sequence[float] | NDArray[np.float64]) -> bool:
    """Whether all rewards are equal, up to rounding; true for a single one."""
    values = np.asarray(rewards, dtype=np.float64)
    return bool(np.ptp(values) <= TIE * max(1.0, float(np.abs(values).max())))


def _of_group(index: int, rewards: Sequence[float], baseline: Baseline, normalize: Normalize) -> GroupAdvantages:
    """Return the advantages with the group's own baseline, which `baseline` may replace."""
    own: Literal["group", "leave_one_out"] = "leave_one_out" if baseline == "leave_one_out" else "group"
    try:
        return group_advantages(rewards, normalize_std=normalize == "group", baseline=own)
    except ValueError as error:
        raise ValueError(f"group {index}: {error}") from None


def _whitened(
    groups: Sequence[NDArray[np.float64]], lengths: Sequence[Sequence[int]] | None
) -> list[NDArray[np.float64]]:
    """Whiten all groups' values together, and split them by group again."""
    sizes = [group.size for group in groups]
    if lengths is not None and [len(group) for group in lengths] != sizes:
        raise ValueError(f"{sizes} rewards by group, but {[len(group) for group in lengths]} lengths")
    weights = None if lengths is None else [float(length) for group in lengths for length in group]
    flat = whiten([float(value) for group in groups for value in group], weights)
    return np.split(flat, np.cumsum(sizes)[:-1])
