"""Mends what a supported vLLM gets wrong, after asking it: a build that answers rightly is never touched.

Owns one mend: on the CPU wheel 0.32.0 `expand_batch_to_tokens`, which gives every draft position its request's
temperature, top-k and top-p, returns memory that nobody wrote (docs/upstream/vllm_cpu_expand_batch_to_tokens.md).
Decides nothing by version or platform, and imports vLLM only when called.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Expansion = Callable[..., Tensor]

# x, its dtype, replace_from, replace_to and what comes out: the three calls that sampling makes, and int64. The answers
# are plain lists, all different: a tensor that held the right answer and was freed might be handed out as the result.
_COUNTS = (2, 0, 3, 1, 5, 2)
_CASES: tuple[tuple[Sequence[float], torch.dtype, int, int, Sequence[float]], ...] = (
    ([0.5, 9, 1.75, 0, 0.0625, 3.5], torch.float32, 0, 1, [0.5] * 2 + [1.75] * 3 + [1] + [0.0625] * 5 + [3.5] * 2),
    ([0.25, 9, 0.75, 0.875, 1, 0.125], torch.float32, 0, 0, [0.25] * 2 + [0.75] * 3 + [0.875] + [1] * 5 + [0.125] * 2),
    ([5, 9, 41, 7, 152064, 3], torch.int32, 0, 0, [5] * 2 + [41] * 3 + [7] + [152064] * 5 + [3] * 2),
    ([6, 9, 42, 0, 8, 4], torch.int64, 0, 2, [6] * 2 + [42] * 3 + [2] + [8] * 5 + [4] * 2),
)


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """x [B], of any dtype, each value as often as its request has draft tokens -> [num_tokens].

    `cu_num_tokens` [B] counts them cumulatively; values equal to `replace_from` become `replace_to`.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    values = x if replace_from == replace_to else x.masked_fill(x == replace_from, replace_to)
    return values.repeat_interleave(counts, output_size=num_tokens)


def expands_rightly(expansion: Expansion, device: torch.device | str = "cpu") -> bool:
    cu_num_tokens = torch.tensor(_COUNTS, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    return all(
        expansion(torch.tensor(x, dtype=dtype, device=device), cu_num_tokens, sum(_COUNTS), old, new).tolist() == right
        for x, dtype, old, new, right in _CASES
    )


def mend_expansion(device: torch.device | str = "cpu") -> bool:
    """Put `expand` in the place of vLLM's function, in this process, if that answers wrongly; True if it did.

    Only after a worker was made here: it is the worker that installs the kernels which the function launches. Raises
    what the function raises.
    """
    from vllm.v1.sample import rejection_sampler

    installed = rejection_sampler.expand_batch_to_tokens
    if expands_rightly(installed, device):
        return False
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("vllm.")]:
        for attribute in [a for a, value in vars(module).items() if value is installed]:
            setattr(module, attribute, expand)
    return True


def mend_worker(worker: Any) -> bool:
    """mend_expansion, for `EngineCore.collective_rpc`: it runs this in every process that executes the model."""
    return mend_expansion(worker.device)
