"""The noise of drafter-invariant sampling: counter-based, so that a draw depends on (key, position, token) only.

Defines the key derivation and, over models.philox, the oracle of the native sampler. It is stateless: there is no
generator to save, and replaying a request with its key replays its draws on any worker.
"""

import hashlib
import struct

import torch
from torch import Tensor

from models.philox import MASK32, TOKENS, philox4x32

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def noise_key(seed: int, epoch: int, prompt: int, sample: int) -> int:
    """Return the 63-bit key of one response: a hash of (run seed, epoch, prompt, sample), each a signed 64-bit integer.

    Worker and retry are not part of it, so a re-issued request draws the same tokens.
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, epoch, prompt, sample), digest_size=8, person=b"paceline-noise")
    return int.from_bytes(digest.digest(), "little") & (2**63 - 1)


def random_words(keys: Tensor, positions: Tensor, vocab: int, stream: int = TOKENS) -> Tensor:
    """[R] int64 keys, [R] int64 positions -> [R, vocab] int64 in [0, 2**32).

    Token t takes word t % 4 of Philox with counter (position, t // 4, stream, 0) and key (low word, high word).
    """
    blocks = torch.arange((vocab + 3) // 4, device=keys.device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    keys, positions = keys[:, None], positions[:, None]
    words = philox4x32(
        (positions & MASK32, blocks, zero + stream, zero),
        (keys & MASK32, (keys >> 32) & MASK32),
    )
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab]


def gumbel(keys: Tensor, positions: Tensor, vocab: int, device: torch.device | str | None = None) -> Tensor:
    """Standard Gumbel noise [R, vocab] float32 of the tokens at `positions` [R] of the responses with `keys` [R].

    G = -log(-log1p(-v)) with v = (word + 1/2) / 2**32 rounded to float32 and kept below 1. Small v, which give large G,
    keep full relative precision: the upper tail, which decides an argmax, reaches 22.9.
    """
    if device is not None:
        keys, positions = keys.to(device), positions.to(device)
    words = random_words(keys, positions, vocab)
    v = (words.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=_LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-v))
