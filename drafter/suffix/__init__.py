"""The history-based drafter: an index per problem over its recent rollouts and the request's own text."""

from config.speculation import SpeculationOptions
from drafter.suffix.drafter import SuffixDrafter

__all__ = ["SuffixDrafter", "build"]


def build(options: SpeculationOptions, slots: int, max_tokens: int) -> SuffixDrafter:
    """See `drafter.build.build_retrieval`."""
    return SuffixDrafter(options.suffix, slots, max_tokens)
