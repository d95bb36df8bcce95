"""Noise against published vectors, the sampler against its torch oracle and against the distribution it claims."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.training.network import chunk_logprobs
from models import ops
from models.noise import gumbel, noise_key, random_words
from models.ops import reference
from models.ops.native import kernels
from models.philox import philox4x32

INF = float("inf")


def _keys(rows: int, seed: int = 0) -> Tensor:
    return torch.tensor([noise_key(seed, 0, 0, row) for row in range(rows)], dtype=torch.int64)


def _kept(rows: int, value: float = -INF) -> Tensor:
    return torch.full((rows,), value)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """The vectors of Random123's kat_vectors for philox4x32-10."""
    c0, c1, c2, c3, k0, k1 = (torch.tensor(word) for word in (*counter, *key))
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


@settings(max_examples=30, deadline=None)
@given(
    keys=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
    position=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 300),
)
@pytest.mark.usefixtures("native")
def test_the_kernel_draws_exactly_the_oracles_words(keys: list[int], position: int, vocab: int) -> None:
    key, where = torch.tensor(keys), torch.full((len(keys),), position)
    out = torch.empty(len(keys), vocab, dtype=torch.int64)
    assert kernels is not None
    kernels.random_words(key.data_ptr(), where.data_ptr(), len(keys), vocab, out.data_ptr())
    assert torch.equal(out, random_words(key, where, vocab))


def test_noise_keys_are_stable_and_distinct() -> None:
    assert noise_key(1, 2, 3, 4) == 2273992371454157174  # a change would change every seeded run
    keys = {noise_key(s, e, p, n) for s in range(5) for e in range(5) for p in range(5) for n in range(5)}
    assert len(keys) == 5**4
    assert all(0 <= key < 2**63 for key in keys)
    assert noise_key(-1, 0, 0, 0) != noise_key(1, 0, 0, 0)


def test_gumbel_noise_has_its_distribution() -> None:
    """Kolmogorov-Smirnov distance of 400,000 draws; 2.2 / sqrt(n) is exceeded with probability 1e-4."""
    draws = gumbel(_keys(400), torch.arange(400), 1000).flatten().sort().values.double()
    cdf = torch.exp(-torch.exp(-draws))
    expected = (torch.arange(len(draws)) + 0.5) / len(draws)
    assert float((cdf - expected).abs().max()) < 2.2 / math.sqrt(len(draws))
    assert bool(draws.isfinite().all())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["exp", "log", "log1m"])
def test_vector_functions_are_within_two_ulp(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    n = 400_003
    uniform = torch.rand(n, generator=generator)
    x = {
        "exp": uniform * 191.5 - 103,
        "log": torch.exp(uniform.double() * 170 - 85).float(),
        "log1m": torch.exp(-22 * uniform).clamp(2.0**-33, 1 - 2.0**-24),
    }[name]
    if name == "log1m":
        x[:4] = torch.tensor([2.0**-33, 0.2928932, 0.5, 1 - 2.0**-24])
    out = torch.empty_like(x)
    getattr(kernels, f"{name}_array")(x.data_ptr(), out.data_ptr(), n)
    exact = {"exp": torch.exp, "log": torch.log, "log1m": lambda v: torch.log1p(-v)}[name](x.double())
    ulp = (torch.nextafter(exact.float().abs(), torch.tensor(INF)) - exact.float().abs()).double()
    limit = 1.0 if name == "exp" else 2.0
    assert float(((out.double() - exact).abs() / ulp).max()) <= limit


@pytest.mark.usefixtures("native")
def test_exp_at_its_limits() -> None:
    x = torch.tensor([-INF, -200.0, -103.0, -0.0, 0.0, 88.72, 89.5, INF, float("nan")])
    out = torch.empty_like(x)
    assert kernels is not None
    kernels.exp_array(x.data_ptr(), out.data_ptr(), len(x))
    torch.testing.assert_close(out, x.exp(), rtol=2e-7, atol=1.5e-45, equal_nan=True)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 6),
    vocab=st.integers(1, 400),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    cut=st.sampled_from([-INF, 0.2, 0.9]),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_equals_the_oracle(
    dtype: torch.dtype, rows: int, vocab: int, spread: float, temperature: float, cut: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)
    cutoff = _kept(rows) if cut == -INF or not rows else logits.float().quantile(cut, dim=1)
    temperatures = torch.full((rows,), temperature)
    arguments = (logits, cutoff, temperatures, _keys(rows, seed), torch.arange(rows) * 12345)
    tokens, logprobs, logprobs_t1 = ops.sample(*arguments)
    expected, expected_logprobs, expected_t1 = reference.sample(*arguments)
    # Where they differ, the two best scores must tie to rounding.
    scores = logits.float() / (temperature or 1.0)
    if temperature:
        scores = scores + gumbel(arguments[3], arguments[4], vocab)
    mine, best = (scores.gather(1, t[:, None])[:, 0] for t in (tokens, expected))
    assert bool(((best - mine).abs() <= 4e-6 * best.abs().clamp(min=8)).all())
    same = tokens == expected
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(logprobs_t1[same], expected_t1[same], rtol=2e-6, atol=2e-5)
    assert bool((logits.float().gather(1, tokens[:, None])[:, 0] >= cutoff).all())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=100, deadline=None)
@given(
    vocab=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0, 1e4]),
    offset=st.sampled_from([0.0, -50.0, 1e4]),
    temperature=st.sampled_from([1e-6, 1e-3, 0.7, 1.0, 50.0]),
    cut=st.sampled_from([-INF, 0.5]),
    seed=st.integers(0, 2**31),
)
def test_noise_that_is_left_out_changes_no_draw(
    dtype: torch.dtype, vocab: int, spread: float, offset: float, temperature: float, cut: float, seed: int
) -> None:
    """`sample` computes the noise of tokens that may win, `sample_topk` that of all, by the same functions."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(8, vocab, generator=generator) * spread + offset).to(dtype)
    cutoff = _kept(8) if cut == -INF else logits.float().quantile(cut, dim=1)
    arguments = (logits, cutoff, torch.full((8,), temperature), _keys(8, seed), torch.arange(8) * 12345)
    assert torch.equal(ops.sample(*arguments)[0], ops.sample_topk(*arguments, 1)[0][:, 0])


@pytest.mark.parametrize("sampler", [ops.sample, reference.sample])
@pytest.mark.parametrize("truncate", [False, True])
def test_100_000_draws_follow_the_softmax(sampler: Callable[..., Any], truncate: bool) -> None:
    """Chi-square over 13 tokens at T = 0.7; the 1 - 1e-5 quantile by Wilson and Hilferty."""
    draws, temperature = 100_000, 0.7
    logits = torch.randn(13, generator=torch.Generator().manual_seed(5))
    cutoff = float(logits.sort().values[5]) if truncate else -INF
    kept = logits >= cutoff
    counts = torch.zeros(13)
    for part in range(10):
        rows = draws // 10
        positions = torch.arange(part * rows, (part + 1) * rows)
        keys = torch.full((rows,), noise_key(7, 0, 0, 0))
        tokens, logprobs, _ = sampler(
            logits.expand(rows, -1).contiguous(), _kept(rows, cutoff), torch.full((rows,), temperature), keys, positions
        )
        counts += torch.bincount(tokens, minlength=13)
    probabilities = (logits / temperature).masked_fill(~kept, -INF).softmax(0)
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], rtol=1e-5, atol=1e-5)
    assert int(counts[~kept].sum()) == 0
    expected = probabilities[kept] * draws
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.265 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_draw_does_not_depend_on_its_batch(dtype: torch.dtype, threads: int) -> None:
    rows, vocab = 64, 229
    torch.set_num_threads(threads)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    arguments = (logits, _kept(rows, -1.0), torch.linspace(0, 2, rows), _keys(rows), torch.arange(rows) * 7)
    together = ops.sample(*arguments)
    for start, stop in [(0, 1), (1, 2), (3, 40), (63, 64)]:
        part = ops.sample(*(x[start:stop] for x in arguments))
        assert all(torch.equal(a[start:stop], b) for a, b in zip(together, part, strict=True))
    strided = torch.cat((logits, logits), 1)[:, vocab:]
    assert all(torch.equal(a, b) for a, b in zip(together, ops.sample(strided, *arguments[1:]), strict=True))


@pytest.mark.parametrize("sampler", [ops.sample, reference.sample])
def test_extreme_logits(sampler: Callable[..., Any]) -> None:
    logits = torch.tensor(
        [
            [-INF, 1e4, -INF, -1e4],  # one token has all the mass
            [-INF, -INF, -INF, 2.0],
            [1e4, 1e4, -INF, -INF],  # a tie: at T = 0 the smaller token wins
            [-3e38, 0.0, -3e38, -INF],
        ]
    )
    for temperature in (0.0, 1e-3, 1.0, 10.0):
        tokens, logprobs, logprobs_t1 = sampler(logits, _kept(4), torch.full((4,), temperature), _keys(4), _keys(4))
        assert tokens[[0, 1, 3]].tolist() == [1, 3, 1]
        assert int(tokens[2]) in ((0,) if temperature == 0 else (0, 1))
        tie = 0.0 if temperature == 0 else -math.log(2)
        torch.testing.assert_close(logprobs, torch.tensor([0.0, 0.0, tie, 0.0]))
        torch.testing.assert_close(logprobs_t1, torch.tensor([0.0, 0.0, -math.log(2), 0.0]))


def _rows_of_a_real_vocabulary(vocab: int, peaked: bool) -> Tensor:
    """[32, vocab]: normal, or all mass but 1e-4 to 1e-2 on one token."""
    logits = torch.randn(32, vocab, generator=torch.Generator().manual_seed(vocab))
    if peaked:
        logits[torch.arange(32), torch.arange(32) * 1009 % vocab] = torch.linspace(5.1, 9.7, 32) + math.log(vocab)
    return logits


@pytest.mark.parametrize("peaked", [True, False], ids=["peaked", "flat"])
@pytest.mark.parametrize("vocab", [49_152, 151_936])
@pytest.mark.parametrize("path", ["sample", "top-k", "log-softmax", "oracle", "learner"])
def test_log_probs_of_a_real_vocabulary_have_no_bias(path: str, vocab: int, peaked: bool) -> None:
    """One float32 sum in eight lanes is off by 1.4e-5 at SmolLM2's 49,152 tokens, and always to the same side."""
    logits = _rows_of_a_real_vocabulary(vocab, peaked)
    rows = torch.arange(len(logits))
    greedy = torch.zeros(len(logits))
    arguments = (logits, _kept(len(logits)), greedy, _keys(len(logits)), rows)
    tokens = logits.argmax(1)
    match path:
        case "sample":
            logprobs = ops.sample(*arguments)[2]
        case "top-k":
            logprobs = ops.sample_topk(*arguments, 1)[1][:, 0]
        case "log-softmax":
            logprobs = ops.log_softmax(logits)[rows, tokens]
        case "oracle":
            logprobs = reference.log_softmax(logits)[rows, tokens]
        case _:
            logprobs = chunk_logprobs(lambda hidden: hidden, logits, tokens, 1.0)[0]
    error = logprobs.double() - logits.double().log_softmax(1)[rows, tokens]
    assert abs(float(error.mean())) <= 3e-7
    assert float(error.abs().max()) <= 2e-6


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab", [1, 31, 33, 229, 49_152])
def test_engine_and_learner_give_a_token_the_same_log_prob(vocab: int, temperature: float) -> None:
    """Bit for bit, of the same logits, in any batch and on any number of threads."""
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(3)) * 4
    temperatures = torch.full((9,), temperature)
    tokens, logprobs, logprobs_t1 = ops.sample(logits, _kept(9), temperatures, _keys(9), torch.arange(9))
    for threads, part in ((1, slice(0, 9)), (2, slice(0, 9)), (2, slice(4, 5))):
        torch.set_num_threads(threads)
        learned, learned_t1, _ = chunk_logprobs(lambda hidden: hidden, logits[part], tokens[part], temperature)
        assert torch.equal(learned, logprobs[part])
        assert torch.equal(learned_t1, logprobs_t1[part])


def test_log_softmax_is_torchs_with_its_gradient() -> None:
    logits = torch.randn(5, 77, generator=torch.Generator().manual_seed(1)) * 3
    logits[2, 10:] = -INF
    weights = torch.rand(5, 77, generator=torch.Generator().manual_seed(2)).masked_fill(logits == -INF, 0.0)
    found = []
    for function in (ops.log_softmax, reference.log_softmax, lambda x: x.log_softmax(-1)):
        x = logits.clone().requires_grad_()
        table = function(x)
        (table.masked_fill(logits == -INF, 0.0) * weights).sum().backward()
        found.append((table.detach(), x.grad))
    for table, gradient in found[:2]:
        torch.testing.assert_close(table, found[2][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, found[2][1], rtol=1e-5, atol=1e-6)
    strided = torch.cat((logits, logits), 1)[:, 77:]
    assert torch.equal(ops.log_softmax(strided), ops.log_softmax(logits))


def test_mixed_temperatures_and_cutoffs_are_per_row() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    cutoff = torch.tensor([-INF, 3.0, 2.5, -INF])
    tokens, logprobs, logprobs_t1 = ops.sample(
        logits, cutoff, torch.tensor([0.0, 1.0, 0.5, 1.0]), _keys(4), torch.arange(4)
    )
    assert tokens[:3].tolist() == [3, 3, 3]
    torch.testing.assert_close(logprobs[:3], torch.zeros(3))
    torch.testing.assert_close(logprobs_t1, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(logprobs[3], logprobs_t1[3])


def test_wrong_row_counts_are_named() -> None:
    if kernels is None:
        pytest.skip("the torch path reports shapes itself")
    with pytest.raises(ValueError, match="one entry per row"):
        ops.sample(torch.zeros(2, 4), _kept(1), torch.ones(2), _keys(2), torch.arange(2))


@pytest.mark.parametrize(
    ("probabilities", "top_p", "kept"),
    [
        ([0.3, 0.1, 0.1, 0.5], 0.8, [0, 3]),  # the case of transformers' own test: 0.5 and 0.3 reach 0.8
        ([0.3, 0.1, 0.1, 0.5], 0.81, [0, 1, 2, 3]),  # the two of 0.1 are tied: either would do, both are kept
        ([0.3, 0.1, 0.15, 0.45], 0.9, [0, 2, 3]),
        ([0.3, 0.1, 0.1, 0.5], 0.5, [3]),
        ([0.3, 0.1, 0.1, 0.5], 0.01, [3]),  # never none
        ([0.3, 0.1, 0.1, 0.5], 1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(
    probabilities: list[float], top_p: float, kept: list[int]
) -> None:
    logits = torch.tensor([probabilities]).log()
    least = ops.cutoff(logits, torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([top_p]))
    assert (logits[0] >= least).nonzero()[:, 0].tolist() == kept
