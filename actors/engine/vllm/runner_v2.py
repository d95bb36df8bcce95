"""Our drafts in vLLM's Model Runner V2, which drafts on its own side: two hooks on its runner.

V2 verifies what stands in its own table of drafts, `req_states.draft_tokens`, as many tokens of each request as the
scheduler's output has for it, whatever tokens the scheduler names. So the scheduler's tokens are written into that
table before a step's inputs are made of it. In place of vLLM's speculator, which would overwrite them, is one that
proposes nothing. The scheduler does the rest as with V1. Imports vLLM only when called.

Network drafters are not built here. V2 has places for a depth per step (`propose`'s num_speculative_tokens) and for
updates (`get_draft_model`). It has none for probabilities of some requests' drafts (`draft_logits` is a whole step's),
nor for a speculator that rests: without `propose`, which V2 calls in every step, its K/V would stay incomplete.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# A method that V2 accepts, and whose own speculator is replaced (`install`).
METHOD: Mapping[str, Any] = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1}


def install() -> None:
    """Have V2 runners that are made in this process from now on take the scheduler's drafts."""
    from vllm.v1.worker.gpu import model_runner

    if model_runner.init_speculator.__module__ != __name__:
        model_runner.init_speculator = _speculator


def take_drafts(runner: Any) -> None:
    """Write the scheduler's drafts into the runner's table before each step. Its own placeholders, -1, are left out."""
    prepare = runner.prepare_inputs

    @functools.wraps(prepare)
    def prepare_inputs(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        write_drafts(runner.req_states, scheduler_output.scheduled_spec_decode_tokens)
        return prepare(scheduler_output, *args, **kwargs)

    runner.prepare_inputs = prepare_inputs


def write_drafts(states: Any, drafts: Mapping[str, list[int]]) -> None:
    """Write drafts by vLLM's names of requests into `states.draft_tokens` [slots, most drafts]."""
    rows: list[int] = []
    columns: list[int] = []
    tokens: list[int] = []
    for name, of in drafts.items():
        if of and of[0] >= 0:
            rows += [states.req_id_to_index[name]] * len(of)
            columns += range(len(of))
            tokens += of
    if rows:
        table: Tensor = states.draft_tokens
        index, values = torch.tensor([rows, columns]), torch.tensor(tokens, dtype=table.dtype)
        table[tuple(index.to(table.device))] = values.to(table.device)


def _speculator(vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    """Replacement for vllm's `init_speculator`."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class NoSpeculator(BaseSpeculator):  # type: ignore[misc]
        """Proposes nothing: zeros [requests, drafts], of which the scheduler verifies none."""

        supports_mm_inputs = False
        draft_logits = None  # drafts are certain, for the rejection sampler

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None: ...
        def capture(self) -> None: ...
        def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
            depth = vllm_config.speculative_config.num_speculative_tokens
            return torch.zeros(input_batch.num_reqs, depth, dtype=torch.int64, device=device)

    return NoSpeculator()
