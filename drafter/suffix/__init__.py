"""The history-based drafter: an index per problem over what its recent rollouts, and the request itself, have said."""

from config.speculation import SpeculationOptions
from drafter.suffix.drafter import SuffixDrafter

__all__ = ["SuffixDrafter", "build"]


def build(options: SpeculationOptions, slots: int, max_tokens: int) -> SuffixDrafter:
    """See `drafter.build.build_retrieval`."""
    return SuffixDrafter(options.suffix, slots, max_tokens)
