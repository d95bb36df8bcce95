"""A learner's weights on their way out: in the engines' form, as adapters, or as a model directory. Owns their layout
and quantisation; changes none of them.

Every rank gathers: all call these methods, and rank 0 keeps or writes what comes of it.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from actors.training.parallel import Rank
from config.formats import LowBitFormat, part_specs
from config.model import LoraOptions, ModelOptions
from models.checkpoint import CausalModel, gathered, hf_shapes, hf_tensors, write_checkpoint
from models.compressed_tensors import write_quantised
from models.dtypes import DTYPES
from models.lora import adapter_parameters
from models.low_bit import is_quantised, quantised
from models.manifest import TensorSpec, WeightsManifest, lay_out
from models.peft import ADAPTER_DIR, write_adapter
from models.transformer import Transformer
from models.weights import Buffer, pack_each


class OutgoingWeights:
    """The weights of one trainer's network."""

    def __init__(
        self,
        network: CausalModel,
        rank: Rank,
        model: ModelOptions,
        *,
        form: LowBitFormat | None,
        lora: LoraOptions | None,
        adapters_only: bool,
    ) -> None:
        """`form`: of published weights; None: model.dtype. `adapters_only`: with `lora`, publish adapters instead of
        merged weights."""
        self._network, self._rank, self._model = network, rank, model
        self._form, self._lora, self._adapters_only = form, lora, adapters_only and lora is not None
        self._dtype = DTYPES[model.dtype]
        self.quantise_s = 0.0  # this rank's time in the last publish; on a device: until its work was launched

    def publish(self, version: int, *, masters: bool = False) -> tuple[WeightsManifest, Buffer] | None:
        """Return the weights in one buffer, in the engines' form, or the adapters; on rank 0, None elsewhere.
        `masters`: all weights, in the model's dtype, whatever rollout.quantization says. All ranks call it. In
        addition, the device holds one full parameter at a time (with its quantisation), and rank 0's holds two pieces
        of the buffer."""
        if self._rank.index != 0:
            deque(self.tensors(masters=masters or not self._adapters_only), maxlen=0)  # unrounded: for rank 0
            return None
        tensors = self.tensors(masters=masters)
        return pack_each(*self.layout(masters=masters), tensors, version, device=self._rank.device)

    def layout(self, *, masters: bool = False) -> tuple[tuple[TensorSpec, ...], int]:
        """Return the layout of published weights in their buffer, and its size in bytes. Gathers nothing."""
        described: list[tuple[str, str, tuple[int, ...]]] = []
        if self._adapters_only and not masters:
            return lay_out((name, "float32", tuple(p.shape)) for name, p in self._adapters())
        for name, shape in hf_shapes(self._network).items():
            if masters or self._form is None or not is_quantised(name, len(shape)):
                described.append((name, self._model.dtype, tuple(shape)))
            else:
                described += part_specs(name, tuple(shape), self._form)
        return lay_out(described)

    def export(self, out_dir: str | Path, form: LowBitFormat | None = None) -> None:
        """Write a Hugging Face model directory with the tokenizer, atomically: the masters, or quantised to `form`, as
        stock vLLM loads it. With LoRA, the adapters are merged, and also written to its folder ADAPTER_DIR. All ranks
        call it, rank 0 writes. Raises ValueError for a form without such a checkpoint."""
        source = self._model.path
        dirs: dict[str, Any] = {"tokenizer_dir": self._model.tokenizer or source, "source_dir": source}
        write = write_checkpoint if form is None else partial(write_quantised, form=form, dtype=self._dtype)
        with self._writing(self.tensors(masters=True)) as tensors:
            if self._rank.index == 0:
                write(self._network.hf_config(), tensors, out_dir=out_dir, **dirs)
        if (lora := self._lora) is not None:
            base, beside = str(Path(source).resolve()), Path(out_dir) / ADAPTER_DIR
            with self._writing(self._adapter_tensors()) as tensors:
                if self._rank.index == 0:
                    write_adapter(tensors, lora, base, beside)
        self._rank.barrier()

    @contextmanager
    def _writing(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """For the rank that writes them; all ranks go to their end."""
        try:
            yield tensors
        finally:
            deque(tensors, maxlen=0)  # other ranks wait in every gather, even if the disk is full

    def tensors(self, *, masters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the published tensors one at a time; all ranks must iterate to the end."""
        if self._adapters_only and not masters:
            return self._adapter_tensors()
        tensors = hf_tensors(self._network, self._dtype)
        self.quantise_s = 0.0
        if masters or self._form is None:
            return tensors
        return self._timed(tensors, self._form)

    def _timed(self, tensors: Iterator[tuple[str, Tensor]], form: LowBitFormat) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors` quantised. This equals the forward pass, which rounds fused parameters, because scales are
        per row."""
        for name, tensor in tensors:
            start_s = time.perf_counter()
            parts = list(quantised([(name, tensor)], form))
            self.quantise_s += time.perf_counter() - start_s
            del tensor
            yield from parts
            del parts  # freed before the next one is gathered

    def _adapters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every A and B by its name in peft's files."""
        lora = self._lora
        assert lora is not None
        assert isinstance(self._network, Transformer)
        return adapter_parameters(self._network, lora)

    def _adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, gathered(p)) for name, p in self._adapters())
