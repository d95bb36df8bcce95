"""EAGLE: one decoder layer on the target's hidden states drafts what it will say (TLT 4.1; EAGLE, HASS, EAGLE-3)."""

from drafter.eagle.drafter import EagleDrafter
from drafter.eagle.files import EagleWeightsError, load_eagle, save_eagle
from drafter.eagle.model import Drafting, Eagle3Model, EagleModel, fused_layers, init_eagle

__all__ = [
    "Drafting",
    "Eagle3Model",
    "EagleDrafter",
    "EagleModel",
    "EagleWeightsError",
    "fused_layers",
    "init_eagle",
    "load_eagle",
    "save_eagle",
]
