"""When a model drafter of vLLM runs, and which of its K/V are valid: a wrapper around the drafter's `propose` in every
process that executes the model. The scheduler decides, by a number in its output.

A drafter that skips a step has no K/V of that step's tokens. EAGLE's cannot be restored, because the hidden states are
gone. A quantised copy's can: it approximates the target's K/V, which is in the same blocks, and is copied. The passes
are timed where they run, since the engine only sees whole steps.
"""

import functools
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

_MOST_RUNNING = 64
NETWORK_DRAFTS = "paceline_network_drafts"  # set on vLLM's SchedulerOutput; see StepControl.verifies_network
NOT_AT_ALL = -1  # `num_spec_tokens_to_schedule`: no pass. 0, as in vLLM: one pass that keeps the K/V complete


class DrafterPasses:
    """Replaces `propose` of vLLM's drafter on `runner`.

    `copies_target`: its layers are the target's, so their K/V can be copied from there. `block`: tokens of one pass of
    a drafter that drafts in parallel; 0: as many as vLLM was configured with. It drafts them in any case, and what the
    step does not verify is cut: vLLM lays a P-EAGLE head's inputs out for one number of drafts, and a block's tokens
    attend to each other.
    """

    def __init__(
        self, runner: Any, copies_target: bool, block: int = 0, timer: Callable[[], float] = perf_counter
    ) -> None:
        self._runner, self._timer = runner, timer
        self._at_once: int | None = None
        if getattr(runner.drafter, "parallel_drafting", False):
            most = int(runner.drafter.num_speculative_tokens)
            self._at_once = min(block or most, most)
        self._propose = runner.drafter.propose
        self._layers = _pairs(runner) if copies_target else []
        self._missed = False  # whether the drafter ever skipped a step
        self._whole: set[str] = set()  # requests with complete drafter K/V, once it has skipped a step
        self._seconds: dict[int, deque[float]] = {}  # by number of drafts, since the last query
        self._running: deque[tuple[int, Any, Any]] = deque()  # on a GPU: drafts, events before and after

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> Tensor:
        """Propose as vLLM's drafter: int64 [requests, drafts]."""
        attention = kwargs["common_attn_metadata"]
        requests = self._runner.input_batch.req_ids
        if num_speculative_tokens == NOT_AT_ALL:
            self._missed = True
            self._runner.drafter._last_draft_probs = None
            self._whole.difference_update(requests)
            return torch.empty(attention.batch_size(), 0, dtype=torch.int64, device=self._runner.device)
        begun = self._mark()
        if self._missed and self._layers:
            self._make_whole(requests, attention)
        drafts: Tensor = self._propose(
            num_speculative_tokens if self._at_once is None else self._at_once, *args, **kwargs
        )
        if self._at_once is not None:
            drafts = drafts[:, :num_speculative_tokens]
            if (drawn := self._runner.drafter._last_draft_probs) is not None:
                self._runner.drafter._last_draft_probs = drawn[:, :num_speculative_tokens].contiguous()
        self._took(num_speculative_tokens, begun, self._mark())
        return drafts

    def seconds(self, drafts: int) -> float | None:
        """Return the mean time of passes with this many drafts per request since the last call; None: there were none.

        On a GPU, only finished passes count: nothing is waited for."""
        while self._running and self._running[0][2].query():
            count, begun, ended = self._running.popleft()
            self._seconds.setdefault(count, deque(maxlen=_MOST_RUNNING)).append(begun.elapsed_time(ended) / 1e3)
        measured = self._seconds.pop(drafts, ())
        return sum(measured) / len(measured) if measured else None

    def _mark(self) -> Any:
        if torch.device(self._runner.device).type != "cuda":
            return self._timer()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _took(self, drafts: int, begun: Any, ended: Any) -> None:
        if isinstance(begun, float):
            self._seconds.setdefault(drafts, deque(maxlen=_MOST_RUNNING)).append(ended - begun)
            return
        self._running.append((drafts, begun, ended))
        if len(self._running) > _MOST_RUNNING:  # nobody queries them
            self._running.popleft()

    def _make_whole(self, requests: list[str], attention: Any) -> None:
        """Complete the drafter's K/V before its pass, which writes those of this step's tokens."""
        rows = [row for row, request in enumerate(requests) if request not in self._whole]
        if not rows:
            return
        # blocks up to the last token; rows of the table are longer
        counts = (attention.seq_lens[rows] + self._runner.drafter.block_size - 1) // self._runner.drafter.block_size
        table = attention.block_table_tensor[rows]
        blocks = table[torch.arange(table.shape[1], device=table.device) < counts[:, None]].unique().long()
        for target, drafter in self._layers:
            drafter[blocks] = target[blocks]
        self._whole.intersection_update(self._runner.requests)
        self._whole.update(requests)


def verify_by_step(runner: Any) -> None:
    """Have the rejection sampler use the network's probabilities only in steps that verify the network's own drafts.

    vLLM keeps the probabilities of its last proposal. Drafts of others in their place were not drawn by them, so the
    result would have another distribution; those count as certain."""
    execute, probabilities = runner.execute_model, runner._get_spec_decode_draft_probs
    own = False

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal own
        own = getattr(scheduler_output, NETWORK_DRAFTS, False)
        return execute(scheduler_output, *args, **kwargs)

    @functools.wraps(probabilities)
    def of_own_drafts(spec_decode_metadata: Any) -> Any:
        return probabilities(spec_decode_metadata) if own else None

    runner.execute_model, runner._get_spec_decode_draft_probs = execute_model, of_own_drafts


def _pairs(runner: Any) -> list[tuple[Tensor, Tensor]]:
    """Return K/V of each of the target's layers, [blocks, ...], and of the drafter's same layer, as views."""
    layers = runner.vllm_config.compilation_config.static_forward_context
    drafter = sorted(runner.drafter._draft_attn_layer_names)
    pairs = []
    for name in drafter:
        target, own = layers[name.removeprefix("draft_model.")].kv_cache, layers[name].kv_cache
        if target.shape != own.shape or target.dtype != own.dtype:
            raise ValueError(f"the drafter's K/V of {name} are not laid out as the target's")
        if target.shape[0] == 2:  # backends with separate K and V of all blocks: [2, blocks, ...]
            target, own = target.transpose(0, 1), own.transpose(0, 1)
        pairs.append((target, own))
    return pairs
