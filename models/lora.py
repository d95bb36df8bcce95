"""Low-rank adapters of the native transformer's projections: their places, initialisation, and merging in an engine.
Their names are peft's (`models.peft` has the files, `models.ops` the arithmetic).
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from config.model import LoraOptions
from models import ops
from models.checkpoint import hf_targets
from models.directory import SafetensorsDirectory
from models.dtypes import DTYPES
from models.layout import hf_layout
from models.low_bit import is_quantised, named_parts, quantise
from models.manifest import TensorSpec
from models.peft import AdapterError, adapted, adapter_names, misfit, read_adapter
from models.transformer import Adapter, Projection, Transformer


def attach(model: Transformer, options: LoraOptions, seed: int) -> None:
    """Freeze the model and add float32 adapters to its projections, or load those at `options.path`. Raises
    AdapterError.

    New ones are initialised as in peft: A uniform within 1 / sqrt(inputs) (Kaiming's with a = sqrt(5)), B = 0, so that
    the model is unchanged. A seed gives the same numbers on every device."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    device = model.embed_tokens.weight.device
    given = None if options.path is None else read_adapter(options.path, model.config, options)
    for piece in adapted(model.config, options):
        assert piece.stop is not None
        module, _, _ = piece.parameter.rpartition(".")
        projection = model.get_submodule(module)
        assert isinstance(projection, Projection)
        if projection.adapters is None:
            projection.adapters, projection.bf16_gradients = nn.ModuleDict(), options.bf16_gradients
        bound = 1 / math.sqrt(projection.inputs)
        a = torch.empty(options.rank, projection.inputs).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(piece.stop - piece.start, options.rank)
        if given is not None:
            a, b = (given[name].float() for name in adapter_names(piece.hf_name))
        name = piece.hf_name.split(".")[-2]
        projection.adapters[name] = Adapter(a.to(device), b.to(device), options.scale, piece.start, piece.stop)


def adapter_parameters(model: Transformer, options: LoraOptions) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every A and B under its name in peft's files."""
    for piece in adapted(model.config, options):
        module, _, _ = piece.parameter.rpartition(".")
        adapter = model.get_submodule(f"{module}.adapters.{piece.hf_name.split('.')[-2]}")
        assert isinstance(adapter, Adapter)
        yield from zip(adapter_names(piece.hf_name), (adapter.a, adapter.b), strict=True)


def room_for(tensors: Sequence[TensorSpec], device: torch.device) -> dict[str, Tensor]:
    """Allocate memory by name for adapters that arrive piece by piece."""
    return {spec.name: torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device) for spec in tensors}


class AdapterBase:
    """The base matrices, for engines to merge adapters into: those of the directory that the engine started from.

    They are memory-mapped files: one copy in the page cache for all engines of a node, and still readable if the files
    are deleted."""

    def __init__(self, path: str | os.PathLike[str], options: LoraOptions, dtype: torch.dtype) -> None:
        """`dtype`: the model's, before low-bit storage. Raises WeightsMismatchError."""
        self._tensors, self._options, self._dtype = SafetensorsDirectory(Path(path)), options, dtype

    @torch.no_grad()
    def merge_into(self, model: Transformer, adapters: Mapping[str, Tensor], *, everything: bool) -> None:
        """Set the model to the base merged with these adapters, one matrix at a time, in place.

        `everything`: also the layers' other matrices, whose memory is new. Raises AdapterError for adapters of another
        model."""
        fault = misfit(model.config, self._options, {name: tensor.shape for name, tensor in adapters.items()})
        if fault:
            raise AdapterError(f"adapters of another model: {fault}")
        targets = hf_targets(model)
        for piece in hf_layout(model.config):
            weight, (a, b) = piece.hf_name, adapter_names(piece.hf_name)
            if a not in adapters and not (everything and is_quantised(weight, len(self._tensors.shape_of(weight)))):
                continue
            exact = self._tensors[weight].to(model.embed_tokens.weight.device, self._dtype)
            if a in adapters:
                place = exact.device
                exact = ops.merge(exact, adapters[a].to(place), adapters[b].to(place), self._options.scale)
            parts = [(weight, exact)] if model.low_bit is None else named_parts(weight, quantise(exact, model.low_bit))
            for name, values in parts:
                targets[name].copy_(values)
