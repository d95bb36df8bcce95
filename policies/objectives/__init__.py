"""The learner's objective: token losses, their aggregation and their metrics, as pure functions of tensors.

A *mini-batch* is the input of one optimizer step, however it is split into micro-batches and over ranks. A sequence is
never split: `LossInputs` holds whole ones, so a loss may use all tokens of a response together.
"""

from policies.objectives.aggregation import sequence_coefficients
from policies.objectives.compose import derived_metrics, token_losses
from policies.objectives.losses import LOSSES
from policies.objectives.types import LARGEST, SMALLEST, LossInputs, TokenLosses

__all__ = [
    "LARGEST",
    "LOSSES",
    "SMALLEST",
    "LossInputs",
    "TokenLosses",
    "derived_metrics",
    "sequence_coefficients",
    "token_losses",
]
