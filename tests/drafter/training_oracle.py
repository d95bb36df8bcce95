"""The training step by its definition: one sequence, one position, one pass at a time, drafted with what is known."""

from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.records import SequenceRecord
from drafter.eagle.model import Drafting
from drafter.training.variants import Variant
from models.transformer import Transformer
from tests.drafter.eagle_oracle import WholeContext, true_rows


@dataclass
class StepOracle:
    """What a training step computes for `record`; `target` computed it, at version `version` now."""

    target: Transformer
    model: Drafting
    variant: Variant
    version: int

    def outputs(self, record: SequenceRecord, row: int, passes: int) -> list[Tensor]:
        """What the drafter puts out when it drafts from `row` on, but is fed with the true tokens; [H] per pass."""
        tokens = record.tokens.tolist()
        rows = true_rows(self.target, tokens, self.model.layers)[record.first : record.first + row + 1]
        features = list(self.model.features(rows))
        outputs: list[Tensor] = []
        for _ in range(passes):
            positions = torch.arange(record.first, record.first + len(features))
            fed = torch.tensor(tokens[record.first + 1 : record.first + 1 + len(features)])
            embedded, rotation = self.target.embed_tokens(fed), self.target.rope.at(positions)
            out = self.model.advance(embedded, torch.stack(features), rotation, WholeContext(positions))[-1]
            outputs.append(out)
            features.append(out)
        return outputs

    def loss(self, record: SequenceRecord) -> tuple[Tensor, float]:
        """(sum of the weighted losses, sum of the weights) over rows and passes."""
        tokens = record.tokens.tolist()
        true = true_rows(self.target, tokens, ())  # [L, H]
        total, weight = torch.zeros(()), 0.0
        for row in range(record.rows - 1):
            passes = min(self.variant.passes, record.rows - 1 - row)
            for index, out in enumerate(self.outputs(record, row, passes)):
                state = true[record.first + row + index + 1]
                label = tokens[record.first + row + index + 2]
                share = self.variant.pass_decay**index
                total, weight = total + share * self._row(record, out, state, label), weight + share
        return total, weight

    def _row(self, record: SequenceRecord, out: Tensor, state: Tensor, label: int) -> Tensor:
        drafted = self.model.readout(out[None])[0]
        q = self.target.logits(drafted[None])[0].softmax(-1)
        if record.target_version != self.version:
            return -q[label].log()
        p = self.target.logits(state[None])[0].softmax(-1)
        divergence = (q * (q / p).log()).sum() if self.variant.reverse else -(p * q.log()).sum()
        gap = (drafted - state).abs()
        distance = torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
        return divergence + self.variant.hidden_weight * distance
