"""GPUs by their makers' data sheets. Owns the table; measures nothing (`benchmarks.gpu` proposes corrected entries).

Peaks are dense bfloat16 with float32 accumulation; links are per direction. `memory_bytes` is what the driver reports,
less than the name says. From NVIDIA's data sheets of HGX B200, GH200 (96 GB of HBM3), H100 (2.2), H200, A100 (2020),
L40S, L40, L4, T4 and GeForce RTX 4090 (Ada white paper, appendix A), and AWS's of the A10G. Streaming multiprocessors
are from the architecture white papers, memory from nvidia-smi listings.
"""

import re
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU."""

    name: str
    bandwidth_bytes_s: float  # of its memory
    bf16_flops_s: float
    memory_bytes: int
    multiprocessors: int
    peer_bytes_s: float  # to another GPU of the node: NVLink if there is one, else PCIe
    host_bytes_s: float  # PCIe
    words: tuple[str, ...]  # lower-case words that all occur in CUDA's name of it
    float8: bool = True  # its tensor cores multiply e4m3: Ada, Hopper and Blackwell
    overlaps: bool = False  # a kernel's programs start while the kernel before ends: Hopper and Blackwell

    @property
    def free_rows(self) -> float:
        """The rows at which a bfloat16 pass's arithmetic takes as long as reading the weights, by the peaks. Low-bit
        weights and products change both alike."""
        return self.bf16_flops_s / self.bandwidth_bytes_s


_PCIE3, _PCIE4, _PCIE5, _C2C = 16e9, 32e9, 64e9, 450e9
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="B200",
            bandwidth_bytes_s=8.0e12,
            bf16_flops_s=2250e12,
            memory_bytes=183_359 * MIB,
            multiprocessors=148,
            peer_bytes_s=900e9,
            host_bytes_s=_PCIE5,
            words=("b200",),
            overlaps=True,
        ),
        Device(
            name="GH200",
            bandwidth_bytes_s=4.0e12,
            bf16_flops_s=989e12,
            memory_bytes=97_871 * MIB,
            multiprocessors=132,
            peer_bytes_s=450e9,
            host_bytes_s=_C2C,
            words=("gh200",),
            overlaps=True,
        ),
        Device(
            name="H200",
            bandwidth_bytes_s=4.8e12,
            bf16_flops_s=989e12,
            memory_bytes=143_771 * MIB,
            multiprocessors=132,
            peer_bytes_s=450e9,
            host_bytes_s=_PCIE5,
            words=("h200",),
            overlaps=True,
        ),
        Device(
            name="H100-PCIE",
            bandwidth_bytes_s=2.0e12,
            bf16_flops_s=756e12,
            memory_bytes=81_559 * MIB,
            multiprocessors=114,
            peer_bytes_s=_PCIE5,
            host_bytes_s=_PCIE5,
            words=("h100", "pcie"),
            overlaps=True,
        ),
        Device(
            name="H100",
            bandwidth_bytes_s=3.35e12,
            bf16_flops_s=989e12,
            memory_bytes=81_559 * MIB,
            multiprocessors=132,
            peer_bytes_s=450e9,
            host_bytes_s=_PCIE5,
            words=("h100",),
            overlaps=True,
        ),
        Device(
            name="A100-40GB",
            bandwidth_bytes_s=1.555e12,
            bf16_flops_s=312e12,
            memory_bytes=40_960 * MIB,
            multiprocessors=108,
            peer_bytes_s=300e9,
            host_bytes_s=_PCIE4,
            words=("a100", "40gb"),
            float8=False,
        ),
        Device(
            name="A100",
            bandwidth_bytes_s=2.039e12,
            bf16_flops_s=312e12,
            memory_bytes=81_920 * MIB,
            multiprocessors=108,
            peer_bytes_s=300e9,
            host_bytes_s=_PCIE4,
            words=("a100",),
            float8=False,
        ),
        Device(
            name="L40S",
            bandwidth_bytes_s=864e9,
            bf16_flops_s=362e12,
            memory_bytes=46_068 * MIB,
            multiprocessors=142,
            peer_bytes_s=_PCIE4,
            host_bytes_s=_PCIE4,
            words=("l40s",),
        ),
        Device(
            name="L40",
            bandwidth_bytes_s=864e9,
            bf16_flops_s=181e12,
            memory_bytes=46_068 * MIB,
            multiprocessors=142,
            peer_bytes_s=_PCIE4,
            host_bytes_s=_PCIE4,
            words=("l40",),
        ),
        Device(
            name="L4",
            bandwidth_bytes_s=300e9,
            bf16_flops_s=121e12,
            memory_bytes=23_034 * MIB,
            multiprocessors=58,
            peer_bytes_s=_PCIE4,
            host_bytes_s=_PCIE4,
            words=("l4",),
        ),
        Device(
            name="T4",
            bandwidth_bytes_s=300e9,
            bf16_flops_s=8.1e12,  # that of float32: Turing's tensor cores have float16, no bfloat16
            memory_bytes=15_360 * MIB,
            multiprocessors=40,
            peer_bytes_s=_PCIE3,
            host_bytes_s=_PCIE3,
            words=("t4",),
            float8=False,
        ),
        Device(
            name="A10G",
            bandwidth_bytes_s=600e9,
            bf16_flops_s=70e12,
            memory_bytes=23_028 * MIB,
            multiprocessors=80,
            peer_bytes_s=_PCIE4,
            host_bytes_s=_PCIE4,
            words=("a10g",),
            float8=False,
        ),
        Device(
            name="RTX4090",
            bandwidth_bytes_s=1.008e12,
            bf16_flops_s=165.2e12,
            memory_bytes=24_564 * MIB,
            multiprocessors=128,
            peer_bytes_s=_PCIE4,
            host_bytes_s=_PCIE4,
            words=("4090",),
        ),
    )
}


def device_named(text: str) -> Device | None:
    """Return the entry for a name of ours, of CUDA or of Ray ("NVIDIA H100 80GB HBM3"); None: unknown."""
    for device in DEVICES.values():
        if text.upper() == device.name:
            return device
    parts = set(re.split(r"[^a-z0-9]+", text.lower()))
    parts |= {f"{part}b" for part in parts if re.fullmatch(r"\d+g", part)}  # Ray's "A100-40G"
    return next((device for device in DEVICES.values() if parts.issuperset(device.words)), None)
