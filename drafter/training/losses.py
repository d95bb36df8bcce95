"""Losses of the drafter's outputs: sums and counts over a packed batch. Never computes gradients.

A row of pass k is supervised by the values k - 1 rows further on: the target's distribution for token p + k + 1 and its
state at p + k, if its present version computed them; otherwise the token drawn there. A drafter with a smaller
vocabulary learns the target's probabilities of its own tokens, so a row counts by the share that it can draft.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from config.drafter import DrafterLoss
from drafter.eagle.model import DrafterNetwork
from drafter.training.head import TargetHead
from drafter.training.packing import PackedBatch
from drafter.training.passes import run_passes
from drafter.training.variants import Variant

_LK_ETA = 3.0  # the paper's best value
_KEPT_LOGITS = 1 << 25  # with more per pass, logits are recomputed in the backward pass


@dataclass(frozen=True, slots=True)
class Objective:
    """Sums over supervised rows; the mean loss is loss / weight."""

    loss: Tensor  # scalar, with a gradient
    weight: float  # rows of all passes, those of pass k times pass_decay^(k-1)
    rows: int  # supervised in the first pass
    correct: Tensor  # scalar: rows of the first pass whose most probable token is the one the target drew
    among_top3: Tensor  # scalar: the same for its three most probable


def objective_of(model: DrafterNetwork, head: TargetHead, batch: PackedBatch, variant: Variant) -> Objective:
    """Compute the objective of all passes over the batch."""
    wanted, labels = _of_vocabulary(model.ids, _targets(head, batch, variant), batch.labels)
    states = batch.states[batch.at + 1][:, -head.config.hidden_size :]  # the state that row p's output approximates
    loss, weight = torch.zeros((), device=batch.tokens.device), 0.0
    counts: Tensor | None = None
    for index, out in enumerate(run_passes(model, head, batch, variant.passes)):
        facts = states, labels, wanted, batch.fresh
        if index:  # in the first pass every row has its own supervision
            keep = batch.rows_ahead(index)
            out, row = out[keep], keep + index
            facts = states[row], labels[row], wanted[row], batch.fresh[row]
        args = model, head, variant, out, *facts
        large = len(out) * wanted.shape[1] > _KEPT_LOGITS and torch.is_grad_enabled()
        total, found = checkpoint(_compare, *args, use_reentrant=False) if large else _compare(*args)
        decay = variant.pass_decay**index
        loss, weight = loss + decay * total, weight + decay * len(out)
        counts = found if counts is None else counts
    assert counts is not None
    return Objective(loss, weight, batch.rows, counts[0], counts[1])


def _compare(
    model: DrafterNetwork,
    head: TargetHead,
    variant: Variant,
    out: Tensor,
    states: Tensor,
    labels: Tensor,
    wanted: Tensor,
    fresh: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of T' rows, and int64 [2]: how often the label was the best token, and among the
    best three."""
    drafted = model.readout(out)
    logits = head.logits(drafted) if model.lm_head is None else model.lm_head(drafted).float()
    logprobs = logits.log_softmax(-1)
    if variant.reverse:
        hard = F.nll_loss(logprobs, labels, reduction="none")
        divergence = torch.where(fresh, (logprobs.exp() * (logprobs - wanted)).sum(-1), hard)
    else:
        divergence = divergence_of(variant.loss, wanted, logprobs)
    total = divergence.sum()
    if variant.hidden_weight:
        distance = F.smooth_l1_loss(drafted.float(), states.float(), reduction="none").mean(-1)
        total = total + variant.hidden_weight * distance.masked_fill(~fresh, 0.0).sum()
    with torch.no_grad():
        best = logits.topk(min(3, logits.shape[1])).indices == labels[:, None]
        counts = torch.stack((best[:, 0].sum(), best.any(1).sum()))
    return total, counts


def divergence_of(loss: DrafterLoss, wanted: Tensor, logprobs: Tensor) -> Tensor:
    """p and log q, both [T, V] -> divergence [T]. p may lack tokens that the drafter cannot draft.

    cross_entropy: -sum p log q. tv: 1 - sum min(p, q), the rejection probability (Leviathan et al. 2023). lk: w KL(p,
    q) + (1 - w) tv with w = exp(-3 sum min(p, q)), not differentiated: it moves from the one to the other (Samarin et
    al. 2026, arXiv 2602.23881).
    """
    cross_entropy = -(wanted * logprobs).sum(-1)
    if loss == "cross_entropy":
        return cross_entropy
    overlap = torch.minimum(wanted, logprobs.exp()).sum(-1)
    if loss == "tv":
        return 1 - overlap
    kl = cross_entropy + torch.special.xlogy(wanted, wanted).sum(-1)
    weight = torch.exp(-_LK_ETA * overlap.detach())
    mixed: Tensor = weight * kl + (1 - weight) * (1 - overlap)
    return mixed


def _of_vocabulary(ids: Tensor | None, wanted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Targets [T, V] and labels [T] -> [T, draft vocabulary] and rows of the drafter's head, -1 for other tokens."""
    if ids is None:
        return wanted, labels
    rows = torch.full((wanted.shape[1],), -1, dtype=torch.int64, device=ids.device)
    rows[ids] = torch.arange(len(ids), device=ids.device)
    return wanted[:, ids], rows[labels]


@torch.no_grad()
def _targets(head: TargetHead, batch: PackedBatch, variant: Variant) -> Tensor:
    """Return float32 [T, V]: the target's distribution of token p + 2 (its logarithm for the reverse divergence).

    Rows of older versions have all weight on the drawn token. Their states never reach the head, since no target ever
    computed that combination.
    """
    size = head.config.vocab_size
    fresh, all_fresh = batch.fresh_rows, len(batch.fresh_rows) == batch.rows
    wanted = torch.zeros((0, size), device=batch.at.device)
    if len(fresh):
        logits = head.logits(batch.states[batch.at[fresh] + 1][:, -head.config.hidden_size :])
        wanted = logits.log_softmax(-1) if variant.reverse else logits.softmax(-1)
    if all_fresh:
        return wanted
    every = torch.zeros((batch.rows, size), device=batch.at.device)
    if not variant.reverse:
        every.scatter_(1, batch.labels[:, None], 1.0)
    every[fresh] = wanted
    return every
