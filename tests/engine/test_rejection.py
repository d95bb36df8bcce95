"""Rejection sampling: which drafts stand, what replaces them, and the engine around it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.engine.batch.step.types import StepDrafts, StepRows
from actors.engine.native.forward.rejected_rows import drafted_rows, reject
from actors.engine.native.forward.rejection import rejection_draws, target_logprobs, target_probabilities
from config.strategy import Strategy
from drafter.protocol import BatchView, Drafts
from models import ops
from tests.engine.support import (
    VOCAB,
    Counted,
    DrafterBase,
    assert_same,
    engine,
    logits_of,
    make_requests,
    run,
    tiny_model,
)
from tests.engine.test_graphs import FakeGraphCapture
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees

NO_CUTOFF = -torch.inf


Draw = Callable[..., torch.Tensor]


def on_host(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    q: torch.Tensor | None,
    temperature: float = 1.0,
    cutoff: float = NO_CUTOFF,
) -> torch.Tensor:
    """One position each, of independent requests: logits [V], drafts [N], q [V] -> draws [N]."""
    count = len(drafts)
    rows = logits.expand(count, 2, -1)
    distributions = None if q is None else q.expand(count, 1, -1)
    keys, positions = torch.arange(count) * 7919 + 3, torch.full((count,), 11)
    return rejection_draws(
        rows,
        torch.full((count, 2), cutoff),
        torch.full((count,), temperature),
        keys,
        positions,
        drafts[:, None],
        distributions,
    )[:, 0]


def on_device(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    q: torch.Tensor | None,
    temperature: float = 1.0,
    cutoff: float = NO_CUTOFF,
) -> torch.Tensor:
    """The same by packed rows, in chunks that do not divide them. Log-probs are the tokens' own."""
    count = len(drafts)
    rows = logits.expand(2 * count, -1)
    keys, positions = (torch.arange(count) * 7919 + 3).repeat_interleave(2), torch.tensor([11, 12]).repeat(count)
    arrays: dict[str, Any] = {"noise_keys": keys.numpy(), "noise_positions": positions.numpy()}
    arrays["query_offsets"] = np.arange(count + 1, dtype=np.int32) * 2
    drafted = drafted_rows(
        StepRows(arrays, 2, 2, 2 * count, False),
        StepDrafts(counts=np.ones(count, np.int64), tokens=drafts.numpy()[:, None], drafted=count),
    )
    cutoffs, temperatures = torch.full((2 * count,), cutoff), torch.full((2 * count,), temperature)
    step: Any = SimpleNamespace(noise_keys=keys, noise_positions=positions, temperature=temperatures)
    drawn = ops.sample(rows, cutoffs, temperatures, keys, positions)
    coupled = drawn[0].clone()
    distributions = None if q is None else q.float().expand(count, 1, -1)
    with NoWideDoubles():
        reject(rows, cutoffs, step, drawn, torch.from_numpy(drafted), distributions, chunk_bytes=7 * 4 * 7 * 999)
    assert torch.equal(drawn[0][1::2], coupled[1::2]), "rows without a draft"
    for found, expected in zip(drawn[1:], target_logprobs(rows, cutoffs, temperatures, drawn[0]), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    return drawn[0][::2]


class NoWideDoubles(TorchDispatchMode):
    """Refuses float64 with a vocabulary's width, and indexing by masks, which waits for a device (C9)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            wide = isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.shape[1] > 5
            assert not (wide and leaf.dtype is torch.float64), func
        for index in tree_leaves(args[1:]) if "index" in func._schema.name else ():
            assert not (isinstance(index, torch.Tensor) and index.dtype is torch.bool), func
        assert func not in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default)
        return out


@pytest.fixture(params=[on_host, on_device], ids=["host", "device"])
def draw(request: pytest.FixtureRequest) -> Draw:
    found: Draw = request.param
    return found


def near(counts: torch.Tensor, p: torch.Tensor) -> None:
    """Within five standard deviations of a multinomial, cell by cell."""
    total = counts.sum()
    spread = (p * (1 - p) / total).sqrt().clamp(min=1 / total)
    assert ((counts / total - p).abs() <= 5 * spread).all(), (counts / total, p)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("cutoff", [NO_CUTOFF, 0.0])
def test_draws_follow_the_target_whatever_the_drafter(draw: Draw, temperature: float, cutoff: float) -> None:
    count, vocab = 20_000, 9
    generator = torch.Generator().manual_seed(1)
    logits, q = torch.randn(vocab, generator=generator), torch.randn(vocab, generator=generator).softmax(0)
    p = target_probabilities(logits[None], torch.tensor([cutoff]), torch.tensor([temperature]))[0]
    drafts = torch.multinomial(q, count, replacement=True, generator=generator)
    draws = draw(logits, drafts, q, temperature, cutoff)
    near(draws.bincount(minlength=vocab), p)
    assert float((draws == drafts).double().mean()) == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.02)
    for drafted in (int(p.argmax()), int(p.argmin())):  # One-hot: stands with probability p, else p without it.
        draws = draw(logits, torch.full((count,), drafted), None, temperature, cutoff)
        near(draws.bincount(minlength=vocab), p)


def test_a_drafter_that_equals_the_target_is_always_right(draw: Draw) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2))
    q = target_probabilities(logits[None], torch.tensor([NO_CUTOFF]), torch.tensor([1.0]))[0]
    drafts = torch.multinomial(q, 5000, replacement=True, generator=torch.Generator().manual_seed(3))
    assert torch.equal(draw(logits, drafts, q), drafts)


def test_greedy_takes_the_best_token_and_nothing_else(draw: Draw) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(4))
    q = torch.full((20,), 0.05)
    for distribution in (None, q):
        draws = draw(logits, torch.arange(20), distribution, temperature=0.0)
        assert (draws[draws != logits.argmax()] == torch.arange(20)[draws != logits.argmax()]).all()
        assert (draws == logits.argmax()).all()


@pytest.mark.parametrize("broken", [torch.nan, -0.5, 3.0, 0.0])
def test_unsound_distributions_count_as_one_hot(draw: Draw, broken: float) -> None:
    logits, drafts = torch.randn(8, generator=torch.Generator().manual_seed(5)), torch.full((4000,), 3)
    q = torch.full((8,), (1 - broken) / 7 if broken == 0.0 else 0.125)
    q[3] = broken
    assert torch.equal(draw(logits, drafts, q), draw(logits, drafts, None))


def test_without_drafts_and_behind_them_draws_are_the_coupled_ones() -> None:
    generator = torch.Generator().manual_seed(6)
    logits, keys, positions = torch.randn(5, 4, 30, generator=generator), torch.arange(5), torch.arange(5) * 3
    drafts = torch.tensor([[-1, -1, -1], [4, -1, -1], [4, 5, -1], [4, 5, 6], [0, 1, 2]])
    cutoff, temperature = torch.full((5, 4), NO_CUTOFF), torch.ones(5)
    draws = rejection_draws(logits, cutoff, temperature, keys, positions, drafts, None)
    for r in range(5):
        for column in range(4):
            if column < 3 and drafts[r, column] >= 0:
                continue
            want, logprob, logprob_t1 = ops.sample(
                logits[r, column : column + 1],
                cutoff[r, :1],
                temperature[:1],
                keys[r : r + 1],
                positions[r : r + 1] + column,
            )
            assert draws[r, column] == want[0]
            found = target_logprobs(logits[r, column : column + 1], cutoff[r, :1], temperature[:1], want)
            torch.testing.assert_close(found, (logprob, logprob_t1))


class Sampled(DrafterBase):
    """Drafts at random from one fixed distribution, and says so."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.q = self.rng.dirichlet(np.ones(VOCAB)).astype(np.float32)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        shape = len(batch.slots), strategy.depth
        tokens = self.rng.choice(VOCAB, shape, p=self.q / self.q.sum())
        counts = self.rng.integers(0, strategy.depth + 1, shape[0])
        return Drafts(tokens, counts, distributions=torch.from_numpy(self.q).expand(*shape, VOCAB))


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "top_k": 20}, {"top_p": 0.9}, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_the_engine_reports_the_targets_log_probs(tmp_path: Path, device: bool, sampling: dict) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(12, prompts=4, seed=51, max_new_tokens=25, **sampling)
    capture = {"graph_capture": FakeGraphCapture()} if device else {}
    counted = Counted(model, Sampled(), "test:4", verification="rejection", **capture)
    results = counted.run(requests)
    assert counted.drafted > 0
    assert not device or capture["graph_capture"].replays
    for request in requests:
        rollout, prompt = results[request.request_id], request.prompt_tokens.tolist()
        assert len(rollout.tokens) == 25
        rows = logits_of(model, prompt + rollout.tokens.tolist())[len(prompt) - 1 : -1]
        want_t1 = rows.log_softmax(1)[torch.arange(25), torch.from_numpy(rollout.tokens).long()]
        np.testing.assert_allclose(rollout.logprobs_t1, want_t1.numpy(), atol=1e-4)
        assert np.isfinite(rollout.logprobs).all()
        assert (rollout.logprobs <= 0).all()
        assert (rollout.logprobs >= rollout.logprobs_t1 - 1e-3).all() or request.sampling.temperature == 0.7
    if sampling.get("temperature") == 0.0:
        assert {k: v.tokens.tolist() for k, v in results.items()} == {
            k: v.tokens.tolist() for k, v in run(engine(model), requests).items()
        }


def test_plain_steps_and_trees_are_those_of_coupled_sampling(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(10, seed=52)
    expected = run(engine(model), requests)
    assert_same(Counted(model, DrafterBase(), "test:4", verification="rejection").run(requests), expected)
    trees = Counted(model, RandomTrees(expected, 0.7), "test:4x2/8", verification="rejection")
    assert_same(trees.run(requests), expected)
    assert trees.accepted > 0


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_drafters_see_the_noise_of_the_targets_draws_only_where_it_cannot_bias_them(
    tmp_path: Path, verification: str
) -> None:
    """With rejection sampling, a place without a draft is drawn by that noise: who knew it, and drafted just where the
    draw would be some token, would make that token rarer."""
    requests = make_requests(6, seed=54, max_new_tokens=8)
    keys = {request.request_id: request.noise_key for request in requests}
    shown: dict[int, set[int]] = {}

    class Sees(DrafterBase):
        def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
            for request_id, key in zip(batch.request_ids, batch.noise_keys, strict=True):
                shown.setdefault(int(request_id), set()).add(int(key) & (2**64 - 1))
            return super().propose(batch, strategy)

    Counted(tiny_model(tmp_path), Sees(), "test:4", verification=verification).run(requests)
    assert all(len(seen) == 1 for seen in shown.values()), "one key per request, so that drafts are reproducible"
    assert len(set.union(*shown.values())) == len(requests)
    same = {request_id for request_id, (key,) in shown.items() if key == keys[request_id] & (2**64 - 1)}
    assert same == (set(keys) if verification == "coupled" else set())


def test_good_drafts_stand(tmp_path: Path) -> None:
    """At T = 0 the oracle is right under rejection sampling as well: the fewest steps."""
    model = tiny_model(tmp_path)
    requests = make_requests(1, seed=53, max_new_tokens=36, temperature=0.0)
    counted = Counted(model, Oracle(run(engine(model), requests)), "test:4", verification="rejection")
    counted.run(requests)
    assert len(counted.records) == 1 + (36 - 1) // 5
