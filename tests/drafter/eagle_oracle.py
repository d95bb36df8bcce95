"""EAGLE drafts from scratch: one request, no cache, no batch. The dumb definition that the drafter is compared with."""

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafter.eagle.model import Drafting
from models import ops
from models.packed import PackedContext
from models.transformer import Transformer


@dataclass
class WholeContext:
    """Every row of one request, causal, at explicit positions."""

    positions: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def true_rows(target: Transformer, tokens: list[int], layers: tuple[int, ...]) -> Tensor:
    """[L, width]: states of a fresh, unpadded forward of this sequence alone; layer outputs by hooks."""
    seen: dict[int, Tensor] = {}
    handles = [
        target.blocks[layer].register_forward_hook(lambda _m, _i, out, layer=layer: seen.__setitem__(layer, out))
        for layer in layers
    ]
    with torch.no_grad():
        final = target(torch.tensor(tokens), PackedContext.from_lengths([len(tokens)]))
    for handle in handles:
        handle.remove()
    return torch.cat([*(seen[layer] for layer in layers), final], dim=1)


@dataclass
class Oracle:
    """Drafts for sequences whose drafter context begins at position `start`."""

    target: Transformer
    model: Drafting

    def states(self, sequence: list[int], start: int, drafted: list[int]) -> Tensor:
        """State that predicts the token behind sequence + drafted, [H]."""
        true = true_rows(self.target, sequence, self.model.layers)[start:-1]  # of positions start .. L - 2
        inputs, states = [*sequence[start + 1 :]], list(self.model.features(true))
        for step in range(len(drafted) + 1):
            positions = torch.arange(start, start + len(inputs))
            embedded = self.target.embed_tokens(torch.tensor(inputs))
            rotation = self.target.rope.at(positions)
            out = self.model.advance(embedded, torch.stack(states), rotation, WholeContext(positions))
            if step < len(drafted):
                inputs.append(drafted[step])
                states.append(out[-1])
        return self.model.readout(out[-1:])[0]

    def top(
        self, state: Tensor, k: int, temperature: float, key: int, position: int, scale: float, noise: bool
    ) -> tuple[list[int], list[float]]:
        logits = self.target.logits(state[None])
        tokens, scores = ops.sample_topk(
            logits,
            torch.tensor([-torch.inf]),
            torch.tensor([temperature]),
            torch.tensor([key]),
            torch.tensor([position]),
            k,
            scale=scale,
            noise=noise,
        )
        return tokens[0].tolist(), scores[0].tolist()

    def chain(self, sequence: list[int], start: int, depth: int, temperature: float, key: int, first: int) -> list[int]:
        """`first`: noise position of the first drafted token."""
        drafted: list[int] = []
        for step in range(depth):
            state = self.states(sequence, start, drafted)
            drafted.append(self.top(state, 1, temperature, key, first + step, 1.0, True)[0][0])
        return drafted

    def tree(
        self, sequence: list[int], start: int, depth: int, k: int, count: int, temperature: float, key: int, first: int
    ) -> set[tuple[int, ...]]:
        """The paths of the best `count` nodes."""
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        nodes: list[tuple[float, tuple[int, ...]]] = []
        for level in range(depth):
            children = []
            for score, path in frontier:
                state = self.states(sequence, start, list(path))
                tokens, scores = self.top(state, k, temperature, key, first + level, 1.0, True)
                children += [
                    (float(np.float32(score) + np.float32(s)), (*path, t)) for t, s in zip(tokens, scores, strict=True)
                ]
            nodes += children
            frontier = heapq.nlargest(k, children, key=lambda child: child[0])
        return {path for _, path in heapq.nlargest(count, nodes, key=lambda node: node[0])}
