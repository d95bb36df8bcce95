"""The seed that vLLM draws a request with: a function of its noise key and of how much of its response is there."""

from models.philox import MASK32, SEEDS, philox4x32


def seed_of(noise_key: int, known_tokens: int) -> int:
    """A seed in [0, 2**63) for the response with this 64-bit key that is sampled from token `known_tokens` on.

    vLLM starts a generator with it when the request is added, so a request that is issued again behind other tokens
    needs another one: else the noise of its first tokens would be drawn once more. vLLM's generators on CPUs read the
    low 32 bits only, so all 32 are mixed from key and length: of 10,000 requests about one pair in 10**5 is alike.
    """
    low, high, _, _ = philox4x32((known_tokens, 0, SEEDS, 0), (noise_key & MASK32, (noise_key >> 32) & MASK32))
    return low | (high & 0x7FFFFFFF) << 32
