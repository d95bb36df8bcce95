"""One transformer divided among the ranks of a node: the part of each tensor per rank, and where their sums meet.

Heads, the MLP's inner dimension and the head's vocabulary are split evenly. Norms, embedding and the head's weight are
whole on every rank, the latter two because drafters read them. Splitting columns of qkv and of gate and up changes no
bit, because they are independent. o and down split the summed dimension: the ranks' parts are gathered and added in the
order of ranks, in float32, and rounded once. Sums are thus independent of the collective's implementation and of other
rows; another number of ranks rounds differently. Source: Megatron-LM (arXiv 1909.08053), section 3.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint import check_tensors, hf_shapes, hf_targets
from models.config import ModelConfig, ModelConfigError, ranks_fault, read_config
from models.directory import SafetensorsDirectory
from models.dtypes import DTYPES
from models.manifest import TensorSpec
from models.pieces import Scatter
from models.transformer import Block, Projection, Transformer

_KEYS = ("k_proj", "v_proj")
_ROWS = ("q_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")


class RankGroupError(RuntimeError):
    """A collective of the ranks failed: a rank ended or timed out."""


class RankGroup:
    """The collectives of one rank, over a torch process group (gloo on CPU, NCCL on GPUs). All ranks call each in the
    same order, with equal shapes."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def parts(self, part: Tensor) -> Tensor:
        """Gather [...] of each rank -> [ranks, ...], in the order of ranks. On GPUs the host does not wait. Raises
        RankGroupError."""
        part = part.contiguous()
        flat = part.new_empty((self.size * part.numel(),))
        try:
            self._group._allgather_base(flat, part.view(-1)).wait()
        except RuntimeError as error:
            raise RankGroupError(f"rank {self.rank} of {self.size}: {error}") from error
        return flat.view(self.size, *part.shape)

    def broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's bytes into every rank's uint8 tensor of that size. Raises RankGroupError."""
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise RankGroupError(f"rank {self.rank} of {self.size}: {error}") from error

    def sum(self, part: Tensor) -> Tensor:
        """Add the ranks' parts in order, in float32 at least, rounded to the dtype once: bitwise the same on every
        rank."""
        return sum_in_order(self.parts(part))


def sum_in_order(parts: Tensor) -> Tensor:
    """[ranks, ...] -> [...]: ((part 0 + part 1) + part 2) + ..., in float32 at least, rounded once."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


class SummedProjection(Projection):
    """A projection split over its inputs, [N, K / ranks] per rank; the bias is whole and added once."""

    def __init__(self, of: Projection, group: RankGroup) -> None:
        super().__init__(of.inputs, of.outputs, of.bias is not None, of.invariant, dtype=of.weight.dtype, device="meta")
        self.weight, self.bias = of.weight, of.bias
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's inputs [T, K / ranks] to [T, N], the same on every rank. Raises RankGroupError."""
        total = self.group.sum(ops.linear(x, self.weight, None, invariant=self.invariant))
        return total if self.bias is None else total + self.bias


class RankTransformer(Transformer):
    """One rank's part of a transformer, for engines. `config` is the part's; `whole` the model's.

    Its forward takes the same tokens and returns the same hidden states on every rank. Parameters are uninitialised:
    use `load_rank`.
    """

    def __init__(
        self,
        whole: ModelConfig,
        group: RankGroup,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch_invariant: bool = True,
    ) -> None:
        """Raises ModelConfigError if the ranks do not divide the model."""
        super().__init__(part_config(whole, group.size), dtype=dtype, device=device, batch_invariant=batch_invariant)
        self.whole, self.group = whole, group
        for block in self.blocks:
            assert isinstance(block, Block)
            for name in _COLUMNS:
                setattr(block, name, SummedProjection(getattr(block, name), group))
        width = -(-whole.vocab_size // group.size)
        self._vocabulary = slice(min(group.rank * width, whole.vocab_size), (group.rank + 1) * width)
        self._width = width
        self._head_part: Tensor | None = None

    def tables(self) -> "Tables":
        """Return embedding, final norm and head of the whole model: the same modules as in this part."""
        return Tables(self)

    @property
    def head_part(self) -> Tensor:
        """This rank's rows of the head, [<= V / ranks, H]; a view of the live memory, the same object each time."""
        if self._head_part is None:
            self._head_part = self.head_weight.detach()[self._vocabulary]
        return self._head_part

    def logits(self, hidden: Tensor) -> Tensor:
        """Same as Transformer.logits, [T, V] on every rank. Each logit is computed by one rank, so its bits do not
        depend on the number of ranks. Raises RankGroupError."""
        part = ops.head(hidden, self.head_part, invariant=self.batch_invariant)
        if part.shape[1] < self._width:
            part = F.pad(part, (0, self._width - part.shape[1]))
        columns = self.group.parts(part).transpose(0, 1).reshape(len(hidden), -1)
        return columns[:, : self.whole.vocab_size].contiguous()


class Tables(Transformer):
    """A model without blocks, for drafters that read embedding and head on one rank alone; uses no collective."""

    def __init__(self, part: RankTransformer) -> None:
        super().__init__(part.whole, device="meta", batch_invariant=part.batch_invariant)
        self.blocks = nn.ModuleList()
        self.embed_tokens, self.norm, self.lm_head = part.embed_tokens, part.norm, part.lm_head


def part_config(whole: ModelConfig, ranks: int) -> ModelConfig:
    """Return the shape of one rank's part. Raises ModelConfigError if `ranks` do not divide the model."""
    if fault := ranks_fault(whole, ranks):
        raise ModelConfigError(fault)
    return replace(
        whole,
        num_heads=whole.num_heads // ranks,
        num_kv_heads=max(1, whole.num_kv_heads // ranks),
        intermediate_size=whole.intermediate_size // ranks,
    )


def part_of(name: str, tensor: Tensor, whole: ModelConfig, rank: int, ranks: int) -> Tensor:
    """Return a rank's part of the tensor with this Hugging Face name, as a view.

    Rows of q, k, v, gate and up (and of their biases), columns of o and down, the whole of others. With more ranks than
    key heads, several ranks share the same rows of k and v."""
    module, _, kind = name.rpartition(".")
    projection = module.rpartition(".")[2]
    if projection in _KEYS:
        count = min(ranks, whole.num_kv_heads)
        return tensor.chunk(count)[rank * count // ranks]
    if projection in _ROWS:
        return tensor.chunk(ranks)[rank]
    if projection in _COLUMNS and kind == "weight":
        return tensor.chunk(ranks, dim=1)[rank]
    return tensor


def parts_of(tensors: Mapping[str, Tensor], whole: ModelConfig, rank: int, ranks: int) -> dict[str, Tensor]:
    """Return `part_of` each of a model's tensors, in their order."""
    return {name: part_of(name, tensor, whole, rank, ranks) for name, tensor in tensors.items()}


class PartScatter(Scatter):
    """Pieces of a flat buffer of the whole model into one rank's parts, in place: each tensor is whole for a moment."""

    def __init__(self, specs: Sequence[TensorSpec], model: RankTransformer) -> None:
        """Raises ValueError for tensors that are not those of the model."""
        super().__init__((), {})
        self._model, self._targets = model, hf_targets(model)
        self._specs = [spec for spec in specs if spec.name in self._targets]
        if missing := sorted(self._targets.keys() - {spec.name for spec in specs}):
            raise ValueError(f"{missing[0]} (and {len(missing) - 1} more) does not come")
        for spec in self._specs:
            target = self._targets[spec.name]
            part = self._part(spec, torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta"))
            if target.dtype != part.dtype or target.shape != part.shape:
                raise ValueError(f"{spec.name} is {target.dtype} {list(target.shape)} of a rank here, {spec} comes")
            size = math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
            self._spans.append((spec.offset_bytes, spec.offset_bytes + size))
        self._held: Tensor | None = None  # bytes of the next tensor

    def _part(self, spec: TensorSpec, tensor: Tensor) -> Tensor:
        model = self._model
        return part_of(spec.name, tensor, model.whole, model.group.rank, model.group.size)

    def _bytes(self, number: int, device: torch.device) -> Tensor:
        if self._held is None:
            begin, end = self._spans[number]
            self._held = torch.empty(end - begin, dtype=torch.uint8, device=device)
        return self._held

    def _whole(self, number: int) -> None:
        spec = self._specs[number]
        target = self._targets[spec.name]
        held = self._bytes(number, target.device)
        target.copy_(self._part(spec, held.view(DTYPES[spec.dtype]).view(spec.shape)))
        self._held = None


def check_whole(whole: ModelConfig, given: Mapping[str, Tensor]) -> None:
    """Raise WeightsMismatchError unless `given` has the names and shapes of the whole model."""
    check_tensors(hf_shapes(Transformer(whole, device="meta")), given, tied=whole.tied)


@torch.no_grad()
def load_rank(
    path: str | os.PathLike[str],
    group: RankGroup,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_invariant: bool = True,
) -> RankTransformer:
    """Load this rank's part of the model in a Hugging Face directory, converted to `dtype`; one tensor at a time is
    held whole. Raises UnsupportedModelError, ModelConfigError, WeightsMismatchError."""
    whole = ModelConfig.from_hf(read_config(path))
    model = RankTransformer(whole, group, dtype=dtype, device=device, batch_invariant=batch_invariant)
    with SafetensorsDirectory(Path(path)) as tensors:
        check_whole(whole, tensors)
        for name, target in hf_targets(model).items():
            target.copy_(part_of(name, tensors[name], whole, group.rank, group.size))
    return model
