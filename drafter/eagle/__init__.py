"""EAGLE: one decoder layer on the target's hidden states predicts its next tokens (TLT 4.1; EAGLE, HASS, EAGLE-3)."""

from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from drafter.build import history_tokens
from drafter.eagle.drafter import EagleDrafter
from drafter.eagle.files import load_eagle, save_eagle
from drafter.eagle.model import Drafting, Eagle3Model, EagleModel, fused_layers, init_eagle
from drafter.published import EagleWeightsError
from models.transformer import Transformer

__all__ = [
    "Drafting",
    "Eagle3Model",
    "EagleDrafter",
    "EagleModel",
    "EagleWeightsError",
    "build",
    "fused_layers",
    "init_eagle",
    "load_eagle",
    "save_eagle",
]


def build(options: SpeculationOptions, model: Transformer, engine: EngineOptions) -> EagleDrafter:
    """See `drafter.build`."""
    blocks, sampled = engine.kv_tokens // engine.block_tokens, options.verification == "rejection"
    return EagleDrafter(
        model,
        options.eagle,
        engine.max_running,
        blocks,
        engine.block_tokens,
        sampled=sampled,
        max_tokens=history_tokens(model, engine),
    )
