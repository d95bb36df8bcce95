"""Versions, and the attention that torch chooses for our shapes."""

import importlib.metadata
import platform

import torch
import torch.nn.functional as F

from benchmarks.gpu_parts.session import Session, part
from models.ops.varlen import variable_length

_PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "pydantic", "ray", "vllm", "pytest")


def run(session: Session) -> None:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    session.row(python=platform.python_version(), versions=versions, cuda=torch.version.cuda)
    if session.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        session.row(
            device=found.name,
            memory_bytes=found.total_memory,
            predicted_memory_bytes=session.gpu.memory_bytes,
            multiprocessors=found.multi_processor_count,
            predicted_multiprocessors=session.gpu.multiprocessors,
            capability=list(torch.cuda.get_device_capability()),
            cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        )
    _varlen(session)
    for dtype in (torch.bfloat16, torch.float32):
        for masked in (False, True):
            _attention(session, dtype, masked)


def _attention(session: Session, dtype: torch.dtype, masked: bool) -> None:
    """Report the kernels of one call of torch's attention with 28 query heads on 4 key heads."""
    rows, context = (4, 32) if session.rehearse else (512, 2560)
    q = torch.randn(2, 28, rows, 128, dtype=dtype, device=session.device)
    k, v = (torch.randn(2, 4, context, 128, dtype=dtype, device=session.device) for _ in range(2))
    mask = torch.ones(2, 1, rows, context, dtype=torch.bool, device=session.device) if masked else None

    def work() -> None:
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    first_s = session.seconds(work, repeats=1, warm_up=0)
    events = session.profiled(work)
    chosen = [event.key for event in events if "attention" in event.key and "scaled_dot" in event.key]
    milliseconds = session.seconds(work) * 1e3
    session.row(sdpa=str(dtype), masked=masked, chosen=chosen, first_ms=first_s * 1e3, ms=milliseconds)


def _varlen(session: Session) -> None:
    """Report whether the kernel of the learner's attention is available."""
    found = session.device == "cuda" and variable_length(torch.device("cuda"), torch.bfloat16, 28, 4, 128) is not None
    session.row(variable_length_attention=found)


if __name__ == "__main__":
    part(run, "machine")
