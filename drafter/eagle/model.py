"""The drafters' networks: a fusing projection and one decoder block of the target's kind. Owns their weights.

At position t the input is (embedding of token t+1, what the target computed at t); the output predicts token t+2
through the target's own LM head, and takes the place of the next position's input when drafting goes on from it.
Embedding and head are the target's and never trained. The names and shapes of the parameters follow what vLLM loads as
methods `eagle` and `eagle3`.
"""

from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from models import ops
from models.config import ModelConfig
from models.rope import Rotation
from models.transformer import AttentionContext, Block, Projection, RMSNorm

Kind = Literal["eagle", "eagle3"]
Layers = tuple[int, int, int] | tuple[()]


class DrafterNetwork(Protocol):
    """What drafting and training need of a network; both are `nn.Module`s."""

    config: ModelConfig  # the target's
    kind: Kind
    layers: Layers  # target layers (from 0) whose outputs it reads, beside or instead of the final state

    def features(self, rows: Tensor) -> Tensor:
        """What the target computed, [T, width] as in `contracts.records` -> first inputs [T, H]."""

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Embeddings of tokens t+1 and features of t, both [T, H] -> features of t+1, as drafted, [T, H]."""

    @property
    def input_norms(self) -> tuple[Tensor, Tensor] | None:
        """What norms embeddings and features, if anything does, before they are joined to [T, 2H]."""

    def enter(self, joined: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The part of `advance` before attention: queries, keys and values before norm and RoPE [T, (Hq + 2 Hkv) D],
        and the residual stream [T, H]."""

    def readout(self, features: Tensor) -> Tensor:
        """Output of `advance` [T, H] -> what the target's LM head takes, [T, H]."""

    def leave(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The end of `advance` and `readout`: the MLP's output and the residual stream, both [T, H] -> features, and
        what the head takes."""


class EagleBlock(Block):
    """A decoder block that takes the residual stream as it comes."""

    def __init__(self, config: ModelConfig, qk_norm: bool, *, invariant: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, 0, invariant=invariant, dtype=dtype, device=device)
        del self.input_norm
        if not qk_norm:
            self.q_norm = self.k_norm = None

    def project(self, x: Tensor) -> Tensor:
        """Residual stream [T, H] -> queries, keys and values before norm and RoPE [T, (Hq + 2 Hkv) D]."""
        qkv: Tensor = self.qkv_proj(x)
        return qkv


class EagleModel(nn.Module):
    """EAGLE, HASS and OSD: reads h_t after the target's final norm, and what it puts out stands for h_{t+1}.

    As in the original, the block has no input norm and nothing norms its output. Without `qk_norm` its queries and keys
    are not normed, whatever the target does: vLLM's `eagle` block has no such norms. Parameters are uninitialised: use
    `init_eagle` or `load_eagle`.
    """

    kind: Kind = "eagle"
    layers: Layers = ()

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        batch_invariant: bool,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        hidden, place = config.hidden_size, str(device)
        self.fuse = Projection(2 * hidden, hidden, False, batch_invariant, dtype=dtype, device=place)
        self.block = EagleBlock(config, qk_norm, invariant=batch_invariant, dtype=dtype, device=place)

    def features(self, rows: Tensor) -> Tensor:
        """The final states, which come last in every row."""
        return rows[:, rows.shape[1] - self.config.hidden_size :]

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """See DrafterNetwork."""
        fused: Tensor = self.fuse(torch.cat((embedded, features), dim=-1))
        out: Tensor = self.block(fused, rotation, context)
        return out

    @property
    def input_norms(self) -> None:
        """See DrafterNetwork."""
        return None

    def enter(self, joined: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        fused: Tensor = self.fuse(joined)
        return self.block.project(fused), fused

    def readout(self, features: Tensor) -> Tensor:
        """They are the states."""
        return features

    def leave(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        features = residual + out
        return features, features


class Eagle3Block(Block):
    """Attends from [normed embedding | normed feature] and adds to the feature, as vLLM's `eagle3` layers do."""

    def __init__(self, config: ModelConfig, *, invariant: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, 0, invariant=invariant, dtype=dtype, device=device)
        hidden, size = config.hidden_size, config.query_size + 2 * config.kv_size
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.qkv_proj = Projection(2 * hidden, size, config.qkv_bias, invariant, dtype=dtype, device=device)

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """See DrafterNetwork."""
        inputs = torch.cat((self.input_norm(embedded), self.hidden_norm(features)), dim=-1)  # [T, 2H]
        q, k, v = self.rotate(self.qkv_proj(inputs), rotation)
        return self.finish(features, context.attend(self.layer, q, k, v))


class Eagle3Model(nn.Module):
    """EAGLE-3: fuses the residual stream behind three layers of the target; a final norm of its own before the head.

    Parameters are uninitialised, as in EagleModel.
    """

    kind: Kind = "eagle3"

    def __init__(
        self,
        config: ModelConfig,
        layers: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        batch_invariant: bool,
    ) -> None:
        super().__init__()
        known = len(layers) == 3 and all(0 <= layer < config.num_layers for layer in layers)
        if not known or list(layers) != sorted(layers):
            raise ValueError(f"drafter.layers are {layers}: give three of 0 to {config.num_layers - 1}, ascending")
        self.config = config
        self.layers: Layers = layers
        hidden, place = config.hidden_size, str(device)
        self.fuse = Projection(3 * hidden, hidden, False, batch_invariant, dtype=dtype, device=place)
        self.block = Eagle3Block(config, invariant=batch_invariant, dtype=dtype, device=place)
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=place)

    def features(self, rows: Tensor) -> Tensor:
        """The three recorded outputs, which come first in every row, as one."""
        width = 3 * self.config.hidden_size
        if rows.shape[1] < width:
            raise ValueError(
                f"rows of {rows.shape[1]} scalars hold no three layer outputs of {self.config.hidden_size}: eagle3 "
                "needs states recorded with its layers"
            )
        fused: Tensor = self.fuse(rows[:, :width])
        return fused

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """See DrafterNetwork."""
        block = self.block
        assert isinstance(block, Eagle3Block)
        return block.advance(embedded, features, rotation, context)

    @property
    def input_norms(self) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        block = self.block
        assert isinstance(block, Eagle3Block)
        return block.input_norm.weight, block.hidden_norm.weight

    def enter(self, joined: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        return self.block.qkv_proj(joined), features

    def readout(self, features: Tensor) -> Tensor:
        """See DrafterNetwork."""
        normed: Tensor = self.norm(features)
        return normed

    def leave(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        states, features = ops.add_rms_norm(out, residual, self.norm.weight, self.norm.eps)
        return features, states


Drafting = EagleModel | Eagle3Model


def fused_layers(num_layers: int, given: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """The three layers whose outputs EAGLE-3 fuses: those given, or the usual low, middle and high ones.

    Layer l's output is what vLLM calls id l + 1. As there, (2, L // 2, L - 3) in its ids where these are three; else
    spread over a shallow target. Fewer than three layers are used twice.
    """
    if given is not None:
        return given
    low, middle, high = 1, num_layers // 2 - 1, num_layers - 4
    if not low < middle < high:
        low, middle, high = 0, (num_layers - 1) // 2, num_layers - 1
    return low, middle, high


def empty_eagle(
    kind: Kind,
    config: ModelConfig,
    layers: tuple[int, int, int] | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    batch_invariant: bool,
    qk_norm: bool = False,
) -> Drafting:
    """The network for a target of `config`, uninitialised. `layers` only counts for eagle3, `qk_norm` only for eagle
    (an eagle3 block is normed as the target's are). Raises ValueError."""
    if kind == "eagle":
        return EagleModel(config, dtype=dtype, device=device, batch_invariant=batch_invariant, qk_norm=qk_norm)
    fused = fused_layers(config.num_layers, layers)
    return Eagle3Model(config, fused, dtype=dtype, device=device, batch_invariant=batch_invariant)


def init_eagle(
    config: ModelConfig,
    seed: int,
    kind: Kind = "eagle",
    layers: tuple[int, int, int] | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    batch_invariant: bool,
) -> Drafting:
    """Fresh weights, the same on every device. The fusion starts as the mean of its inputs and the block's outputs near
    zero, so that an untrained drafter says something finite and training starts from the identity."""
    model = empty_eagle(kind, config, layers, dtype=dtype, device=device, batch_invariant=batch_invariant)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.copy_(noise.to(dtype))
        weight = model.fuse.weight
        inputs = weight.shape[1] // config.hidden_size
        weight.add_((torch.eye(config.hidden_size).repeat(1, inputs) / inputs).to(weight))
    return model


def copy_of(model: Drafting, *, dtype: torch.dtype, device: torch.device | str, batch_invariant: bool) -> Drafting:
    """The same network with the same weights, converted."""
    new = empty_eagle(
        model.kind,
        model.config,
        model.layers or None,
        dtype=dtype,
        device=device,
        batch_invariant=batch_invariant,
        qk_norm=model.block.q_norm is not None,
    )
    given, pinned = model.state_dict(), torch.device(device).type == "cuda"
    for name, tensor in new.state_dict().items():
        tensor.copy_(given[name], non_blocking=pinned)
    return new
