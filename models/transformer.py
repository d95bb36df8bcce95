"""One decoder-only transformer for Llama, Mistral, Qwen2 and Qwen3, used by the learner and the engine alike.

Defines the arithmetic between tokens and logits. The attention context finds the keys (`models.packed.PackedContext`
for the learner, a cached one for the engine). No file access.

Tokens are one flat row dimension T (packed segments or the rows of a decoding batch); there is no batch dimension. With
`batch_invariant`, a row's logits depend bitwise on its own segment only. They do not depend on the number of rows in
the pass, on how its prompt was split into chunks, or on whether keys came from a cache.

For the learner: `fully_shard` each of `model.blocks`, then the model itself, then
`torch.distributed.fsdp.register_fsdp_forward_method(model, "logits")`, because `logits` uses parameters of the root.
"""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from config.formats import LowBitFormat, part_specs
from models import ops
from models.config import ModelConfig, require_low_bit
from models.dtypes import DTYPES
from models.layout import Slice, hf_layout
from models.low_bit import LowBitWeight, quantise
from models.rope import RopeTable, Rotation


class AttentionContext(Protocol):
    """Positions of a forward's tokens, and what they attend to."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]"""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] of these tokens, after RoPE -> attention output [T, Hq, D]."""


MASTER = "master"  # attribute of a parameter's copy that replaces it in computation: the parameter


class Projection(nn.Module):
    """y = x W^T + b, with W [N, K] as in nn.Linear."""

    mirror: "Mirror | None" = None  # see Transformer.mirror

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool,
        invariant: bool,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype, device=device)) if bias else None
        self.invariant = invariant
        self.bf16_gradients = False  # with adapters, see ops.adapted_linear
        self.adapters: nn.ModuleDict | None = None  # low-rank updates of parts of the weight, by name: see models.lora

    @property
    def updates(self) -> list[ops.LowRank]:
        """Low-rank updates that are added to the weight."""
        return [adapter.update for adapter in (self.adapters or {}).values() if isinstance(adapter, Adapter)]

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]"""
        if updates := self.updates:
            low_bit = None if self.mirror is None else self.mirror.of(self.weight, updates)
            return ops.adapted_linear(
                x,
                self.weight,
                self.bias,
                updates,
                invariant=self.invariant,
                low_bit=low_bit,
                bf16_gradients=self.bf16_gradients,
            )
        if self.mirror is not None:
            return ops.mirrored_linear(x, self.weight, self.mirror.of(self.weight), self.bias)
        return ops.linear(x, self.weight, self.bias, invariant=self.invariant)


class Adapter(nn.Module):
    """The low-rank update scale * b @ a of rows [start, stop) of a projection's weight."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, start: int, stop: int) -> None:
        """a: float32 [r, K], b: float32 [stop - start, r]."""
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.scale, self.start, self.stop = scale, start, stop

    @property
    def update(self) -> ops.LowRank:
        return ops.LowRank(self.a, self.b, self.scale, self.start, self.stop)


class Mirror:
    """An engine's copy of one projection's weight: quantised from the engine's dtype, as it is published."""

    def __init__(self, form: LowBitFormat, dtype: torch.dtype, cached: bool) -> None:
        self._form, self._dtype, self._cached = form, dtype, cached
        self._last: tuple[list[Tensor], list[int], LowBitWeight] | None = None

    def __deepcopy__(self, memo: object) -> "Mirror":
        return Mirror(self._form, self._dtype, self._cached)  # copied parameters have new version counters

    def of(self, weight: Tensor, updates: Sequence[ops.LowRank] = ()) -> LowBitWeight:
        """Return `weight` [N, K], with the updates merged, in few bits; recomputed only after an in-place change.

        If `weight` is a copy, its MASTER attribute is quantised instead."""
        master: Tensor = getattr(weight, MASTER, weight)
        parts = [master, *(factor for update in updates for factor in (update.a, update.b))]
        counted = self._cached and not any(part.is_inference() for part in parts)  # else changes are not counted
        versions = [part._version for part in parts] if counted else []
        same = self._last is not None and counted and self._last[1] == versions
        if self._last is not None and same and all(map(operator.is_, self._last[0], parts)):
            return self._last[2]
        exact = ops.merge_rows(master, updates) if updates else master.detach()
        low_bit = quantise(exact.to(self._dtype), self._form)
        if counted:
            self._last = parts, versions, low_bit
        return low_bit


class LowBitProjection(nn.Module):
    """y = x W^T + b, with W [N, K] stored in few bits: for engines, not differentiable."""

    weight: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None

    def __init__(
        self, inputs: int, outputs: int, bias: nn.Parameter | None, *, form: LowBitFormat, device: torch.device | str
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.form = inputs, outputs, form
        for name, dtype, shape in part_specs("weight", (outputs, inputs), form):
            self.register_buffer(name, torch.empty(shape, dtype=DTYPES[dtype], device=device))
        if not form.asymmetric:
            self.register_buffer("weight_zero", None)
        self.bias = bias

    @property
    def stored(self) -> LowBitWeight:
        """The weight, in its live memory."""
        return LowBitWeight(self.form, self.weight, self.weight_scale, self.weight_zero)

    def forward(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N]"""
        return ops.low_bit_linear(x, self.stored, self.bias)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]"""
        return ops.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    def __init__(self, vocab: int, size: int, *, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, size, dtype=dtype, device=device))

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, H]"""
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU.

    forward is project -> rotate -> context.attend -> finish. An inference runner with fused kernels may replace
    `rotate` + `attend` (its own norm, RoPE and cache write on the output of `project`) and keep the rest.
    """

    PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

    def __init__(self, config: ModelConfig, layer: int, *, invariant: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.invariant = invariant
        self.recompute = False

        def projection(inputs: int, outputs: int, bias: bool) -> Projection | LowBitProjection:
            return Projection(inputs, outputs, bias, invariant, dtype=dtype, device=device)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

        hidden = config.hidden_size
        self.input_norm = norm(hidden)
        self.qkv_proj = projection(hidden, config.query_size + 2 * config.kv_size, config.qkv_bias)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.o_proj = projection(config.query_size, hidden, config.output_bias)
        self.mlp_norm = norm(hidden)
        self.gate_up_proj = projection(hidden, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = projection(config.intermediate_size, hidden, config.mlp_bias)

    def store_in(self, form: LowBitFormat | None) -> None:
        """Allocate new, uninitialised memory for the four matrices in this format (None: the norms' dtype). Biases
        stay."""
        place = self.mlp_norm.weight
        for name in self.PROJECTIONS:
            old = getattr(self, name)
            new: Projection | LowBitProjection
            if form is None:
                new = Projection(old.inputs, old.outputs, False, self.invariant, dtype=place.dtype, device=place.device)
                new.bias = old.bias
            else:
                new = LowBitProjection(old.inputs, old.outputs, old.bias, form=form, device=place.device)
            setattr(self, name, new)

    def project(self, x: Tensor) -> Tensor:
        """Residual stream [T, H] -> queries, keys and values before norm and RoPE [T, (Hq + 2 Hkv) D]."""
        qkv: Tensor = self.qkv_proj(self.input_norm(x))
        return qkv

    def rotate(self, qkv: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Output of `project` -> q [T, Hq, D], k and v [T, Hkv, D]; q and k normalised (Qwen3) and rotated."""
        config = self.config
        q_norm = None if self.q_norm is None else self.q_norm.weight
        k_norm = None if self.k_norm is None else self.k_norm.weight
        return ops.split_qkv(
            qkv,
            rotation.cos,
            rotation.sin,
            config.num_heads,
            config.num_kv_heads,
            q_norm,
            k_norm,
            config.rms_norm_eps,
        )

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream [T, H] and attention output [T, Hq, D] -> residual stream after the MLP [T, H]."""
        attention: Tensor = self.o_proj(attended.reshape(x.shape[0], -1))
        normed, x = ops.add_rms_norm(attention, x, self.mlp_norm.weight, self.mlp_norm.eps)
        mlp: Tensor = self.down_proj(ops.swiglu(self.gate_up_proj(normed)))
        return x + mlp

    def stack_layer(self, input_norm: Tensor) -> ops.StackLayer:
        """Return the block's weights in the form of the fused kernels."""

        def weight(projection: nn.Module) -> Tensor | LowBitWeight:
            assert isinstance(projection, Projection | LowBitProjection)
            return projection.weight if isinstance(projection, Projection) else projection.stored

        return ops.StackLayer(
            input_norm=input_norm,
            qkv=weight(self.qkv_proj),
            qkv_bias=self.qkv_proj.bias,
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            o=weight(self.o_proj),
            o_bias=self.o_proj.bias,
            mlp_norm=self.mlp_norm.weight,
            gate_up=weight(self.gate_up_proj),
            gate_up_bias=self.gate_up_proj.bias,
            down=weight(self.down_proj),
            down_bias=self.down_proj.bias,
        )

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Residual stream in and out, [T, H]."""
        if self.recompute and torch.is_grad_enabled():
            # inside the module call, so that recomputation does not trigger FSDP2's hooks
            recomputed: Tensor = checkpoint(self._forward, x, rotation, context, use_reentrant=False)
            return recomputed
        return self._forward(x, rotation, context)

    def _forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        q, k, v = self.rotate(self.project(x), rotation)
        return self.finish(x, context.attend(self.layer, q, k, v))


class Transformer(nn.Module):
    """Embedding, blocks, final norm, language-model head.

    Parameters are uninitialised: use `models.checkpoint.load_model` or `init_model`. device="meta" allocates nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch_invariant: bool = True,
        low_bit: LowBitFormat | None = None,
    ) -> None:
        """low_bit: storage format of the blocks' matrices, for engines. Raises ModelConfigError if its groups do not
        divide them."""
        super().__init__()
        self.config = config
        self.batch_invariant = batch_invariant
        self.low_bit: LowBitFormat | None = None
        place = str(device)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=place)
        self.blocks = nn.ModuleList(
            Block(config, layer, invariant=batch_invariant, dtype=dtype, device=place)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=place)
        self.lm_head: Projection | LowBitProjection | None = (
            None
            if config.tied
            else Projection(config.hidden_size, config.vocab_size, False, batch_invariant, dtype=dtype, device=place)
        )
        self.rope = RopeTable(config)
        if low_bit is not None:
            self._store_in(low_bit)

    def forward(self, tokens: Tensor, context: AttentionContext, recorded: tuple[int, ...] = ()) -> Tensor:
        """tokens int64 [T] -> hidden states after the final norm [T, H].

        `recorded`: layers (from 0) whose outputs, the residual stream, precede the final state in each row: [T,
        (len(recorded) + 1) H]; see `final_states`.
        """
        rotation = self.rope.at(context.positions)
        x = self.embed_tokens(tokens)
        outputs: dict[int, Tensor] = {}
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, context)
            if layer in recorded:
                outputs[layer] = x
        hidden: Tensor = self.norm(x)
        if not recorded:
            return hidden
        return torch.cat((*(outputs[layer] for layer in recorded), hidden), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output of forward [T, H] -> [T, V], in the dtype of the weights; float32 on CUDA (`ops.head`)."""
        if isinstance(self.lm_head, LowBitProjection):
            few_bits: Tensor = self.lm_head(hidden)
            return few_bits
        return ops.head(hidden, self.head_weight, invariant=self.batch_invariant)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the language-model head, [V, H]."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return head.weight

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weights."""
        return self.lm_head is None

    def layout(self) -> list[Slice]:
        """Return the location of each Hugging Face tensor."""
        return hf_layout(self.config, self.low_bit)

    @contextmanager
    def storing(self, form: LowBitFormat | None) -> Iterator[None]:
        """Store the blocks' matrices in this format (None: the model's dtype) from now on; the caller's block fills new
        memory.

        Biases stay. If the block raises, the former state is restored. Both copies exist during the change. Raises
        ModelConfigError if the format's groups do not divide the matrices.
        """
        if form == self.low_bit:
            yield
            return
        before = self.low_bit, [(block, name, getattr(block, name)) for block, name in self._projections()]
        self._store_in(form)
        try:
            yield
        except BaseException:
            self.low_bit = before[0]
            for block, name, projection in before[1]:
                setattr(block, name, projection)
            raise

    def _store_in(self, form: LowBitFormat | None) -> None:
        if form is not None:
            require_low_bit(self.config, form)
        for block in self.blocks:
            assert isinstance(block, Block)
            block.store_in(form)
        self.low_bit = form

    def _projections(self) -> Iterator[tuple[nn.Module, str]]:
        return ((block, name) for block in self.blocks for name in Block.PROJECTIONS)

    def mirror(self, form: LowBitFormat | None, dtype: torch.dtype, *, cached: bool = True) -> None:
        """Compute as an engine with its matrices in `form`, quantised from `dtype`; None: stop doing so.

        Gradients pass straight through to the parameters (`ops.mirrored_linear`). `cached`: quantise a matrix again
        only if its parameter's version counter changed, which fails for parameters gathered by FSDP2. Raises
        ModelConfigError if the format's groups do not divide them.
        """
        if form is not None:
            require_low_bit(self.config, form)
        for block, name in self._projections():
            projection = getattr(block, name)
            if not isinstance(projection, Projection):
                raise TypeError("a model that stores its matrices in few bits has no masters to mirror")
            projection.mirror = None if form is None else Mirror(form, dtype, cached)

    def hf_config(self) -> dict[str, Any]:
        """config.json"""
        return self.config.to_hf()

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Keep only each block's input for the backward pass and recompute the rest: same gradients, less memory."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.recompute = enabled


def final_states(model: Transformer, rows: Tensor) -> Tensor:
    """Return the input of `logits` [T, H] from rows of `Transformer.forward` with any recorded layers [T, W]."""
    hidden = model.config.hidden_size
    return rows if rows.shape[1] == hidden else rows[:, rows.shape[1] - hidden :].contiguous()
