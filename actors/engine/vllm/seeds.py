"""vLLM's seed of a request: a function of its noise key and of the length of its existing response."""

from models.philox import MASK32, SEEDS, philox4x32


def seed_of(noise_key: int, known_tokens: int) -> int:
    """Return a seed in [0, 2**63) for the response with this 64-bit key that is sampled from token `known_tokens` on.

    vLLM starts a generator with it when the request is added. A request that is re-issued with more tokens needs
    another seed; otherwise its first noise would be repeated. vLLM's generators on CPUs read the low 32 bits only, so
    all 32 are mixed from key and length: among 10,000 requests about one pair in 10**5 collides.
    """
    low, high, _, _ = philox4x32((known_tokens, 0, SEEDS, 0), (noise_key & MASK32, (noise_key >> 32) & MASK32))
    return low | (high & 0x7FFFFFFF) << 32
