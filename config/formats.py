"""Low-bit formats of weights and activations: names, bits, groups, and the devices that support them.

Defines the names of a weight's tensors, and the one table that configuration, engine, learner and export read. No
torch, no arithmetic (`models.low_bit`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Quantization = Literal["none", "w8a8", "w4a8", "w3a8", "w2a8", "w4a16", "fp8"]
SCALE_SUFFIX = "_scale"  # of the tensor that holds a quantised tensor's scales: NAME.weight, NAME.weight_scale
ZERO_SUFFIX = "_zero"
NARROW_GROUP = 64  # inputs, if a format's own groups do not divide the matrix
DEEPEST = 131_072  # most inputs of an 8-bit product whose sum always fits int32: 127 * 127 * DEEPEST < 2^31


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitFormat:
    """How a weight [N, K] of a projection is stored, and the activations it is multiplied with.

    Values are dense: one byte each, or two per byte (bits below 8, the even input in the low half; three and two bits
    use fewer levels of the same space). Scales are float32, zero points uint8, one of each per output and group. Groups
    are chosen per matrix: `group` inputs if that divides K, else 64 (SmolLM2-135M has 576 inputs and 1,536).
    """

    name: Quantization
    bits: int
    group: int | None  # most inputs that share a scale; None: all of a row
    activations: Literal["int8", "float8_e4m3fn", "none"]  # per token, symmetric; none: unquantised
    stored: Literal["int8", "uint8", "float8_e4m3fn"]  # a key of models.manifest.ITEM_BYTES
    devices: tuple[str, ...]

    @property
    def container_bits(self) -> int:
        """Bits of a stored value: 8, or 4 for all smaller formats."""
        return 8 if self.bits == 8 else 4

    @property
    def draft_devices(self) -> tuple[str, ...]:
        """Devices on which a self-drafter's copy gains by the format: a CPU has kernels for int8 activations only."""
        return self.devices if self.activations == "int8" else tuple(one for one in self.devices if one != "cpu")

    @property
    def asymmetric(self) -> bool:
        """Whether the format has zero points."""
        return self.group is not None

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Inputs per group that a matrix may have, the preferred size first. Empty: all of a row."""
        if self.group is None:
            return ()
        return (self.group, NARROW_GROUP) if self.group > NARROW_GROUP else (self.group,)

    def groups(self, depth: int) -> int:
        """Return the number of scales of one output. Raises ValueError if no group size divides the inputs."""
        if self.group is None:
            return 1
        for size in self.group_sizes:
            if depth % size == 0:
                return depth // size
        sizes = " or ".join(map(str, self.group_sizes))
        raise ValueError(f"{self.name} has groups of {sizes} inputs, which do not divide {depth}")


FORMATS: Mapping[str, LowBitFormat] = {
    form.name: form
    for form in (
        LowBitFormat(name="w8a8", bits=8, group=None, activations="int8", stored="int8", devices=("cpu", "cuda")),
        LowBitFormat(name="w4a8", bits=4, group=128, activations="int8", stored="uint8", devices=("cpu", "cuda")),
        LowBitFormat(name="w3a8", bits=3, group=128, activations="int8", stored="uint8", devices=("cpu", "cuda")),
        LowBitFormat(name="w2a8", bits=2, group=128, activations="int8", stored="uint8", devices=("cpu", "cuda")),
        LowBitFormat(name="w4a16", bits=4, group=128, activations="none", stored="uint8", devices=("cpu", "cuda")),
        LowBitFormat(
            name="fp8", bits=8, group=None, activations="float8_e4m3fn", stored="float8_e4m3fn", devices=("cuda",)
        ),
    )
}


def part_names(name: str, form: LowBitFormat) -> tuple[str, ...]:
    """Return the names of a weight's stored tensors: values (`name` itself), scales, zero points."""
    return (name, name + SCALE_SUFFIX, *([name + ZERO_SUFFIX] if form.asymmetric else []))


def part_specs(name: str, shape: tuple[int, ...], form: LowBitFormat) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype (a key of models.manifest.ITEM_BYTES) and shape of each stored tensor of a weight [N, K]."""
    outputs, inputs = shape
    scales = outputs, form.groups(inputs)
    values = outputs, inputs * form.container_bits // 8
    described = ((form.stored, values), ("float32", scales), ("uint8", scales))
    for part, (dtype, dimensions) in zip(part_names(name, form), described, strict=False):  # symmetric: no zero points
        yield part, dtype, dimensions


def low_bit_format(name: Quantization, device: str) -> LowBitFormat | None:
    """Return the format that rollout.quantization names; None for none. Raises ValueError if the device does not
    support it."""
    if name == "none":
        return None
    form = FORMATS[name]
    if device not in form.devices:
        others = ", ".join(other.name for other in FORMATS.values() if device in other.devices)
        raise ValueError(
            f"rollout.quantization={name} is computed on {' and '.join(form.devices)} only, and this engine is on "
            f"{device}: use {others} or none, or another rollout.engine.device"
        )
    return form
