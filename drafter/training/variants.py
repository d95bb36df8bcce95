"""EAGLE, HASS, EAGLE-3 and OSD as settings of one training step (TLT 4.1, Figure 7). Owns nothing but the settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from config.drafter import Algorithm, DrafterLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A row's input, the number of passes over the drafter's own output, and the loss.

    Pass k of `passes` uses the drafter's output of pass k - 1 instead of the target's states, as drafting does
    ("training-time test"). The loss is the mean over supervised rows of all passes, those of pass k with weight
    pass_decay^(k-1), of: divergence + hidden_weight * smooth L1(drafted state, target's state).
    """

    network: Literal["eagle", "eagle3"]
    passes: int = 1
    pass_decay: float = 1.0
    hidden_weight: float = 0.0  # the smooth L1 is averaged over the H components of a row
    loss: DrafterLoss = "cross_entropy"  # the divergence, if not reversed: see `drafter.training.losses`
    reverse: bool = False  # False: cross-entropy with the target's distribution; True: KL(drafter || target)


# EAGLE's original weights the cross-entropy with 0.1. Here both losses have equal weight, because the drafter is judged
# by its tokens. HASS's top-10 distillation term is left out, since the cross-entropy covers the whole distribution.
VARIANTS: Mapping[Algorithm, Variant] = {
    "eagle": Variant(network="eagle", hidden_weight=1.0),
    "hass": Variant(network="eagle", passes=3, hidden_weight=1.0),
    "eagle3": Variant(network="eagle3", passes=7, pass_decay=0.8),
    "osd": Variant(network="eagle", hidden_weight=1.0, reverse=True),
}
