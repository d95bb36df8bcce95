"""Philox4x32-10 over ints or torch tensors, and the streams of draws that its counter separates. Stateless; no torch.

J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

# Third word of the counter: draws of one key that must not be correlated.
TOKENS, ACCEPT, RESIDUAL, KEEP, SEEDS = range(5)

MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Word = TypeVar("Word", int, "Tensor")


def philox4x32(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Ten rounds. All words are ints, or int64 tensors that broadcast, in [0, 2**32). Returns four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        if round_index:
            k0 = (k0 + _WEYL[0]) & MASK32
            k1 = (k1 + _WEYL[1]) & MASK32
        # The 64-bit products of tensors may wrap into the sign bit; the masked shift still yields the high word.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK32) ^ c1 ^ k0,
            p1 & MASK32,
            ((p0 >> 32) & MASK32) ^ c3 ^ k1,
            p0 & MASK32,
        )
    return c0, c1, c2, c3


def uniform(key: int, stream: int) -> float:
    """Return a number in (0, 1), a function of the noise key and the stream only."""
    word = philox4x32((0, 0, stream, 0), (key & MASK32, (key >> 32) & MASK32))[0]
    return (word + 0.5) * 2.0**-32
