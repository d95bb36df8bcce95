"""Loads the compiled kernels and says which tensors they take. Owns nothing else; computes nothing."""

import logging
import warnings
from types import ModuleType

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)
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
    module: ModuleType = paceline_native
    return module


kernels = _load()


def takes(x: Tensor, *same_dtype: Tensor) -> bool:
    """Whether the kernels can read x and the others: plain CPU tensors of one dtype, float32 or bfloat16."""
    dtype = x.dtype
    if kernels is None or not x.is_cpu or type(x) not in _PLAIN:
        return False
    if dtype is not torch.float32 and dtype is not torch.bfloat16:
        return False
    return all(other.dtype is dtype and type(other) in _PLAIN for other in same_dtype)


def dense_rows(x: Tensor) -> Tensor:
    """x [T, H, D], copied unless each row [H, D] is contiguous; rows may be apart, as in a fused projection."""
    _, heads, head_dim = x.shape
    dense = (x.stride(2) == 1 or head_dim == 1) and (x.stride(1) == head_dim or heads == 1)
    return x if dense else x.contiguous()


def as_int32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int32 and x.is_contiguous() else x.to(torch.int32).contiguous()


def as_float32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()
