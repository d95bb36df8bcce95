"""Statistics of one RL step: sums over response tokens, kept on the device and reduced once over ranks."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from actors.training.batches import TokenBatch
from actors.training.parallel import Rank
from contracts.training import TrainSequence
from models.transfer import upload
from policies.objectives import LARGEST, SMALLEST, derived_metrics


class StepStatistics:
    """Accumulates float64 sums; means are over response tokens of all micro-batches, mini-batches and ranks."""

    def __init__(self, device: torch.device, samplers: Iterable[str]) -> None:
        """`samplers`: the possible rollout workers, the same on every rank."""
        self.samplers = {name: number for number, name in enumerate(sorted(set(samplers)))}
        self._tokens = 0
        self._sums: dict[str, Tensor] = {}  # the same names in the same order on every rank
        self._largest: dict[str, Tensor] = {}  # likewise; for SMALLEST the largest negative
        self._drawn = [0] * len(self.samplers)  # tokens per worker
        self._gap = torch.zeros(len(self.samplers), dtype=torch.float64, device=device)  # sum per worker
        self._gap_max = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add_tokens(self, metrics: Mapping[str, Tensor]) -> None:
        """Add the token metrics of one training micro-batch: [R] each, the same names every time."""
        for name, values in metrics.items():
            if name.endswith((LARGEST, SMALLEST)):
                signed = -values if name.endswith(SMALLEST) else values
                top = signed.max().double() if values.numel() else torch.full_like(self._gap_max, -math.inf)
                self._largest[name] = torch.maximum(self._largest[name], top) if name in self._largest else top
                continue
            total = values.sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._tokens += next(iter(metrics.values())).numel()

    @torch.no_grad()
    def add_gap(self, learner: Tensor, sampler: Tensor, batch: TokenBatch) -> None:
        """Add |learner - sampler| log-probs of the batch's tokens, [R] each, under the same weights and at one
        temperature."""
        gap = (learner - sampler).abs().double()
        self._gap += torch.zeros_like(self._gap).index_add_(0, batch.samplers, gap)
        for sequence in batch.sequences:
            if isinstance(sequence, TrainSequence):
                self._drawn[self.samplers[sequence.sampler]] += sequence.drawn_tokens
        if gap.numel():
            self._gap_max = torch.maximum(self._gap_max, gap.max().double())

    def reduce(self, rank: Rank) -> dict[str, float]:
        """Return metrics over all ranks; every rank must call it and gets the same.

        `logprob_gap/worker/<name>`: the mean over that worker's tokens. Waits for the device once."""
        device, workers = self._gap.device, len(self.samplers)
        counted = upload({"counts": np.array([self._tokens, *self._drawn], np.float64)}, device)["counts"]
        sums = rank.sum(torch.cat([counted, self._gap, *(total[None] for total in self._sums.values())]))
        tops = rank.max(torch.stack([self._gap_max, *self._largest.values()]))
        host = torch.cat([sums, tops]).cpu()
        parts = torch.split(host, [1, workers, workers, len(self._sums), len(tops)])
        (tokens,), totals, (gap_max, *largest) = (parts[i].tolist() for i in (0, 3, 4))
        gap_tokens, gap = parts[1:3]
        means = {name: value / max(1.0, tokens) for name, value in zip(self._sums, totals, strict=True)}
        extremes = dict(zip(self._largest, largest, strict=True))
        metrics = derived_metrics(means) | {n: -v if n.endswith(SMALLEST) else v for n, v in extremes.items()}
        mean = gap.sum() / gap_tokens.sum().clamp(min=1)
        metrics |= {"logprob_gap/mean": mean.tolist(), "logprob_gap/max": gap_max}
        for worker, count, summed in zip(self.samplers, gap_tokens.tolist(), gap.tolist(), strict=True):
            if count:
                metrics[f"logprob_gap/worker/{worker}"] = summed / count
        return metrics
