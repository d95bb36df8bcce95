"""Draws in Triton's interpreter: token for token those of the oracle and of the native kernel."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import ops
from models.noise import gumbel, noise_key
from models.ops import reference
from models.ops.triton import launch

VOCABULARIES = (61, 1003, 4096, 20_000)
QWEN = 151_936


def best_of(arguments: Any, k: int, scale: float, noise: bool) -> tuple[Tensor, Tensor]:
    logits, cutoff, temperature, keys, positions = arguments
    return launch.sample_topk(logits, cutoff, temperature, keys, positions, k, scale, noise)


def drawn_from(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of sample: every third row greedy, every other one cut."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    row = torch.arange(rows)
    cutoff = torch.where(row % 2 == 1, logits.float().amax(1) - 2.0, -torch.inf)
    keys = torch.tensor([noise_key(seed, 0, 0, int(i)) for i in row], dtype=torch.int64)
    return logits, cutoff, torch.where(row % 3 == 2, 0.0, 0.4 + 0.3 * row), keys, row * 12_345


def assert_draws(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert torch.equal(found[0], expected[0])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(mine, theirs, atol=3e-5, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_draws_are_the_oracles(vocab: int, dtype: torch.dtype) -> None:
    arguments = drawn_from(6, vocab, dtype)
    found = launch.sample(*arguments)
    assert_draws(found, reference.sample(*arguments))
    assert torch.equal(found[0], ops.sample(*arguments)[0]), "the native kernel's"
    only = launch.sample(*(x[3:4] for x in arguments))
    assert all(torch.equal(a, b[3:4]) for a, b in zip(only, found, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 3),
    vocab=st.integers(1, 300),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    k=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_any_small_vocabulary(rows: int, vocab: int, spread: float, temperature: float, k: int, seed: int) -> None:
    """Draws, and the k best with noise and without; ties go to the smaller token."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).bfloat16().float()
    cutoff = logits.quantile(0.4, dim=1) if rows else torch.zeros(0)
    keys = torch.randint(2**62, (rows,), generator=generator)
    arguments: Any = logits, cutoff, torch.full((rows,), temperature), keys, torch.arange(rows) * 999
    assert_draws(launch.sample(*arguments), ops.sample(*arguments))
    k = min(k, vocab)
    for noise in (True, False):
        assert_draws(best_of(arguments, k, 1.3, noise), ops.sample_topk(*arguments, k, scale=1.3, noise=noise))


def test_extreme_logits() -> None:
    infinity = torch.inf
    logits = torch.tensor(
        [
            [-infinity, 1e4, -infinity, -1e4],
            [-infinity, -infinity, -infinity, 2.0],
            [1e4, 1e4, -infinity, -infinity],
            [-3e38, 0.0, -3e38, -infinity],
        ]
    )
    for temperature in (0.0, 1e-3, 1.0, 10.0):
        keys = torch.arange(4)
        arguments: Any = logits, torch.full((4,), -infinity), torch.full((4,), temperature), keys, keys
        assert_draws(launch.sample(*arguments), reference.sample(*arguments))
    drawn, logprobs = best_of(arguments, 4, 1.0, False)
    assert sorted(drawn[1].tolist()) == [0, 1, 2, 3], "each token once, kept or not"
    assert logprobs[1].tolist()[1:] == [-infinity] * 3


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's numpy
@pytest.mark.parametrize("vocab", [61, 20_000])
def test_a_row_without_numbers_draws_a_token_that_there_is_and_disturbs_no_other(vocab: int) -> None:
    """All NaN, one NaN, one +inf, a cutoff of NaN: the log-prob says it, and nothing outside the row is read."""
    logits, cutoff, temperature, keys, positions = drawn_from(6, vocab)
    expected = launch.sample(logits, cutoff, temperature, keys, positions)
    logits[1] = torch.nan
    logits[2, vocab // 2] = torch.nan
    logits[3, vocab // 3] = torch.inf
    cutoff[4] = torch.nan
    tokens, logprobs, logprobs_t1 = launch.sample(logits, cutoff, temperature, keys, positions)
    assert bool(((tokens >= 0) & (tokens < vocab)).all())
    assert tokens[1] == 0
    assert bool(logprobs_t1[1:4].isnan().all())
    for row in (0, 5):
        assert tokens[row] == expected[0][row]
        assert logprobs[row] == expected[1][row]


def test_noise_is_the_native_kernels_bit_for_bit() -> None:
    """Zero logits: the score of the drawn token is its noise, and its log-prob tells it to rounding."""
    keys, positions = torch.arange(1, 9) * 2**40 + 7, torch.arange(8) * 2**28
    zeros = torch.zeros(8, 5000)
    tokens, _ = launch.sample_topk(zeros, torch.full((8,), -torch.inf), torch.ones(8), keys, positions, 20, 1.0, True)
    noise = gumbel(keys, positions, 5000)
    assert torch.equal(tokens, noise.sort(descending=True, stable=True).indices[:, :20])


@pytest.mark.parametrize("k", [1, 4, 64])
def test_the_best_of_a_large_vocabulary(k: int) -> None:
    arguments = drawn_from(2, 20_000)
    for noise in (True, False):
        found = best_of(arguments, k, 0.9, noise)
        assert_draws(found, reference.sample_topk(*arguments, k, scale=0.9, noise=noise))
        only = best_of([x[1:] for x in arguments], k, 0.9, noise)
        assert all(torch.equal(a, b[1:]) for a, b in zip(only, found, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocab=st.integers(1, 200),
    spread=st.sampled_from([0.0, 0.5, 4.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_cutoffs_are_the_oracles(
    rows: int, vocab: int, spread: float, top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    """With ties, zeros of both signs and -inf among the logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).bfloat16().float()
    logits[:, vocab // 2 + 1 :: 7] = -torch.inf
    limits: Any = torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p)
    assert_keeps_the_oracles_tokens(logits, *limits)


def assert_keeps_the_oracles_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """The same set, or one whose probability is as near to p as sums of float32 can tell."""
    found = launch.cutoff(logits, temperature, top_k, top_p)
    expected = reference.cutoff(logits, temperature, top_k, top_p)
    for row in (found != expected).nonzero()[:, 0].tolist():
        scaled = logits[row].double() / (float(temperature[row]) or 1.0)
        best = scaled.topk(int(top_k[row])).values if 0 < top_k[row] < len(scaled) else scaled
        total = best.exp().sum()
        at = float(found[row]) / (float(temperature[row]) or 1.0)
        reached = best[best >= at].exp().sum() / total
        without = best[best > at].exp().sum() / total
        assert without - 1e-6 <= top_p[row] <= reached + 1e-6, (row, found[row], expected[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cutoffs_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, 20_000, generator=torch.Generator().manual_seed(3)) * 2.5).to(dtype)
    limits: Any = (
        torch.tensor([0.7, 1.0, 1.3, 1.0]),
        torch.tensor([0, 50, 1000, 40]),
        torch.tensor([0.9, 1.0, 0.8, 0.3]),
    )
    assert_keeps_the_oracles_tokens(logits, *limits)
    found = launch.cutoff(logits, *limits)
    assert torch.equal(launch.cutoff(logits[2:3], *(x[2:3] for x in limits)), found[2:3])


def test_qwens_vocabulary() -> None:
    arguments = drawn_from(2, QWEN)
    assert_draws(launch.sample(*arguments), ops.sample(*arguments))
    assert_draws(best_of(arguments, 3, 1.0, True), ops.sample_topk(*arguments, 3))
    limits: Any = torch.tensor([0.9, 1.0]), torch.tensor([0, 50]), torch.tensor([0.95, 0.9])
    assert_keeps_the_oracles_tokens(arguments[0], *limits)


@pytest.mark.pretended
def test_a_hundred_draws_from_qwens_vocabulary() -> None:
    arguments = drawn_from(100, QWEN, seed=5)
    assert_draws(launch.sample(*arguments), ops.sample(*arguments))
