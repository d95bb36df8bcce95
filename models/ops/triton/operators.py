"""Definitions of the operators `paceline::*`: schema, CPU (the oracle), meta (shapes), CUDA (launched at first use).

Defines which tensors they support and how many kernels each launches; the kernels and the oracle define the arithmetic.
There is no gradient: callers that need one use torch (`models.ops`).
"""

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.ops import reference

_LOG = logging.getLogger(__name__)
MAX_TOPK = 64  # limit of sample_topk; torch computes larger k
_DTYPES = (torch.float32, torch.bfloat16)

_SCHEMAS = (
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor normed, Tensor total)",
    "rope_write(Tensor qkv, Tensor cos, Tensor sin, Tensor positions, Tensor kv_slots, Tensor? q_norm, Tensor? k_norm,"
    " float eps, Tensor(a!) k_cache, Tensor(b!) v_cache) -> Tensor",
    "swiglu(Tensor gate_up) -> Tensor",
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_offsets,"
    " Tensor context_lens, Tensor? tree_mask, int block_tokens, int max_query, int max_context, float scale,"
    " Tensor? work=None) -> Tensor",
    "linear(Tensor x, Tensor weight, Tensor? bias, bool float32_out) -> Tensor",
    "head(Tensor hidden, Tensor weight) -> Tensor",
    "sample(Tensor logits, Tensor cutoff, Tensor temperature, Tensor keys, Tensor positions)"
    " -> (Tensor tokens, Tensor logprobs, Tensor logprobs_t1)",
    "sample_topk(Tensor logits, Tensor cutoff, Tensor temperature, Tensor keys, Tensor positions, int k, float scale,"
    " bool noise) -> (Tensor tokens, Tensor logprobs)",
    "cutoff(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p) -> Tensor",
)

# Kernels per call, for budgets and predictions.
LAUNCHES: Mapping[str, int] = {
    "rms_norm": 1,
    "add_rms_norm": 1,
    "rope_write": 1,
    "swiglu": 1,
    "paged_attention": 2,
    "linear": 1,
    "head": 1,
    "sample": 2,
    "sample_topk": 2,
    "cutoff": 1,
    "draft_inputs": 1,
    "tree_feed": 1,
    "tree_best": 1,
    "quantise_tokens": 1,
    "add_norm_quantise": 1,
    "swiglu_quantise": 1,
    "low_bit_linear": 1,
}


def operators_take(x: Tensor, *others: Tensor) -> bool:
    """Return whether the operators support x and the others: on CUDA with Triton installed, or meta; of one dtype,
    float32 or bfloat16; without gradient."""
    if not (x.is_cuda or x.is_meta) or x.dtype not in _DTYPES:
        return False
    grad = torch.is_grad_enabled()
    if grad and x.requires_grad:
        return False
    if any(other.dtype is not x.dtype or (grad and other.requires_grad) for other in others):
        return False
    return x.is_meta or installed()


@functools.cache
def installed() -> bool:
    """Return whether Triton's kernels are available on CUDA. If not, logs it once."""
    if importlib.util.find_spec("triton") is not None:
        return True
    _LOG.warning("Triton is not installed, so CUDA takes torch's slower operations: pip install triton")
    return False


def kernel_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a failed launch or capture: torch's errors, and Triton's, which are no RuntimeErrors
    (OutOfResources, PTXASError, CompilationError)."""
    if "triton" not in sys.modules:
        return (RuntimeError,)
    return RuntimeError, import_module("triton.errors").TritonError


def launch_apart() -> bool:
    """From now on start a kernel only when the one before has ended (`overlap`). False: that is so already."""
    return "triton" in sys.modules and bool(import_module(f"{__package__}.direct").launch_apart())


def launched(name: str, module: str, oracle: Callable[..., Any]) -> Callable[..., Any]:
    """Return the CUDA implementation, which imports `module` of this package at its first call.

    Without Triton, or once Triton cannot compile the kernel for this device, the slow oracle computes, and a capture
    fails."""
    launch: Callable[..., Any] | None = None

    def call(*arguments: Any, **how: Any) -> Any:
        nonlocal launch
        if launch is None:
            launch = getattr(import_module(f"{__package__}.{module}"), name) if installed() else oracle
        if launch is oracle:
            return oracle(*arguments)
        try:
            return launch(*arguments, **how)
        except kernel_errors() as error:
            if isinstance(error, RuntimeError):
                raise
            _LOG.exception(
                "Triton's kernel of paceline::%s does not run on this device; torch's operations compute it from now "
                "on, slower and rounded otherwise",
                name,
            )
            launch = oracle
            return oracle(*arguments)

    return call


def _cpu_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_offsets: Tensor,
    context_lens: Tensor,
    tree_mask: Tensor | None,
    block_tokens: int,
    max_query: int,
    max_context: int,
    scale: float,
    work: Tensor | None = None,
) -> Tensor:
    """The oracle over the rows that belong to requests. Checks the bounds, then uses the actual lengths."""
    rows = int(query_offsets[-1])
    out = torch.zeros_like(q)
    if not rows:
        return out
    if int(query_offsets.diff().max()) > max_query or int(context_lens.max()) > max_context:
        raise ValueError(f"a request has more than max_query={max_query} rows or max_context={max_context} tokens")
    out[:rows] = reference.paged_attention(
        q[:rows],
        k_cache,
        v_cache,
        block_tables,
        query_offsets,
        context_lens,
        block_tokens,
        scale,
        tree_mask=None if tree_mask is None else tree_mask[:rows],
    )
    return out


def _cpu_sample_topk(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    k: int,
    scale: float,
    noise: bool,
) -> tuple[Tensor, Tensor]:
    tokens, logprobs = reference.sample_topk(logits, cutoff, temperature, keys, positions, k, scale=scale, noise=noise)
    return tokens.contiguous(), logprobs


def _cpu_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return reference.rms_norm(total, weight, eps), total


def _cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, float32_out: bool) -> Tensor:
    wide = reference.linear(x, weight, bias)
    return wide if float32_out else wide.to(x.dtype)


_ON_CPU: Mapping[str, Callable[..., Any]] = {
    "rms_norm": reference.rms_norm,
    "add_rms_norm": _cpu_add_rms_norm,
    "rope_write": reference.rope_write,
    "swiglu": reference.swiglu,
    "paged_attention": _cpu_paged_attention,
    "linear": _cpu_linear,
    "head": reference.linear,
    "sample": reference.sample,
    "sample_topk": _cpu_sample_topk,
    "cutoff": reference.cutoff,
}


def _dense(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(shape or x.shape, dtype=dtype or x.dtype)


def _meta_sample(logits: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    logprobs = _dense(logits, rows, dtype=torch.float32)
    return _dense(logits, rows, dtype=torch.int64), logprobs, torch.empty_like(logprobs)


def _meta_sample_topk(
    logits: Tensor,
    cutoff: Tensor,
    temperature: Tensor,
    keys: Tensor,
    positions: Tensor,
    k: int,
    scale: float,
    noise: bool,
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return _dense(logits, rows, k, dtype=torch.int64), _dense(logits, rows, k, dtype=torch.float32)


def _meta_rope_write(qkv: Tensor, *rest: Any) -> Tensor:
    kv_heads, head_dim = rest[-1].shape[1:]
    return _dense(qkv, qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)


def _meta_linear(x: Tensor, weight: Tensor, bias: Tensor | None, float32_out: bool) -> Tensor:
    return _dense(x, x.shape[0], weight.shape[0], dtype=torch.float32 if float32_out else x.dtype)


_ON_META: Mapping[str, Callable[..., Any]] = {
    "rms_norm": lambda x, weight, eps: _dense(x),
    "add_rms_norm": lambda x, residual, weight, eps: (_dense(x), _dense(x)),
    "rope_write": _meta_rope_write,
    "swiglu": lambda gate_up: _dense(gate_up, gate_up.shape[0], gate_up.shape[1] // 2),
    "paged_attention": lambda q, *rest: _dense(q),
    "linear": _meta_linear,
    "head": lambda hidden, weight: _dense(hidden, hidden.shape[0], weight.shape[0], dtype=torch.float32),
    "sample": _meta_sample,
    "sample_topk": _meta_sample_topk,
    "cutoff": lambda logits, *rest: _dense(logits, logits.shape[0], dtype=torch.float32),
}


def _cuda_head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Computed by cuBLAS; torch before 2.11 rounds to bfloat16 first."""
    if hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return F.linear(hidden, weight).float()


_LIBRARY: Any = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
_ON_CUDA: dict[str, Callable[..., Any]] = {}
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _ON_CUDA[_name] = _cuda_head if _name == "head" else launched(_name, "launch", _ON_CPU[_name])
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _ON_CPU[_name], "CPU")
    _LIBRARY.impl(_name, _ON_META[_name], "Meta")
    _LIBRARY.impl(_name, _ON_CUDA[_name], "CUDA")

# The overloads themselves: a call through the packet resolves the overload every time.
rms_norm = torch.ops.paceline.rms_norm.default
add_rms_norm = torch.ops.paceline.add_rms_norm.default
rope_write = torch.ops.paceline.rope_write.default
swiglu = torch.ops.paceline.swiglu.default
paged_attention = torch.ops.paceline.paged_attention.default
linear = torch.ops.paceline.linear.default
head = torch.ops.paceline.head.default
sample = torch.ops.paceline.sample.default
sample_topk = torch.ops.paceline.sample_topk.default
cutoff = torch.ops.paceline.cutoff.default


def is_direct(x: Tensor) -> bool:
    """Whether inference on x's device may call CUDA's implementations themselves: torch's dispatcher costs the host as
    much as a launch, and only tensors of another class need it, which intercept calls."""
    return x.is_cuda and type(x) in (Tensor, torch.nn.Parameter) and installed()


# Operators that all layers of a step call alike: the module that has torch's overload, and CUDA's implementation.
IN_LAYERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    name: (sys.modules[__name__], _ON_CUDA[name])
    for name in ("add_rms_norm", "rope_write", "swiglu", "paged_attention")
}


def layer_operators(direct: bool) -> Any:
    """The operators for the layers of one step, which are alike. direct: CUDA's implementations, by which each plan is
    looked up once."""
    if not direct:
        return SimpleNamespace(**{name: getattr(module, name) for name, (module, _) in IN_LAYERS.items()})
    run = import_module(f"{__package__}.direct").LayerCalls()
    return SimpleNamespace(**{name: partial(on_cuda, run=run) for name, (_, on_cuda) in IN_LAYERS.items()})
