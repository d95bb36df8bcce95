"""What one RL step tells about itself: sums over response tokens, kept on the device and reduced once over ranks."""

import torch
from torch import Tensor

from actors.training.parallel import Rank
from policies.objective import TokenLosses

SUMS = ("tokens", "entropy", "clipped_low", "clipped_high", "kl_old", "kl", "gap_tokens", "gap")


class StepStatistics:
    """Accumulates float64 sums; means are over response tokens of all micro-batches, mini-batches and ranks."""

    def __init__(self, device: torch.device) -> None:
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in SUMS}
        self._gap_max = torch.zeros((), dtype=torch.float64, device=device)
        self._with_reference = False

    @torch.no_grad()
    def add_losses(self, losses: TokenLosses, entropy: Tensor) -> None:
        """One training micro-batch; [R] each."""
        self._add("tokens", torch.ones_like(entropy))
        self._add("entropy", entropy)
        self._add("clipped_low", losses.clipped_low)
        self._add("clipped_high", losses.clipped_high)
        self._add("kl_old", losses.kl_old)
        if losses.kl_reference is not None:
            self._with_reference = True
            self._add("kl", losses.kl_reference)

    @torch.no_grad()
    def add_gap(self, learner_t1: Tensor, sampler_t1: Tensor) -> None:
        """|learner - sampler| log-probs at temperature 1 of the same tokens under the same weights; [R] each."""
        gap = (learner_t1 - sampler_t1).abs()
        self._add("gap_tokens", torch.ones_like(gap))
        self._add("gap", gap)
        if gap.numel():
            self._gap_max = torch.maximum(self._gap_max, gap.max().double())

    def reduce(self, rank: Rank) -> dict[str, float]:
        """Metrics over all ranks; every rank must call it and gets the same."""
        sums = rank.sum(torch.stack([self._sums[name] for name in SUMS])).tolist()
        total = dict(zip(SUMS, sums, strict=True))
        tokens, gap_tokens = max(1.0, total["tokens"]), max(1.0, total["gap_tokens"])
        metrics = {
            "entropy": total["entropy"] / tokens,
            "clip_fraction": (total["clipped_low"] + total["clipped_high"]) / tokens,
            "clip_fraction/low": total["clipped_low"] / tokens,
            "clip_fraction/high": total["clipped_high"] / tokens,
            "kl_old": total["kl_old"] / tokens,
            "logprob_gap/mean": total["gap"] / gap_tokens,
            "logprob_gap/max": float(rank.max(self._gap_max[None]).item()),
        }
        if self._with_reference:
            metrics["kl"] = total["kl"] / tokens
        return metrics

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums[name] + values.sum(dtype=torch.float64)
