"""Load the compiled kernels, and decide which tensors they support."""

import logging
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
_F32, _BF16 = torch.float32, torch.bfloat16
_PLAIN = (Tensor, torch.nn.Parameter)  # subclasses (DTensor, FakeTensor) have no address of their own


def _load() -> ModuleType | None:
    try:
        import paceline_native  # after torch, so that both use one OpenMP runtime
    except ImportError as error:
        _LOG.info("native kernels are not installed (%s); using torch. `pip install -e .` builds them", error)
        return None
    if not paceline_native.cpu_supported():
        warnings.warn(
            "this CPU lacks AVX2 or FMA, which the installed native kernels need; using the slower torch operations",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    paceline_native.cpu_level()  # reports an invalid PACELINE_CPU now instead of in the middle of a step
    module: ModuleType = paceline_native
    return module


kernels = _load()


def kernel_stamp() -> str:
    """Return the hash of the sources that the kernels were built from (CMakeLists.txt); "" without kernels or stamp."""
    if kernels is None or kernels.__file__ is None:
        return ""
    try:
        return Path(kernels.__file__).with_name("paceline_native.stamp").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def takes(x: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels support x and the others: plain CPU tensors of one dtype, float32 or bfloat16."""
    dtype = x.dtype
    if kernels is None or not x.is_cpu or type(x) not in _PLAIN or (dtype is not _F32 and dtype is not _BF16):
        return False
    for other in others:  # noqa: SIM110 - a generator takes half the time of a small operation
        if other.dtype is not dtype or not other.is_cpu or type(other) not in _PLAIN:
            return False
    return True


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch multiplies matrices of `dtype` on this CPU: float32 for bfloat16 without
    AVX-512 BF16, where torch's bfloat16 products take 2 to 40 times as long (PACELINE_CPU counts)."""
    native = kernels is not None and kernels.cpu_level() != "avx2"
    return _F32 if dtype is _BF16 and not native else dtype


def operand(x: Tensor, outputs: int, inputs: int, bias: Tensor | None) -> Tensor:
    """Return x [T, inputs] as an operand of the product with a weight [outputs, inputs], copied unless rows are dense.
    Raises ValueError if they and the bias [outputs] do not fit together."""
    if x.shape[1] != inputs or (bias is not None and bias.shape != (outputs,)):
        raise ValueError(f"x {tuple(x.shape)}, weight {(outputs, inputs)} and the bias do not fit together")
    return x if x.stride(1) == 1 else x.contiguous()


def dense_rows(x: Tensor) -> Tensor:
    """Return x [T, H, D], copied unless each row [H, D] is contiguous; rows may have gaps, as in a fused projection."""
    _, heads, head_dim = x.shape
    dense = (x.stride(2) == 1 or head_dim == 1) and (x.stride(1) == head_dim or heads == 1)
    return x if dense else x.contiguous()


def as_int32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


def as_int64(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()


def as_float32(x: Tensor) -> Tensor:
    return x if x.dtype is _F32 and x.is_contiguous() else x.float().contiguous()
