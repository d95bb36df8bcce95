"""Classical speculative sampling: it keeps the target's distribution, but not its exact draws. Pure tensor functions.

Y. Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023, algorithm 1. Its draws are
arranged so that a draw equals its draft if and only if the draft is accepted, so the accept rule stays that of
`verify`. Two streams of the request's own noise decide, other than the one of coupled draws (and drafters).
"""

import torch
from torch import Tensor

from models import ops
from models.noise import random_words
from models.philox import ACCEPT, RESIDUAL

SUM_TOLERANCE = 1e-2  # a drafter's probabilities may be bfloat16


def rejection_draws(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    drafts: Tensor,
    distributions: Tensor | None,
) -> Tensor:
    """Return the target's draw after each drafted prefix, int64 [R, K+1].

    logits [R, K+1, V] of the target; cutoff float32 [R, K+1], as in `ops.sample`; temperature float32 [R]; keys and
    positions int64 [R], positions[r] of the first draw; drafts int64 [R, K], padded with -1; distributions [R, K, V]:
    probabilities q that each draft was drawn with, None for drafts that were chosen (one-hot).

    Draft d is accepted with probability min(1, p[d] / q[d]); otherwise the draw is from (p - q)+ normalised, which
    never gives d. Without a draft (after the last one) the draw is from p. p has temperature, top-k and top-p; T = 0 is
    greedy. An invalid row of `distributions` (NaN, negative, sum off 1, q[d] = 0) counts as one-hot.
    """
    requests, columns, vocab = logits.shape
    draws = _coupled(logits, cutoff, temperature, keys, positions)
    if columns == 1:
        return draws
    p = target_probabilities(logits[:, :-1].flatten(0, 1), cutoff[:, :-1].flatten(), _each(temperature, columns - 1))
    drafted = drafts.flatten()
    token = drafted.clamp(min=0)[:, None]
    q = torch.zeros_like(p).scatter_(1, token, 1.0)
    if distributions is not None:
        given = distributions.flatten(0, 1).float()
        sound = torch.isfinite(given).all(1) & (given >= 0).all(1) & ((given.sum(1) - 1).abs() < SUM_TOLERANCE)
        sound &= given.gather(1, token)[:, 0] > 0
        q = torch.where(sound[:, None], given, q)
    places = _places(positions, columns - 1)
    keys = _each(keys, columns - 1)
    uniform = (random_words(keys, places, 1, ACCEPT)[:, 0].double() + 0.5) * 2.0**-32
    stands = uniform * q.gather(1, token)[:, 0] < p.gather(1, token)[:, 0]
    residual = (p - q).clamp(min=0).scatter(1, token, 0.0)
    # Rounding may leave nothing of p - q if p and q are nearly equal.
    spent = residual.sum(1, keepdim=True) <= 0
    residual = torch.where(spent, p.scatter(1, token, 0.0), residual)
    uniforms = (random_words(keys, places, vocab, RESIDUAL).double() + 0.5) * 2.0**-32
    other = (residual.double().log() - (-uniforms.log()).log()).argmax(1)
    chosen = torch.where(stands, drafted, other).view(requests, columns - 1)
    draws[:, :-1] = torch.where(drafts >= 0, chosen, draws[:, :-1])
    return draws


def target_probabilities(logits: Tensor, cutoff: Tensor, temperature: Tensor) -> Tensor:
    """Return the target's sampling distribution: logits [N, V], cutoff and temperature float32 [N] -> float64 [N,
    V]."""
    greedy = (temperature == 0)[:, None]
    wide = logits.float()
    scaled = (wide / torch.where(temperature == 0, 1.0, temperature)[:, None]).double()
    soft = scaled.masked_fill(wide < cutoff[:, None], -torch.inf).softmax(1)
    best = torch.zeros_like(soft).scatter_(1, wide.argmax(1, keepdim=True), 1.0)
    return torch.where(greedy, best, soft)


def target_logprobs(logits: Tensor, cutoff: Tensor, temperature: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs of given tokens [N] as `ops.sample` reports them: (sampling distribution, temperature 1)."""
    token = tokens[:, None]
    drawn = target_probabilities(logits, cutoff, temperature).gather(1, token)[:, 0].log()
    logprobs = torch.where(temperature == 0, 0.0, drawn).float()
    return logprobs, ops.log_softmax(logits.float()).gather(1, token)[:, 0]


def _coupled(logits: Tensor, cutoff: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    requests, columns, _ = logits.shape
    tokens, _, _ = ops.sample(
        logits.flatten(0, 1),
        cutoff.flatten(),
        _each(temperature, columns),
        _each(keys, columns),
        _places(positions, columns),
    )
    return tokens.view(requests, columns)


def _each(x: Tensor, columns: int) -> Tensor:
    """Repeat each value: [R] -> [R * columns]."""
    return x[:, None].expand(-1, columns).flatten()


def _places(positions: Tensor, columns: int) -> Tensor:
    """Return the positions of the draws from the first ones: [R] -> [R * columns]."""
    return (positions[:, None] + torch.arange(columns, device=positions.device)).flatten()
