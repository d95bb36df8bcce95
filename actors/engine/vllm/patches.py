"""Fix bugs of a supported vLLM, after testing for them: a correct build is never touched.

Both bugs are in the CPU wheel 0.32.0:
- `expand_batch_to_tokens`, which gives every draft position its request's temperature, top-k and top-p, returns memory
  that nobody wrote (docs/results/vllm.md#the-cpu-wheels-temperature-bug).
- a request with a seed whose prompt is computed in parts ends the engine: after each part but the last, vLLM rewinds
  the request's generator by an offset that generators on CPUs do not have.
Independent of version and platform; imports vLLM only when called.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Expansion = Callable[..., Tensor]

# x, its dtype, replace_from, replace_to and the result: the three calls of sampling, and int64. Expected results are
# plain lists, all different: the memory of a freed correct tensor might be returned as the result.
_COUNTS = (2, 0, 3, 1, 5, 2)
_CASES: tuple[tuple[Sequence[float], torch.dtype, int, int, Sequence[float]], ...] = (
    ([0.5, 9, 1.75, 0, 0.0625, 3.5], torch.float32, 0, 1, [0.5] * 2 + [1.75] * 3 + [1] + [0.0625] * 5 + [3.5] * 2),
    ([0.25, 9, 0.75, 0.875, 1, 0.125], torch.float32, 0, 0, [0.25] * 2 + [0.75] * 3 + [0.875] + [1] * 5 + [0.125] * 2),
    ([5, 9, 41, 7, 152064, 3], torch.int32, 0, 0, [5] * 2 + [41] * 3 + [7] + [152064] * 5 + [3] * 2),
    ([6, 9, 42, 0, 8, 4], torch.int64, 0, 2, [6] * 2 + [42] * 3 + [2] + [8] * 5 + [4] * 2),
)


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat each value of x [B], of any dtype, once per draft token of its request -> [num_tokens].

    `cu_num_tokens` [B] are cumulative counts; values equal to `replace_from` become `replace_to`.
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
    """Replace vLLM's function by `expand` in this process if it is wrong; return whether it was.

    Call it only after a worker was made here, which installs the kernels that the function launches. Raises the
    function's errors.
    """
    from vllm.v1.sample import rejection_sampler

    installed = rejection_sampler.expand_batch_to_tokens
    if expands_rightly(installed, device):
        return False
    for module in [m for name, m in list(sys.modules.items()) if name.startswith("vllm.")]:
        for attribute in [a for a, value in vars(module).items() if value is installed]:
            setattr(module, attribute, expand)
    return True


def mend_generators(runner: Any, device: torch.device | str = "cpu") -> bool:
    """Rewind generators without an offset to their seeds after a part of a prompt; return whether these are such.

    `runner` is a model runner of vLLM; its class is patched. Only requests without a response are rewound, so draws
    from before a preemption are not repeated.
    """
    generator = torch.Generator(device)
    kind = type(runner)
    original = getattr(kind, "_bookkeeping_sync", None)
    if original is None or getattr(original, "rewinds", False):
        return False
    try:
        generator.set_offset(generator.get_offset())
    except RuntimeError:
        pass
    else:
        return False

    @functools.wraps(original)
    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        parts = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist() if batch.generators else ()
        kept = {row: batch.generators.pop(row) for row in parts if row in batch.generators}
        for row, generator in kept.items():
            if not self.requests[batch.req_ids[row]].output_token_ids:
                generator.manual_seed(generator.initial_seed())
        try:
            return original(self, *args, **kwargs)
        finally:
            batch.generators.update(kept)

    bookkeeping.rewinds = True  # type: ignore[attr-defined]
    kind._bookkeeping_sync = bookkeeping
    return True


def mend_worker(worker: Any) -> list[str]:
    """Return the fixes made in the process of `worker`. For `EngineCore.collective_rpc`, which calls every process."""
    mended = {
        "expand_batch_to_tokens": mend_expansion(worker.device),
        "generators of requests whose prompt comes in parts": mend_generators(worker.model_runner, worker.device),
    }
    return [name for name, done in mended.items() if done]
