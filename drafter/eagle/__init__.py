"""EAGLE: one decoder layer on the target's hidden states drafts what the target will say (TLT 4.1; EAGLE, HASS)."""

from drafter.eagle.drafter import EagleDrafter
from drafter.eagle.model import EagleModel, EagleWeightsError, init_eagle, load_eagle, save_eagle

__all__ = ["EagleDrafter", "EagleModel", "EagleWeightsError", "init_eagle", "load_eagle", "save_eagle"]
