"""Every decoder block of an inference step in one native call. Holds the addresses of the weights and the workspace.

The kernels are those of the separate operations, so hidden states are bitwise those of a module that calls
`ops.linear`, `ops.split_qkv`, `ops.paged_attention` ... in turn with prepacked weights. Never differentiable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from config.formats import LowBitFormat
from models.low_bit import LowBitWeight
from models.ops.low_bit import low_bit_panels, packable
from models.ops.matmul import panels_of, prepack
from models.ops.native import as_int32, as_int64, kernels, takes

_LANES = 8
_PACKED = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayer:
    """One block's weights: products [N, K] as in nn.Linear, biases [N], norms [H] (q_norm, k_norm: [D]).

    Either all products have the dtype of the other weights, or all have one low-bit format with int8 activations. The
    order of the fields is that of the kernel's `StackLayer` (native/kernels.h).
    """

    input_norm: Tensor
    qkv: Tensor | LowBitWeight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor | LowBitWeight
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor | LowBitWeight
    gate_up_bias: Tensor | None
    down: Tensor | LowBitWeight
    down_bias: Tensor | None

    def named(self) -> dict[str, Tensor | LowBitWeight]:
        """Return the weights that are present, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def form(self) -> LowBitFormat | None:
        """Low-bit format of the products; None if they have none."""
        return self.down.format if isinstance(self.down, LowBitWeight) else None

    @property
    def intermediate(self) -> int:
        return self.down.inputs if isinstance(self.down, LowBitWeight) else self.down.shape[1]


class DecoderStack:
    """Embedding, blocks and final norm of a Llama-like transformer over a paged cache.

    embedding [V, H]; cos, sin float32 [P, D/2], the angles of every position. Weights may be changed in place: version
    counters reveal the change of packed ones. Where these do not count (`.data`, under inference_mode), call `prepack`
    or `prepack_low_bit` again. Raises ValueError if the weights do not fit together or the kernel does not support them
    (check `supports` first).
    """

    def __init__(
        self,
        layers: Sequence[StackLayer],
        embedding: Tensor,
        final_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        query_heads: int,
        kv_heads: int,
        eps: float,
    ) -> None:
        (vocab, hidden), (positions, half) = embedding.shape, cos.shape
        if not layers or not self.supports(embedding, 2 * half):
            raise ValueError("the stack needs the native kernels, plain float32 or bfloat16 CPU weights, D % 8 == 0")
        head_dim, intermediate = 2 * half, layers[0].intermediate
        qkv_width, q_width = (query_heads + 2 * kv_heads) * head_dim, query_heads * head_dim
        shapes = {
            "input_norm": (hidden,),
            "qkv": (qkv_width, hidden),
            "qkv_bias": (qkv_width,),
            "q_norm": (head_dim,),
            "k_norm": (head_dim,),
            "o": (hidden, q_width),
            "o_bias": (hidden,),
            "mlp_norm": (hidden,),
            "gate_up": (2 * intermediate, hidden),
            "gate_up_bias": (2 * intermediate,),
            "down": (hidden, intermediate),
            "down_bias": (hidden,),
        }
        form = layers[0].form
        for number, layer in enumerate(layers):
            for name, weight in layer.named().items():
                if form is not None and name in _PACKED:
                    _check_low_bit(f"layer {number} {name}", weight, shapes[name], form)
                else:
                    _check(f"layer {number} {name}", weight, shapes[name], embedding.dtype)
        _check("embedding", embedding, (vocab, hidden), embedding.dtype)
        _check("final norm", final_norm, (hidden,), embedding.dtype)
        for angles in (cos, sin):
            _check("angles", angles, (positions, half), torch.float32)
        self._layers = list(layers)
        self._packed: list[Tensor | LowBitWeight] = [getattr(layer, name) for layer in layers for name in _PACKED]
        # Views keep the memory alive if a parameter gets other storage.
        self._owners = [
            part.detach() for layer in layers for weight in layer.named().values() for part in _parts(weight)
        ]
        self._embedding, self._final_norm = embedding.detach(), final_norm.detach()
        self._cos, self._sin = cos, sin
        self._half, self._hidden = embedding.dtype is torch.bfloat16, hidden
        self._cache_shape = (len(layers), kv_heads, head_dim)
        self._shape = kernels.StackShape(  # type: ignore[union-attr]
            layers=len(layers),
            hidden=hidden,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=vocab,
            positions=positions,
            eps=eps,
            scale=head_dim**-0.5,
            bits=0 if form is None else form.container_bits,
            hidden_groups=1 if form is None else form.groups(hidden),
            query_groups=1 if form is None else form.groups(q_width),
            inner_groups=1 if form is None else form.groups(intermediate),
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._workspace_rows = 0
        self.refresh()

    @staticmethod
    def supports(weight: Tensor, head_dim: int) -> bool:
        """Return whether a kernel supports such weights (older builds of the extension have none)."""
        return takes(weight) and head_dim % _LANES == 0 and hasattr(kernels, "decoder_stack")

    def refresh(self) -> None:
        """Use newly written weights: pack those whose panels are outdated."""
        self._panels = [_packed(weight) for weight in self._packed]
        self._counted = [part for weight in self._packed for part in _parts(weight) if not part.is_inference()]
        self._versions = [part._version for part in self._counted]
        self._addresses = torch.tensor([layer_addresses(layer) for layer in self._layers], dtype=torch.int64)

    def refresh_changed(self) -> None:
        """Call `refresh` if version counters show that weights changed."""
        if [part._version for part in self._counted] != self._versions:
            self.refresh()

    def _check_caches(self, k_cache: Tensor, v_cache: Tensor) -> None:
        layers, kv_heads, head_dim = self._cache_shape
        if k_cache.shape != v_cache.shape or k_cache.shape != (layers, k_cache.shape[1], kv_heads, head_dim):
            raise ValueError(f"caches must be [{layers}, slots, {kv_heads}, {head_dim}], got {tuple(k_cache.shape)}")
        if not takes(self._embedding, k_cache, v_cache) or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            raise ValueError("caches must be contiguous CPU tensors of the weights' dtype")

    def reserve(self, rows: int) -> None:
        """Make the workspace large enough for this many rows; later steps up to that size allocate only their
        result."""
        if rows > self._workspace_rows:
            self._workspace = torch.empty(self._shape.workspace_bytes(self._half, rows), dtype=torch.uint8)
            self._workspace_rows = rows

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_offsets: Tensor,
        context_lens: Tensor,
        block_tokens: int,
        *,
        tree_mask: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states after the final norm [T, H]; write the rows' keys and values to their slots, which are
        distinct.

        tokens, positions, kv_slots int64 [T]; caches [layers, slots, Hkv, D]; the rest as in `ops.paged_attention`.
        Raises IndexError for a token, position, slot or block outside its table, ValueError for inconsistent shapes or
        lengths.
        """
        self.refresh_changed()
        rows, requests = tokens.shape[0], context_lens.shape[0]
        if not tokens.shape == positions.shape == kv_slots.shape == (rows,):
            raise ValueError(f"tokens, positions and kv_slots must be [{rows}]")
        if query_offsets.shape != (requests + 1,) or block_tables.shape[0] != requests:
            raise ValueError("context_lens [B], query_offsets [B + 1] and block_tables [B, M] disagree about B")
        self._check_caches(k_cache, v_cache)
        tokens, positions, kv_slots = as_int64(tokens), as_int64(positions), as_int64(kv_slots)
        block_tables, query_offsets = as_int32(block_tables), as_int32(query_offsets)
        context_lens = as_int32(context_lens)
        mask_address = mask_width = 0
        if tree_mask is not None:
            if tree_mask.shape[0] != rows:
                raise ValueError(f"tree_mask has {tree_mask.shape[0]} rows for {rows} query rows")
            tree_mask = tree_mask.to(torch.uint8).contiguous()
            mask_address, mask_width = tree_mask.data_ptr(), tree_mask.shape[1]
        self.reserve(rows)
        out = self._embedding.new_empty((rows, self._hidden))
        kernels.decoder_stack(  # type: ignore[union-attr]
            self._half,
            self._shape,
            self._addresses.data_ptr(),
            self._embedding.data_ptr(),
            self._final_norm.data_ptr(),
            self._cos.data_ptr(),
            self._sin.data_ptr(),
            tokens.data_ptr(),
            positions.data_ptr(),
            kv_slots.data_ptr(),
            rows,
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.shape[1],
            block_tables.data_ptr(),
            block_tables.shape[1],
            query_offsets.data_ptr(),
            context_lens.data_ptr(),
            requests,
            block_tokens,
            mask_address,
            mask_width,
            self._workspace.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def layer_addresses(layer: StackLayer) -> list[int]:
    """Return the kernel's StackLayer: an address per field, 0 for an absent weight. Products must be packed."""
    row = []
    for field in fields(layer):
        weight = getattr(layer, field.name)
        source = _packed(weight) if field.name in _PACKED else weight
        row.append(0 if source is None else source.data_ptr())
    return row


def _packed(weight: Tensor | LowBitWeight) -> Tensor:
    """Return the weight's panels, packed now if they are outdated."""
    if isinstance(weight, LowBitWeight):
        return low_bit_panels(weight)
    if panels_of(weight) is None:
        prepack(weight)
    panels = panels_of(weight)
    assert panels is not None
    return panels


def _parts(weight: Tensor | LowBitWeight) -> tuple[Tensor, ...]:
    return weight.parts if isinstance(weight, LowBitWeight) else (weight,)


def _check_low_bit(name: str, weight: Tensor | LowBitWeight, shape: tuple[int, ...], form: LowBitFormat) -> None:
    if (
        not isinstance(weight, LowBitWeight)
        or weight.format != form
        or (weight.outputs, weight.inputs) != shape
        or not packable(weight)
    ):
        raise ValueError(f"{name}: needs a CPU weight {list(shape)} in {form.name}, whose activations are int8")


def _check(name: str, weight: Tensor | LowBitWeight, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if isinstance(weight, LowBitWeight):
        raise ValueError(f"{name}: is in {weight.format.name}, the last product of the first layer is not in few bits")
    plain = takes(weight) and weight.is_contiguous()
    if not plain or weight.shape != shape or weight.dtype is not dtype:
        raise ValueError(
            f"{name}: needs a contiguous CPU tensor {list(shape)} of {dtype}, got {list(weight.shape)} of "
            f"{weight.dtype} on {weight.device}"
        )
