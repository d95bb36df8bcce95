"""The history-based drafter: an index per problem over what its recent rollouts, and the request itself, have said."""

from drafter.build import EngineShape, history_tokens
from drafter.suffix.drafter import SuffixDrafter
from models.transformer import Transformer
from policies.speculation.options import SpeculationOptions

__all__ = ["SuffixDrafter", "build"]


def build(options: SpeculationOptions, model: Transformer, engine: EngineShape) -> SuffixDrafter:
    """See `drafter.build`."""
    return SuffixDrafter(options.suffix, engine.max_running, history_tokens(model, engine))
