"""`rejection` on a device, over packed rows: the same distribution without waiting for the host.

It makes no float64 tensors of the vocabulary's width, and float32 ones in chunks of rows. The token that replaces a
rejected draft is drawn by the sampling kernel, with the request's noise under another key.
"""

import numpy as np
import torch
from torch import Tensor

from actors.engine.batch.step.types import Int64Array, StepDrafts, StepRows
from actors.engine.native.forward.layout import DeviceStep
from actors.engine.native.forward.rejection import SUM_TOLERANCE
from models import ops
from models.noise import random_words
from models.philox import ACCEPT

_OTHER_KEY = 0x2545F4914F6CDD1D  # differs from the noise of coupled draws and of drafters
_ROW_TENSORS = 7  # tensors of a chunk that exist at once
_LEAST = 1e-37  # a probability with a finite logarithm that no noise can raise to a draw
CHUNK_BYTES = 256 << 20


def drafted_rows(step: StepRows, drafts: StepDrafts) -> Int64Array:
    """Return the D rows of chains that have a draft, as int64 [5, D]: row; drafted token; request and column of its
    probabilities; the bits of a float64 uniform that decides. Every row is drawn from."""
    counts = drafts.counts
    owner = np.arange(len(counts)).repeat(counts)
    column = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    row = step.arrays["query_offsets"][:-1].astype(np.int64)[owner] + column
    keys, positions = (torch.from_numpy(step.arrays[name][row]) for name in ("noise_keys", "noise_positions"))
    uniform = (random_words(keys, positions, 1, ACCEPT)[:, 0].double() + 0.5) * 2.0**-32
    token = drafts.tokens[owner, column]
    return np.stack((row, token, owner, column, uniform.numpy().view(np.int64)))


def reject(
    logits: Tensor,
    cutoff: Tensor,
    step: DeviceStep,
    drawn: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    distributions: Tensor | None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Replace coupled draws by those of rejection sampling, in place.

    logits [N, V] and cutoff float32 [N] of the step's draws; drawn: tokens int64, logprobs and logprobs_t1 float32,
    [N], from `ops.sample`; rows int64 [5, D] on the device, see drafted_rows; distributions [R, K, V]: probabilities
    that drafts were drawn with, None for chosen ones. `rejection.rejection_draws` defines the results.
    """
    width = max(1, chunk_bytes // (logits.shape[1] * 4 * _ROW_TENSORS))
    for start in range(0, rows.shape[1], width):
        _reject(logits, cutoff, step, drawn, rows[:, start : start + width], distributions)


def _reject(
    logits: Tensor,
    cutoff: Tensor,
    step: DeviceStep,
    drawn: tuple[Tensor, Tensor, Tensor],
    part: Tensor,
    distributions: Tensor | None,
) -> None:
    tokens, logprobs, logprobs_t1 = drawn
    row, uniform = part[0], part[4].view(torch.float64)
    draft, coupled = part[1][:, None], tokens[row][:, None]
    wide, temperature = logits.index_select(0, row).float(), step.temperature[row]
    greedy = temperature == 0
    p = (wide / torch.where(greedy, 1.0, temperature)[:, None]).masked_fill_(wide < cutoff[row][:, None], -torch.inf)
    p = p.softmax(1).masked_fill_(greedy[:, None], 0.0).scatter_add_(1, coupled, greedy.float()[:, None])
    residual, likely = p.scatter(1, draft, 0.0), p.gather(1, draft)[:, 0].double()
    if distributions is not None:
        given = distributions[part[2], part[3]].float()
        sound = torch.isfinite(given).all(1) & (given >= 0).all(1) & ((given.sum(1) - 1).abs() < SUM_TOLERANCE)
        drafted_with = given.gather(1, draft)[:, 0]
        sound &= drafted_with > 0
        rest = (residual - given.masked_fill_(~sound[:, None], 0.0)).clamp_(min=0)
        # Rounding may leave nothing of p - q if p and q are nearly equal.
        residual = torch.where(rest.sum(1, keepdim=True) > 0, rest, residual)
        uniform = uniform * torch.where(sound, drafted_with, 1.0).double()
    nothing, ones = torch.full_like(temperature, -torch.inf), torch.ones_like(temperature)
    keys, places = step.noise_keys[row] ^ _OTHER_KEY, step.noise_positions[row]
    other, _, _ = ops.sample(residual.clamp_(min=_LEAST).log_(), nothing, ones, keys, places)
    token = torch.where(uniform < likely, part[1], other)[:, None]
    at_1 = wide.gather(1, token) - wide.gather(1, coupled)  # relative to the draw with known log-probability
    logprobs_t1.index_copy_(0, row, logprobs_t1[row] + at_1[:, 0])
    logprobs.index_copy_(0, row, p.gather(1, token)[:, 0].log_().masked_fill_(greedy, 0.0))
    tokens.index_copy_(0, row, token[:, 0])
