"""The native suffix index against brute force: drafts, sliding windows, limits, files, threads."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.ops.native import kernels
from tests.drafter.suffix_oracle import Oracle
from tests.native import needs_suffixes

pytestmark = needs_suffixes
HANDLES, DECAY = 4, 0.75
AT_ONCE = 1 << 40  # windows are never merged in the background


def make(
    window_rollouts: int = 32, max_bytes: int = 1 << 30, inline_tokens: int = AT_ONCE, handles: int = HANDLES
) -> Any:
    assert kernels is not None
    return kernels.Suffixes(handles, window_rollouts, max_bytes, DECAY, inline_tokens)


def array(tokens: Any) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def drafts(
    index: Any,
    handles: Any,
    depth: int = 8,
    top_k: int = 1,
    nodes: int = 8,
    min_probability: float = 0.1,
    factor: float = 1.0,
) -> Any:
    """[(tokens, parents, probs)] per handle."""
    shape = (len(handles), nodes)
    tokens, parents, probs = np.full(shape, -7), np.full(shape, -7), np.full(shape, -7, np.float32)
    counts = np.full(shape[0], -7)
    budgets = np.full(shape[0], nodes)
    index.draft_batch(np.array(handles), budgets, depth, top_k, min_probability, factor, tokens, parents, probs, counts)
    assert (tokens[np.arange(nodes) >= counts[:, None]] == -7).all()
    return [
        (t[:n].tolist(), p[:n].tolist(), q[:n].tolist())
        for t, p, q, n in zip(tokens, parents, probs, counts, strict=True)
    ]


def append(index: Any, handle: int, tokens: Any) -> None:
    index.append_batch(np.array([handle]), array(tokens), np.array([0, len(tokens)]))


class Both:
    """The index and the oracle, told the same; a window of three rollouts, so that most of them are evicted."""

    def __init__(self) -> None:
        self.index, self.oracle = make(window_rollouts=3), Oracle(3, DECAY)
        self.compared = self.drafted = 0

    def begin(self, handle: int, prompt: list[int]) -> None:
        self.index.begin(handle, array(prompt))
        self.oracle.begin(handle, prompt)

    def append(self, handle: int, tokens: list[int]) -> None:
        append(self.index, handle, tokens)
        self.oracle.append(handle, tokens)

    def finish(self, handle: int, keep: bool) -> None:
        self.index.finish(handle, keep, self.oracle.version)
        self.oracle.finish(handle, keep, self.oracle.version)

    def publish(self, prompt: list[int], response: list[int]) -> None:
        self.index.publish(array(prompt), array(response), self.oracle.version)
        self.oracle.publish(prompt, response, self.oracle.version)

    def set_version(self, version: int) -> None:
        self.index.set_version(version)
        self.oracle.version = version

    def compare(self, depth: int, top_k: int, nodes: int, min_probability: float, factor: float) -> None:
        handles = list(self.oracle.running)
        if top_k == 1:
            nodes = depth
        for handle, (tokens, parents, probs) in zip(
            handles, drafts(self.index, handles, depth, top_k, nodes, min_probability, factor), strict=True
        ):
            if top_k == 1:
                expected, expected_probs = self.oracle.chain(handle, depth, min_probability, factor)
                assert (tokens, probs) == (expected, [float(p) for p in expected_probs])
                assert parents == list(range(-1, len(tokens) - 1))
            else:
                assert (tokens, parents) == self.oracle.tree(handle, depth, top_k, nodes, min_probability, factor)
            self.compared += 1
            self.drafted += len(tokens) > 1


def random_text(rng: np.random.Generator, alphabet: int) -> list[int]:
    if rng.random() < 0.1:  # a loop longer than the contexts that are compared
        period = rng.integers(0, alphabet, rng.integers(1, 9)).tolist()
        return (period * 90)[: int(rng.integers(60, 90))]
    return rng.integers(0, alphabet, rng.integers(1, 25)).tolist()


def play(both: Both, rng: np.random.Generator, steps: int, alphabet: int) -> None:
    prompts = [random_text(rng, alphabet)[:n] for n in (3, 20)] + [[]]
    texts = [random_text(rng, alphabet) for _ in range(2)]
    for _ in range(steps):
        handle, prompt = int(rng.integers(HANDLES)), prompts[rng.integers(len(prompts))]
        # Texts that share long parts, as rollouts of one problem do.
        text = (
            texts[rng.integers(len(texts))][int(rng.integers(3)) :]
            if rng.random() < 0.5
            else random_text(rng, alphabet)
        )
        if handle not in both.oracle.running:
            both.begin(handle, prompt)
        action = rng.random()
        if action < 0.5 and len(both.oracle.running[handle][1]) < 90:
            both.append(handle, text[: int(rng.integers(1, 30))])
        elif action < 0.7:
            both.finish(handle, keep=bool(rng.random() < 0.8))
        elif action < 0.9:
            both.publish(prompt, text)
        else:
            both.set_version(both.oracle.version + int(rng.integers(3)))
        both.compare(
            depth=int(rng.integers(1, 18)),
            top_k=int(rng.integers(1, 4)),
            nodes=int(rng.integers(18, 24)),
            min_probability=float(rng.choice([0, 0.1, 0.4])),
            factor=float(rng.choice([0.5, 1, 2])),
        )


@pytest.mark.slow
def test_no_draft_differs_from_brute_force_in_10000_random_cases() -> None:
    rng = np.random.default_rng(0)
    compared = drafted = 0
    while compared < 10_000:
        both = Both()
        play(both, rng, 60, alphabet=int(rng.choice([2, 3, 8])))
        compared += both.compared
        drafted += both.drafted
    assert drafted > 5_000


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), alphabet=st.integers(1, 5))
def test_drafts_of_arbitrary_histories_are_those_of_brute_force(seed: int, alphabet: int) -> None:
    play(Both(), np.random.default_rng(seed), 15, alphabet)


def real_like(rng: np.random.Generator, rollouts: int, tokens: int) -> list[np.ndarray]:
    """Rollouts that are noisy copies of one text."""
    base = rng.integers(0, 5000, tokens)
    return [array(np.where(rng.random(tokens) < 0.02, rng.integers(0, 5000, tokens), base)) for _ in range(rollouts)]


@pytest.mark.slow
def test_a_window_of_half_a_million_tokens_drafts_what_a_running_request_repeats() -> None:
    rng = np.random.default_rng(1)
    texts = real_like(rng, 33, 16_384)
    index = make(window_rollouts=32)
    for text in texts[:32]:
        index.publish(array([1, 2, 3]), text, 0)
    index.begin(0, array([1, 2, 3]))
    append(index, 0, texts[32][:12_000])
    index.flush()
    assert index.window_tokens == 32 * 16_384
    assert index.bytes / index.window_tokens < 12
    right = drafted = 0
    for at in range(12_000, 12_500):
        ((tokens, _, _),) = drafts(index, [0])
        truth = texts[32][at : at + len(tokens)].tolist()
        right += sum(1 for n in range(len(tokens)) if tokens[: n + 1] == truth[: n + 1])
        drafted += len(tokens)
        append(index, 0, texts[32][at : at + 1])
    # A chain of 8 survives 2 % noise per token to position i with 0.98^i; after a wrong token matches start anew.
    assert right > 0.75 * drafted > 0.75 * 500 * 6


def test_a_thousand_problems_stay_within_the_memory_limit_and_the_latest_are_kept() -> None:
    rng = np.random.default_rng(2)
    index = make(max_bytes=1 << 20)
    prompts = [array([7, number]) for number in range(1000)]
    texts = [real_like(rng, 2, 200) for _ in prompts]
    for prompt, (text, _) in zip(prompts, texts, strict=True):
        index.publish(prompt, text, 0)
        assert index.bytes <= 1 << 20
    index.flush()
    assert index.bytes <= 1 << 20
    assert 100 < index.problems < 1000
    known = []
    for prompt, (_, other) in zip(prompts, texts, strict=True):
        index.begin(0, prompt)
        append(index, 0, other[:100])
        known.append(len(drafts(index, [0])[0][0]) >= 4)  # a token that recurs by chance gives one or two
        index.finish(0, False, 0)
    assert known.index(True) > 500
    assert sum(known[-100:]) > 80
    assert index.live_bytes < 20 * 300 * HANDLES


def test_a_problem_larger_than_the_limit_keeps_its_latest_rollouts() -> None:
    rng = np.random.default_rng(3)
    index = make(max_bytes=100_000)
    texts = real_like(rng, 11, 2000)
    for text in texts[:10]:
        index.publish(array([1]), text, 0)
    index.begin(0, array([1]))
    append(index, 0, texts[10][:1000])
    assert len(drafts(index, [0])[0][0]) >= 4
    assert 2000 <= index.window_tokens < 20_000
    assert index.bytes <= 100_000


def filled(rng: np.random.Generator, index: Any) -> list[np.ndarray]:
    """Three problems with eight rollouts each, of two versions. A held-out rollout of each."""
    held_out = []
    for problem in range(3):
        *texts, last = real_like(rng, 9, 300)
        for number, text in enumerate(texts):
            index.publish(array([problem, 1]), text, number // 4)
        held_out.append(last)
    index.set_version(3)
    return held_out


def all_drafts(index: Any, held_out: Any) -> list:
    for problem, text in enumerate(held_out):
        index.begin(problem, array([problem, 1]))
        append(index, problem, text[:40])
    found = []
    for at in range(40, 140):
        found.append((drafts(index, [0, 1, 2]), drafts(index, [0, 1, 2], 8, 3, 16)))
        for problem, text in enumerate(held_out):
            append(index, problem, text[at : at + 1])
    for problem in range(3):
        index.finish(problem, False, 0)
    return found


def test_a_saved_index_drafts_the_same_when_loaded(tmp_path: Path) -> None:
    index = make(window_rollouts=8)
    held_out = filled(np.random.default_rng(4), index)
    path = str(tmp_path / "index")
    index.save(path)
    expected = all_drafts(index, held_out)
    assert sum(len(tokens) for chains, _ in expected for tokens, _, _ in chains) > 1000
    loaded = make(window_rollouts=8)
    loaded.publish(array([0, 1]), array([5] * 50), 0)  # replaced by what the file says
    loaded.load(path)
    assert loaded.window_tokens == index.window_tokens
    assert all_drafts(loaded, held_out) == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


def test_an_index_of_another_window_size_keeps_the_latest_rollouts(tmp_path: Path) -> None:
    index, small, reference = make(window_rollouts=8), make(window_rollouts=3), make(window_rollouts=3)
    held_out = filled(np.random.default_rng(5), index)
    filled(np.random.default_rng(5), reference)
    index.save(str(tmp_path / "index"))
    small.load(str(tmp_path / "index"))
    assert all_drafts(small, held_out) == all_drafts(reference, held_out)


def test_a_damaged_file_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    index = make(window_rollouts=8)
    held_out = filled(np.random.default_rng(6), index)
    good = tmp_path / "index"
    index.save(str(good))
    expected = all_drafts(index, held_out)
    content = good.read_bytes()
    rng = np.random.default_rng(7)
    anywhere = rng.integers(32, len(content), 60).tolist()
    for at in [*range(32), *anywhere]:  # the header, byte by byte, and some of the rest
        bad = bytearray(content)
        bad[at] ^= 1 << int(rng.integers(8))
        if rng.random() < 0.3:
            bad = bytearray(content)[:at]
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(RuntimeError, match="bad: "):
            index.load(str(tmp_path / "bad"))
    assert all_drafts(index, held_out) == expected
    with pytest.raises(RuntimeError, match="missing: "):
        index.load(str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match="partial: "):
        index.save(str(tmp_path / "no" / "index"))


def test_drafts_go_on_while_windows_are_merged_in_the_background() -> None:
    rng = np.random.default_rng(8)
    index = make(window_rollouts=8, inline_tokens=0, handles=8)
    texts = real_like(rng, 40, 4000)
    stop = threading.Event()
    errors: list[BaseException] = []

    def draft(handle: int) -> None:
        try:
            index.begin(handle, array([1]))
            at = 10
            append(index, handle, texts[-1 - handle][:at])
            while not stop.is_set() or at == 10:
                for tokens, parents, probs in drafts(index, [handle]):
                    assert parents == list(range(-1, len(tokens) - 1))
                    assert all(0 < p <= 1 for p in probs)
                    assert all(0 <= t < 5000 for t in tokens)
                append(index, handle, texts[-1 - handle][at : at + 1])
                at += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=draft, args=(handle,)) for handle in range(4)]
    for thread in threads:
        thread.start()
    for text in texts[:36]:
        index.publish(array([1]), text, 0)
    index.flush()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    # What the background made in several merges is what one merge makes.
    reference = make(window_rollouts=8, handles=8)
    for text in texts[28:36]:
        reference.publish(array([1]), text, 0)
    found = []
    for each in (index, reference):
        each.begin(7, array([1]))
        append(each, 7, texts[36][:50])
        made = []
        for at in range(50, 250):
            append(each, 7, texts[36][at : at + 1])
            made.append(drafts(each, [7]))
        found.append(made)
    assert found[0] == found[1]
    assert index.window_tokens == 8 * 4000


def test_what_does_not_fit_is_refused() -> None:
    index = make()
    with pytest.raises(IndexError, match="out of range"):
        index.begin(HANDLES, array([1]))
    index.begin(0, array([1]))
    with pytest.raises(ValueError, match="has a request"):
        index.begin(0, array([1]))
    with pytest.raises(ValueError, match="without a request"):
        index.finish(1, True, 0)
    with pytest.raises(ValueError, match="without a request"):
        drafts(index, [1])
    with pytest.raises(ValueError, match="offsets"):
        index.append_batch(np.array([0]), array([1]), np.array([0, 2]))
    with pytest.raises(ValueError, match="window_rollouts"):
        make(window_rollouts=0)
