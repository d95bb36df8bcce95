"""What the learner minimises. Owns losses of tokens, their aggregation and their metrics; pure functions of tensors.

A *mini-batch* is what one optimizer step sees, however it is cut into micro-batches and over ranks. A sequence is never
cut: `LossInputs` holds whole ones, so a loss may look at all tokens of a response together.
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
