"""The drafters' networks: a fusing projection and one decoder block like the target's. Owns their weights.

At position t the input is (embedding of token t+1, the target's output at t). The output predicts token t+2 through the
target's own LM head, and serves as the next position's input when drafting continues. Embedding and head are the
target's and never trained. Only a published EAGLE-3 head (`HeadShape`) may have its own LM head, which is trained with
it. Names and shapes of the parameters follow vLLM's methods `eagle` and `eagle3`.
"""

from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from drafter.published import HeadShape
from models import ops
from models.config import ModelConfig
from models.rope import RopeTable, Rotation
from models.transformer import AttentionContext, Block, Projection, RMSNorm, Transformer

Kind = Literal["eagle", "eagle3"]
Layers = tuple[int, int, int] | tuple[()]


class DrafterNetwork(Protocol):
    """The interface of a network for drafting and training; both networks are `nn.Module`s."""

    config: ModelConfig  # the target's
    kind: Kind
    layers: Layers  # target layers (from 0) whose outputs it reads, with or instead of the final state
    rope: RopeTable | None  # its own; None: the target's
    lm_head: Projection | None  # its own [draft vocabulary, H]; None: the target's
    ids: Tensor | None  # int64 [draft vocabulary], the token of each row of `lm_head`; None: row i is token i

    def features(self, rows: Tensor) -> Tensor:
        """Target outputs [T, width] as in `contracts.records` -> first inputs [T, H]."""

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Embeddings of tokens t+1 and features of t, both [T, H] -> drafted features of t+1, [T, H]."""

    @property
    def input_norms(self) -> tuple[Tensor, Tensor] | None:
        """The norms of embeddings and features, if any, before they are joined to [T, 2H]."""

    def enter(self, joined: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the part of `advance` before attention: queries, keys and values before norm and RoPE [T, (Hq + 2
        Hkv) D], and the residual stream [T, H]."""

    def readout(self, features: Tensor) -> Tensor:
        """Output of `advance` [T, H] -> input of the target's LM head, [T, H]."""

    def leave(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the end of `advance` and `readout`: the MLP's output and the residual stream, both [T, H] ->
        features, and the head's input."""


class EagleBlock(Block):
    """A decoder block without an input norm: it takes the residual stream unchanged."""

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
    """EAGLE, HASS and OSD: reads h_t after the target's final norm; its output approximates h_{t+1}.

    As in the original, the block has no input norm, and its output is not normed. Without `qk_norm` its queries and
    keys are not normed, whatever the target does, since vLLM's `eagle` block has no such norms. Parameters are
    uninitialised: use `init_eagle` or `load_eagle`.
    """

    kind: Kind = "eagle"
    layers: Layers = ()
    rope: RopeTable | None = None
    lm_head: Projection | None = None
    ids: Tensor | None = None

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
        """Return the final states, the last part of every row."""
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
        """Return them unchanged: they are the states."""
        return features

    def leave(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        features = residual + out
        return features, features


class Eagle3Block(Block):
    """Attends from [normed embedding | normed feature] and adds to the feature, like vLLM's `eagle3` layers; with
    `normed_residual`, to the normed feature."""

    def __init__(
        self, config: ModelConfig, normed_residual: bool, *, invariant: bool, dtype: torch.dtype, device: str
    ) -> None:
        super().__init__(config, 0, invariant=invariant, dtype=dtype, device=device)
        self.normed_residual = normed_residual
        hidden, size = config.hidden_size, config.query_size + 2 * config.kv_size
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.qkv_proj = Projection(2 * hidden, size, config.qkv_bias, invariant, dtype=dtype, device=device)

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """See DrafterNetwork."""
        normed = self.hidden_norm(features)
        q, k, v = self.rotate(self.qkv_proj(torch.cat((self.input_norm(embedded), normed), dim=-1)), rotation)
        return self.finish(normed if self.normed_residual else features, context.attend(self.layer, q, k, v))


class Eagle3Model(nn.Module):
    """EAGLE-3: fuses the residual stream after three layers of the target, with its own final norm before the head.

    Parameters are uninitialised, as in EagleModel. With its own LM head, `ids` is None until `set_ids`.
    """

    kind: Kind = "eagle3"
    ids: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        layers: tuple[int, int, int],
        shape: HeadShape | None = None,
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
        self.shape = shape = HeadShape.of(config) if shape is None else shape
        hidden, place, block = config.hidden_size, str(device), shape.block
        positions = replace(block, max_position_embeddings=config.max_position_embeddings)
        self.rope = None if block is config else RopeTable(positions)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, block.rms_norm_eps, dtype=dtype, device=place)

        self.fuse_norm = norm(3 * hidden) if shape.norm_before_fc else None
        self.fuse_norms = nn.ModuleList(norm(hidden) for _ in layers) if shape.fc_norm else None
        self.fuse = Projection(3 * hidden, hidden, False, batch_invariant, dtype=dtype, device=place)
        self.block = Eagle3Block(
            block, shape.norm_before_residual, invariant=batch_invariant, dtype=dtype, device=place
        )
        self.norm = norm(hidden)
        rows = shape.draft_vocab
        self.lm_head = (
            None if rows is None else Projection(hidden, rows, False, batch_invariant, dtype=dtype, device=place)
        )
        self.register_buffer("ids", None, persistent=False)  # not trained, so updates do not include it

    def set_ids(self, ids: Tensor | None) -> None:
        """int64 [draft vocabulary]: see DrafterNetwork."""
        self.ids = None if ids is None else ids.to(self.fuse.weight.device)

    def features(self, rows: Tensor) -> Tensor:
        """Return the three recorded outputs, the first part of every row, fused."""
        width = 3 * self.config.hidden_size
        if rows.shape[1] < width:
            raise ValueError(
                f"rows of {rows.shape[1]} scalars hold no three layer outputs of {self.config.hidden_size}: eagle3 "
                "needs states recorded with its layers"
            )
        outputs = rows[:, :width]
        if self.fuse_norm is not None:
            outputs = self.fuse_norm(outputs.contiguous())
        if self.fuse_norms is not None:
            parts = zip(self.fuse_norms, outputs.chunk(3, dim=1), strict=True)
            outputs = torch.cat([norm(part.contiguous()) for norm, part in parts], dim=1)
        fused: Tensor = self.fuse(outputs)
        return fused

    def advance(self, embedded: Tensor, features: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """See DrafterNetwork."""
        block = self.block
        assert isinstance(block, Eagle3Block)
        out = block.advance(embedded, features, rotation, context)
        return self.norm(out) if self.shape.norm_output else out

    @property
    def input_norms(self) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        block = self.block
        assert isinstance(block, Eagle3Block)
        return block.input_norm.weight, block.hidden_norm.weight

    def enter(self, joined: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        normed = joined[:, self.config.hidden_size :].contiguous() if self.shape.norm_before_residual else None
        return self.block.qkv_proj(joined), features if normed is None else normed

    def readout(self, features: Tensor) -> Tensor:
        """See DrafterNetwork."""
        if self.shape.norm_output:
            return features
        normed: Tensor = self.norm(features)
        return normed

    def leave(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """See DrafterNetwork."""
        states, features = ops.add_rms_norm(out, residual, self.norm.weight, self.norm.eps)
        return states if self.shape.norm_output else features, states


Drafting = EagleModel | Eagle3Model


def draft_logits(model: Drafting, target: Transformer, states: Tensor) -> Tensor:
    """Outputs of `readout` [T, H] -> logits of the target's tokens [T, V], through the drafter's own LM head if it has
    one, with -inf for tokens that it cannot draft."""
    if model.lm_head is None:
        return target.logits(states)
    logits = ops.head(states, model.lm_head.weight, invariant=target.batch_invariant)
    if model.ids is None:
        return logits
    every = logits.new_full((len(logits), target.config.vocab_size), -torch.inf)
    return every.index_copy_(1, model.ids, logits)


def fused_layers(num_layers: int, given: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """The three layers whose outputs EAGLE-3 fuses: those given, or the usual low, middle and high ones.

    Layer l's output is vLLM's id l + 1. As there, (2, L // 2, L - 3) in its ids if these are three layers; otherwise
    they are spread over a shallow target. A target with fewer than three layers uses some twice.
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
    shape: HeadShape | None = None,
) -> Drafting:
    """Return the uninitialised network for a target of `config`. `layers` and `shape` only apply to eagle3, `qk_norm`
    only to eagle (an eagle3 block is normed as its shape says, by default like the target's). Raises ValueError."""
    if kind == "eagle":
        return EagleModel(config, dtype=dtype, device=device, batch_invariant=batch_invariant, qk_norm=qk_norm)
    fused = fused_layers(config.num_layers, layers)
    return Eagle3Model(config, fused, shape, dtype=dtype, device=device, batch_invariant=batch_invariant)


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
    """Return fresh weights, the same on every device. The fusion starts as the mean of its inputs and the block's
    outputs near zero. So an untrained drafter is finite, and training starts from the identity."""
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
    """Return the same network with converted copies of its weights."""
    new = empty_eagle(
        model.kind,
        model.config,
        model.layers or None,
        dtype=dtype,
        device=device,
        batch_invariant=batch_invariant,
        qk_norm=model.block.q_norm is not None,
        shape=model.shape if isinstance(model, Eagle3Model) else None,
    )
    if isinstance(new, Eagle3Model):
        new.set_ids(model.ids)
    given, pinned = model.state_dict(), torch.device(device).type == "cuda"
    for name, tensor in new.state_dict().items():
        tensor.copy_(given[name], non_blocking=pinned)
    return new
