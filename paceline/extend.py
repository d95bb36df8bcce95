"""Types and helpers for your own loss, advantages or drafter: `from paceline.extend import LossInputs`.

- loss: `objective.loss: my_module:my_loss`, called as my_loss(inputs: LossInputs, **objective.loss_arguments), returns
  TokenLosses: the loss of every response token, before KL, entropy, importance weights and the aggregation.
- advantages: `objective.advantages: my_module:my_advantages`, called as my_advantages(rewards, lengths,
  **objective.advantages_arguments) with a list of arrays, one per group; returns the advantages in the same form.
- drafter: an entry of `rollout.speculation.drafters`, made as MyDrafter(slots=..., max_tokens=..., **arguments). Derive
  it from Drafter: only `propose` must be written.

examples/own_parts has one of each. This module only re-exports names.
"""

from config.strategy import Strategy
from drafter.protocol import BatchView, Drafter, Drafts
from policies.objectives import LossInputs, TokenLosses
from policies.objectives.ratios import log_ratio, segment_means, segment_sums, spread

__all__ = [
    "BatchView",
    "Drafter",
    "Drafts",
    "LossInputs",
    "Strategy",
    "TokenLosses",
    "log_ratio",
    "segment_means",
    "segment_sums",
    "spread",
]
