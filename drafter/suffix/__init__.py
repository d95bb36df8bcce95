"""The history-based drafter: an index per problem over what its recent rollouts, and the request itself, have said."""

from drafter.suffix.drafter import SuffixDrafter

__all__ = ["SuffixDrafter"]
