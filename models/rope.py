"""Rotary position embedding tables: the frequencies (plain, Llama-3 scaled). ops.split_qkv applies the rotation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import Llama3RopeScaling, ModelConfig


class SequenceTooLongError(ValueError):
    """More tokens than the model has positions."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of the angles of each token, float32 [T, D/2].

    Deliberately not a tuple: FSDP2's mixed precision casts every tensor in the arguments of a block, and angles rounded
    to bfloat16 would make the learner differ from the engine. It does not look into this class.
    """

    cos: Tensor
    sin: Tensor


class RopeTable:
    """cos and sin for every position, computed at first use on each device.

    Not a module: it has no state to save, so models can be built on the meta device and sharded freely.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tables: dict[torch.device, Rotation] = {}

    def at(self, positions: Tensor) -> Rotation:
        """Return the angles at positions [T] int64 in [0, max_position_embeddings).

        Raises SequenceTooLongError on CPU; on CUDA, where a check would synchronise, the device asserts.
        """
        table = self.table(positions.device)
        try:
            return Rotation(table.cos.index_select(0, positions), table.sin.index_select(0, positions))
        except IndexError:
            limit = self._config.max_position_embeddings
            raise SequenceTooLongError(
                f"a sequence of {int(positions.max()) + 1} tokens, but the model has {limit} positions "
                "(max_position_embeddings): leave it out or shorten it"
            ) from None

    def table(self, device: torch.device) -> Rotation:
        """The angles of every position: row p is position p's."""
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = self._compute(device)
        return table

    def _compute(self, device: torch.device) -> Rotation:
        with torch.inference_mode(False):  # Tables outlive the caller's inference mode.
            inverse = inverse_frequencies(self._config)
            positions = torch.arange(self._config.max_position_embeddings, dtype=torch.float32)
            angles = torch.outer(positions, inverse)  # [P, D/2]; always on the CPU, so that devices agree
            return Rotation(angles.cos().to(device), angles.sin().to(device))


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [D/2]: theta^(-2i/D), stretched by the Llama-3 rule if the config has one."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse: Tensor = 1.0 / (config.rope_theta**exponents)
    return inverse if config.rope_scaling is None else _llama3(inverse, config.rope_scaling)


def _llama3(inverse: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama-3.1 scaling (reference implementation, `apply_scaling`).

    Wavelengths above original/low_freq_factor are stretched by `factor`, those below original/high_freq_factor are
    kept, those between are interpolated."""
    original = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    stretched = torch.where(wavelength > original / scaling.low_freq_factor, inverse / scaling.factor, between)
    return torch.where(wavelength < original / scaling.high_freq_factor, inverse, stretched)
