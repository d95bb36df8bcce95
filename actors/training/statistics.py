"""What one RL step tells about itself: sums over response tokens, kept on the device and reduced once over ranks."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from actors.training.parallel import Rank
from policies.objectives import LARGEST, derived_metrics


class StepStatistics:
    """Accumulates float64 sums; means are over response tokens of all micro-batches, mini-batches and ranks."""

    def __init__(self, device: torch.device, samplers: Iterable[str]) -> None:
        """`samplers`: the rollout workers whose tokens may come, the same on every rank."""
        self._samplers = {name: number for number, name in enumerate(sorted(set(samplers)))}
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}  # the same names in the same order on every rank
        self._largest: dict[str, Tensor] = {}  # likewise
        self._gap = torch.zeros(
            2, len(self._samplers), dtype=torch.float64, device=device
        )  # tokens and summed gap per worker
        self._gap_max = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add_tokens(self, metrics: Mapping[str, Tensor]) -> None:
        """What is known of the tokens of one training micro-batch: [R] each, the same names every time."""
        for name, values in metrics.items():
            if name.endswith(LARGEST):
                top = values.max().double() if values.numel() else torch.zeros_like(self._gap_max)
                self._largest[name] = torch.maximum(self._largest[name], top) if name in self._largest else top
                continue
            total = values.sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._tokens += next(iter(metrics.values())).numel()

    @torch.no_grad()
    def add_gap(self, learner: Tensor, sampler: Tensor, segments: Tensor, samplers: Sequence[str]) -> None:
        """|learner - sampler| log-probs of the same tokens, under the same weights and at one temperature, [R] each,
        and which worker drew the tokens of each segment: [S + 1], [S]."""
        numbers = torch.tensor([self._samplers[name] for name in samplers], dtype=torch.int64, device=segments.device)
        drew = numbers.repeat_interleave(segments.diff())
        gap = (learner - sampler).abs().double()
        self._gap[0] += torch.bincount(drew, minlength=self._gap.shape[1])
        self._gap[1] += torch.bincount(drew, weights=gap, minlength=self._gap.shape[1])
        if gap.numel():
            self._gap_max = torch.maximum(self._gap_max, gap.max().double())

    def reduce(self, rank: Rank) -> dict[str, float]:
        """Metrics over all ranks; every rank must call it and gets the same. `logprob_gap/worker/<name>`: the mean
        over the tokens that the worker drew."""
        counted = torch.tensor(float(self._tokens), dtype=torch.float64, device=self._gap.device)
        tokens, *sums = rank.sum(torch.stack([counted, *self._sums.values()])).tolist()
        means = {name: value / max(1.0, tokens) for name, value in zip(self._sums, sums, strict=True)}
        gap_tokens, gap = rank.sum(self._gap)
        gap_max, *largest = rank.max(torch.stack([self._gap_max, *self._largest.values()])).tolist()
        metrics = derived_metrics(means) | dict(zip(self._largest, largest, strict=True))
        metrics |= {"logprob_gap/mean": float(gap.sum() / gap_tokens.sum().clamp(min=1)), "logprob_gap/max": gap_max}
        for worker, count, summed in zip(self._samplers, gap_tokens.tolist(), gap.tolist(), strict=True):
            if count:
                metrics[f"logprob_gap/worker/{worker}"] = summed / count
        return metrics
