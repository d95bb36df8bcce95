"""The parts of the target that a drafter shares and never trains: embedding, LM head and RoPE, at one version.

Owns copies of these few tensors, cut out of the weights sent to engines, so that a trainer needs no target.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.training.cut import EMBEDDING, HEAD, HEAD_TENSORS, NORM
from models import ops
from models.config import ModelConfig
from models.manifest import WeightsManifest
from models.rope import RopeTable
from models.transformer import Transformer
from models.weights import Buffer, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetHead:
    """The shared tensors. `version` counts the RL steps that the target had learned. They never require gradients."""

    config: ModelConfig
    version: int
    embedding: Tensor  # [V, H]
    norm: Tensor  # [H], weight of the target's final norm, already applied to the states
    lm_head: Tensor  # [V, H]; the embedding itself if the target ties them
    rope: RopeTable

    @classmethod
    def of(cls, target: Transformer, version: int) -> "TargetHead":
        """Return views of a model in this process: valid until its weights change."""
        embedding = target.embed_tokens.weight.detach()
        head = embedding if target.lm_head is None else target.lm_head.weight.detach()
        return cls(
            config=target.config,
            version=version,
            embedding=embedding,
            norm=target.norm.weight.detach(),
            lm_head=head,
            rope=target.rope,
        )

    @classmethod
    def unpacked(
        cls,
        config: ModelConfig,
        manifest: WeightsManifest,
        buffer: Buffer,
        device: torch.device | str = "cpu",
        *,
        pin: bool = False,
    ) -> "TargetHead":
        """Copy the tensors out of a whole target's weights, or out of the result of `cut_head`. `pin`: into pinned host
        memory.

        Raises ValueError if a tensor is missing or has another shape than `config` says."""
        found = {name: tensor for name, tensor in unpack(manifest, buffer, verify=False) if name in HEAD_TENSORS}
        shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), NORM: (config.hidden_size,)}
        if not config.tied:
            shapes[HEAD] = shapes[EMBEDDING]
        for name, shape in shapes.items():
            if name not in found or tuple(found[name].shape) != shape:
                has = "is missing" if name not in found else f"is {list(found[name].shape)}"
                raise ValueError(
                    f"target weights version {manifest.version}: {name} {has}, the model has {list(shape)}"
                )
        place = "cpu" if pin else device
        kept = {
            name: torch.empty(shapes[name], dtype=found[name].dtype, device=place, pin_memory=pin).copy_(found[name])
            for name in shapes
        }
        head = kept.get(HEAD, kept[EMBEDDING])
        return cls(
            config=config,
            version=manifest.version,
            embedding=kept[EMBEDDING],
            norm=kept[NORM],
            lm_head=head,
            rope=RopeTable(config),
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, H]"""
        return F.embedding(tokens, self.embedding).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """States after the final norm [T, H] -> float32 [T, V]; on CUDA never rounded to the head's dtype."""
        return ops.head(hidden.to(self.lm_head.dtype), self.lm_head, invariant=False).float()
