"""EAGLE on a GPU: captured drafts against those of the CPU, and engines that draft against engines that do not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from actors.engine.native.engine import NativeEngine
from config.speculation import EagleOptions
from config.strategy import Strategy
from drafter.eagle import EagleDrafter
from drafter.protocol import BatchView, Drafts, HiddenRows, HiddenSource
from models.checkpoint import hf_state_dict
from models.transformer import Transformer
from models.weights import pack
from policies.speculation.policy import FixedPolicy
from tests.drafter.test_eagle_device import telling_weights
from tests.engine.support import engine, make_requests, options_of, run
from tests.gpu.test_cuda import DTYPES, TIE, Counting, assert_tokens_of, on_device, reference_of

Int64Array = NDArray[np.int64]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
OPTIONS = {"max_running": 4}
# Drafts that must be the CPU's: the rest have near ties, at which rounding decides.
SHARE = {torch.float32: 0.98, torch.bfloat16: 0.6}
# Both kinds of distribution are of the same weights and states, of bfloat16 in between on the device only.
DISTRIBUTION = {torch.float32: 1e-3, torch.bfloat16: 0.15}


class OnHost(HiddenSource):
    """What an engine on a device keeps, for a drafter on the CPU."""

    def __init__(self, kept: HiddenSource) -> None:
        self._kept = kept

    def last(self, slots: Int64Array, first_positions: Int64Array) -> HiddenRows:
        rows = self._kept.last(slots, first_positions)
        return HiddenRows(tuple(source.float().cpu() for source in rows.sources), rows.index, rows.offsets)


class OnBoth(EagleDrafter):
    """Drafts on the device, and looks what the same weights draft on the CPU in float32."""

    def __init__(self, model: Transformer, host_model: Transformer, kind: str, **keywords: Any) -> None:
        options = options_of(**OPTIONS)
        place = options.max_running, options.kv_tokens // options.block_tokens, options.block_tokens
        eagle = EagleOptions(path=kind, min_probability=0.0)
        super().__init__(model, eagle, *place, **keywords)
        self.host = EagleDrafter(host_model, eagle, *place, **keywords)
        self.learn(seed=1)
        self.drafts = self.equal = self.proposals = 0
        self.furthest = 0.0
        self.around: Callable[[Callable[[], Drafts]], Drafts] = lambda propose: propose()

    def learn(self, seed: int) -> None:
        weights = telling_weights(self.host, seed, scale=0.2)
        dtype = self.model.fuse.weight.dtype
        self.update(seed, {name: tensor.to(dtype) for name, tensor in weights.items()})
        self.host.update(seed, {name: tensor.to(dtype).float() for name, tensor in weights.items()})

    def begin(self, slot: int, *texts: Any) -> None:
        super().begin(slot, *texts)
        self.host.begin(slot, *texts)

    def end(self, slot: int, *rest: Any) -> None:
        super().end(slot, *rest)
        self.host.end(slot, *rest)

    def new_target(self, version: int) -> None:
        super().new_target(version)
        self.host.new_target(version)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        assert batch.hidden is not None
        found = self.around(lambda: super(OnBoth, self).propose(batch, strategy))
        expected = self.host.propose(replace(batch, hidden=OnHost(batch.hidden)), strategy)
        self.proposals += 1
        assert (found.counts > 0).tolist() == (expected.counts > 0).tolist()
        for r in np.flatnonzero(found.counts):
            self.drafts += 1
            same = paths(found, r) == paths(expected, r)
            self.equal += same
            if same and found.distributions is not None and expected.distributions is not None:
                count = int(found.counts[r])
                gap = found.distributions[r, :count].float().cpu() - expected.distributions[r, :count]
                self.furthest = max(self.furthest, float(gap.abs().max()))
        return found


def paths(drafts: Drafts, request: int) -> list[tuple[int, ...]]:
    """Every node's tokens from the root on, in the order of the nodes of chains, sorted of trees."""
    found: list[tuple[int, ...]] = []
    count = int(drafts.counts[request])
    for i, token in enumerate(drafts.tokens[request, :count].tolist()):
        parent = i - 1 if drafts.parents is None else int(drafts.parents[request, i])
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found if drafts.parents is None else sorted(found)


def drafting(model: Transformer, reference: Transformer, kind: str, strategy: str, **engine_options: Any) -> Any:
    """An engine that drafts on the device, its drafter, and its captures."""
    rejection = engine_options.get("verification") == "rejection"
    drafter = OnBoth(model, reference, kind, sampled=rejection)
    graph_capture = Counting()
    policy = FixedPolicy(Strategy.parse(strategy))
    core = NativeEngine(
        model,
        options_of(**OPTIONS),
        drafters={"eagle": drafter},
        policy=policy,
        hidden_tokens=16,
        graph_capture=graph_capture,
        **engine_options,
    )
    return core, drafter, graph_capture


@DTYPES
@pytest.mark.pretended
@pytest.mark.parametrize(
    ("kind", "strategy", "temperature"),
    [
        ("random", "eagle:4", 1.0),
        ("random", "eagle:4x3/12", 0.0),
        ("random:eagle3", "eagle:4", 0.0),
        ("random:eagle3", "eagle:4x3/12", 1.0),
    ],
)
def test_drafts_are_the_cpus_and_change_no_token(
    kind: str, strategy: str, temperature: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Chains and trees, EAGLE and EAGLE-3, all captured at the start; then new weights of both models in place."""
    reference = reference_of(tmp_path, "qwen2", dtype)
    model = on_device(reference, dtype)
    requests = make_requests(6, prompts=4, temperature=temperature, max_new_tokens=12)
    expected = run(engine(model, cuda_graphs=False), requests)
    core, drafter, graph_capture = drafting(model, reference, kind, strategy)
    captured = graph_capture.captures
    replays = graph_capture.replays
    assert_tokens_of(reference, requests, expected, run(core, requests), TIE[dtype])
    assert drafter.equal >= SHARE[dtype] * drafter.drafts
    assert drafter.drafts > 30
    assert graph_capture.replays - replays > 2 * drafter.proposals, "the target's, and two for a usual draft"
    with torch.no_grad():
        reference.norm.weight.mul_(0.5)
    core.update_weights(*pack({name: tensor.to(dtype) for name, tensor in hf_state_dict(reference).items()}, 1))
    drafter.learn(seed=2)
    anew = run(engine(model, cuda_graphs=False), requests)
    drafter.drafts = drafter.equal = 0
    assert_tokens_of(reference, requests, anew, run(core, requests), TIE[dtype])
    assert drafter.equal >= SHARE[dtype] * drafter.drafts
    assert graph_capture.captures == captured, "all weights are read in place"


@DTYPES
@pytest.mark.pretended
@pytest.mark.parametrize("sampling", [{"top_p": 0.6}, {"top_k": 5}], ids=str)
def test_truncated_drafts_are_the_cpus(sampling: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """What truncation needs is captured when it first comes up."""
    reference = reference_of(tmp_path, "qwen3", dtype)
    model = on_device(reference, dtype)
    requests = make_requests(4, prompts=3, max_new_tokens=12, **sampling)
    expected = run(engine(model, cuda_graphs=False), requests)
    core, drafter, graph_capture = drafting(model, reference, "random", "eagle:3")
    captured = graph_capture.captures
    found = run(core, requests)
    if dtype is torch.float32:  # else a token near the cutoff may be in or out
        assert_tokens_of(reference, requests, expected, found, TIE[dtype])
    assert drafter.equal >= SHARE[dtype] * drafter.drafts
    assert graph_capture.captures > captured


@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_chains_say_what_they_were_drawn_from(temperature: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """For rejection sampling: distributions stay on the device, and are the CPU's."""
    reference = reference_of(tmp_path, "qwen2", dtype)
    model = on_device(reference, dtype)
    requests = make_requests(6, prompts=3, temperature=temperature, max_new_tokens=12)
    core, drafter, _ = drafting(model, reference, "random", "eagle:3", verification="rejection")
    found = run(core, requests)
    assert {len(rollout.tokens) for rollout in found.values()} == {12}
    assert drafter.equal >= SHARE[dtype] * drafter.drafts
    assert drafter.furthest < DISTRIBUTION[dtype]


@pytest.mark.parametrize(("kind", "strategy"), [("random", "eagle:3"), ("random:eagle3", "eagle:3x3/8")])
def test_a_few_drafts_are_exactly_the_cpus(kind: str, strategy: str, tmp_path: Path) -> None:
    """Short, so that it also runs with the kernels themselves interpreted (tests/pretended/test_kernels.py)."""
    reference = reference_of(tmp_path, "qwen2", torch.float32)
    core, drafter, graph_capture = drafting(on_device(reference, torch.float32), reference, kind, strategy)
    replays = graph_capture.replays
    run(core, make_requests(2, max_new_tokens=8))
    assert drafter.drafts >= 10
    assert drafter.equal == drafter.drafts
    assert graph_capture.replays - replays > drafter.proposals
