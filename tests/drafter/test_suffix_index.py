"""The native suffix index against brute force: drafts, sliding windows, limits, files, threads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.ops.native import kernels
from tests.drafter.suffix_oracle import INDEX_BYTES, ROLLOUT_BYTES, TOKEN_BYTES, Oracle
from tests.native import needs_suffixes

pytestmark = needs_suffixes
HANDLES, DECAY = 4, 0.75
AT_ONCE = 1 << 40  # windows are never merged in the background


def make(
    window_bytes: int = 8 << 20,
    pool_bytes: int = 0,
    max_bytes: int = 1 << 30,
    inline_tokens: int = AT_ONCE,
    handles: int = HANDLES,
    siblings: bool = False,
) -> Any:
    assert kernels is not None
    return kernels.Suffixes(handles, window_bytes, pool_bytes, max_bytes, DECAY, inline_tokens, siblings)


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
    """The index and the oracle, told the same; windows and a pool of few rollouts, so that most leave."""

    def __init__(self, pool_bytes: int = 8192, siblings: bool = False) -> None:
        self.index = make(4096, pool_bytes, siblings=siblings)
        self.oracle = Oracle(4096, pool_bytes, DECAY, siblings=siblings)
        self.compared = self.drafted = self.pooled = self.beside = 0

    def begin(self, handle: int, prompt: list[int]) -> None:
        self.index.begin(handle, array(prompt))
        self.oracle.begin(handle, prompt)

    def append(self, handle: int, tokens: list[int]) -> None:
        append(self.index, handle, tokens)
        self.oracle.append(handle, tokens)

    def hear(self, handle: int, request: int, first: int, tokens: list[int]) -> None:
        self.index.hear(handle, request, first, array(tokens))
        self.oracle.hear(handle, request, first, tokens)

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
        self.oracle.merge_pool()
        self.oracle.follow()
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
            pool, self.oracle.pool = self.oracle.pool, []
            if top_k == 1:
                self.pooled += tokens != self.oracle.chain(handle, depth, min_probability, factor)[0]
            self.oracle.pool = pool
            groups, self.oracle.siblings = self.oracle.siblings, False
            if top_k == 1 and groups:
                self.beside += tokens != self.oracle.chain(handle, depth, min_probability, factor)[0]
            self.oracle.siblings = groups


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
        elif action < 0.8 and both.oracle.siblings:
            # A text of another worker, the same for a request's prompt, with repeated parts and gaps.
            request, first = int(rng.integers(3)), int(rng.integers(20))
            own = list(both.oracle.running[handle][0])
            whole = np.random.default_rng([request, *own]).permutation(texts[0] * 3 + own).tolist()
            both.hear(handle, request, first, whole[first : first + int(rng.integers(1, 25))])
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
    compared = drafted = pooled = 0
    while compared < 10_000:
        both = Both(pool_bytes=int(rng.choice([0, 4096, 8192])))
        play(both, rng, 60, alphabet=int(rng.choice([2, 3, 8, 40])))
        compared += both.compared
        drafted += both.drafted
        pooled += both.pooled
    assert drafted > 5_000
    assert pooled > 100


@pytest.mark.slow
def test_drafts_from_siblings_under_way_are_those_of_brute_force() -> None:
    rng = np.random.default_rng(3)
    compared = beside = 0
    while compared < 6_000:
        both = Both(pool_bytes=int(rng.choice([0, 8192])), siblings=True)
        play(both, rng, 60, alphabet=int(rng.choice([3, 8, 40])))
        compared += both.compared
        beside += both.beside
    assert beside > 200


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), alphabet=st.integers(1, 40))
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
    index = make(2 * 32 * 16_384 * TOKEN_BYTES)
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


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), window_bytes=st.integers(4096, 40_000), pool_bytes=st.sampled_from([0, 5000, 20_000])
)
def test_limits_hold_after_every_call_and_the_oldest_leave(seed: int, window_bytes: int, pool_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    max_bytes = int(rng.integers(pool_bytes + window_bytes + 4096, 100_000))
    index = make(window_bytes, pool_bytes, max_bytes)
    published: dict[int, list[int]] = {}
    for number in range(60):
        problem, tokens = int(rng.integers(6)), int(rng.integers(2, 600))
        index.publish(array([problem]), array([10 + number] * tokens), 0)
        published.setdefault(problem, []).append(number)
        assert index.bytes <= max_bytes
        index.begin(number % HANDLES, array([int(rng.integers(12))]))  # also of problems that have nothing yet
        assert index.bytes <= max_bytes
        if number >= HANDLES - 1:
            index.finish((number + 1) % HANDLES, False, 0)
        if rng.random() < 0.2:
            index.flush()
            assert index.bytes <= max_bytes
    index.flush()
    assert TOKEN_BYTES * index.pool_tokens <= pool_bytes
    for handle in range(1, HANDLES):
        index.finish((60 + handle) % HANDLES, False, 0)
    if pool_bytes:
        return  # which would speak for a window
    for problem, numbers in published.items():
        index.begin(0, array([problem]))
        known = []
        for number in numbers:
            append(index, 0, [10 + number])
            ((tokens, _, _),) = drafts(index, [0])
            known.append(tokens[:1] == [10 + number])
        index.finish(0, False, 0)
        assert known == sorted(known)  # whoever is known, all later ones are


def test_a_problem_alone_may_fill_its_window_and_no_more() -> None:
    index = make(window_bytes=50_000)
    for number in range(100):
        index.publish(array([1]), array([number] * 100), 0)
    index.flush()
    each = ROLLOUT_BYTES + 101 * TOKEN_BYTES
    assert index.window_tokens == (50_000 - INDEX_BYTES) // each * 100
    index.publish(array([1]), array(range(20_000)), 0)  # cut to what fits, and all others leave
    index.flush()
    assert index.window_tokens == (50_000 - INDEX_BYTES - ROLLOUT_BYTES) // TOKEN_BYTES - 1
    assert index.bytes <= 50_000


def knows(index: Any, prompt: Any, text: Any, at: int = 40) -> bool:
    """Whether a request to `prompt` that has written `text[:at]` is told what follows."""
    index.begin(0, array(prompt))
    append(index, 0, text[:at])
    ((tokens, _, _),) = drafts(index, [0])
    index.finish(0, False, 0)
    return bool(len(tokens) >= 4 and tokens == text[at : at + len(tokens)].tolist())


def test_problems_that_return_in_turns_share_the_memory() -> None:
    """The least recently used problem is the next to be asked: whole problems must not leave as long as each has
    something else to give."""
    rng = np.random.default_rng(9)
    problems, rollouts, tokens = 50, 8, 200
    index = make(max_bytes=problems * 3 * (ROLLOUT_BYTES + TOKEN_BYTES * tokens))
    texts = {problem: [rng.integers(0, 5000, tokens) for _ in range(3 * rollouts)] for problem in range(problems)}
    for epoch in range(3):
        for problem in range(problems):
            if epoch:
                newest = texts[problem][epoch * rollouts - 1]
                assert knows(index, [problem], newest), f"problem {problem} in epoch {epoch}"
            for text in texts[problem][epoch * rollouts :][:rollouts]:
                index.publish(array([problem]), text, epoch)
    index.flush()
    held = [sum(knows(index, [problem], text) for text in texts[problem]) for problem in range(problems)]
    assert min(held) >= 1
    assert max(held) <= 5  # of 24, where a fair share is not quite three
    assert sum(held) > 2 * problems


def test_problems_that_run_keep_their_rollouts_while_others_have_any() -> None:
    rng = np.random.default_rng(10)
    index = make(max_bytes=60_000, handles=2)
    index.begin(1, array([1]))
    texts = [rng.integers(0, 5000, 300) for _ in range(8)]
    for text in texts:
        index.publish(array([1]), text, 0)
    for problem in range(2, 40):
        index.publish(array([problem]), rng.integers(0, 5000, 300), 0)
    assert all(knows(index, [1], text) for text in texts)
    assert index.bytes <= 60_000


def test_the_pool_speaks_where_a_problem_has_nothing_to_say() -> None:
    rng = np.random.default_rng(11)
    first, second = (rng.integers(0, 5000, 300) for _ in range(2))
    pooled, scoped = make(pool_bytes=1 << 20), make()
    for index in (pooled, scoped):
        index.publish(array([1]), first, 0)
        index.publish(array([2]), second, 0)
    assert [knows(index, [3], first) for index in (pooled, scoped)] == [True, False]
    assert [knows(index, [1], first) for index in (pooled, scoped)] == [True, True]
    # A match of two tokens with the problem's own rollouts outweighs any match with those of others.
    pooled.publish(array([4]), np.concatenate((first[38:40], [7, 8, 9, 10, 11])), 0)
    pooled.begin(0, array([4]))
    append(pooled, 0, first[:40])
    assert drafts(pooled, [0])[0][0] == [7, 8]
    pooled.finish(0, False, 0)


def test_the_pool_keeps_the_latest_rollouts_of_problems_that_have_left() -> None:
    rng = np.random.default_rng(12)
    texts = [rng.integers(0, 5000, 300) for _ in range(60)]
    index = make(max_bytes=1 << 16, pool_bytes=1 << 15)
    for problem, text in enumerate(texts):
        index.publish(array([problem]), text, 0)
    index.flush()
    assert index.bytes <= 1 << 16
    known = [knows(index, [1000], text) for text in texts]
    assert known == sorted(known)
    assert sum(known) == (1 << 15) // (ROLLOUT_BYTES + TOKEN_BYTES * 301)


POOLED = {"window_bytes": 30_000, "pool_bytes": 40_000}
SMALL = {"window_bytes": 10_000, "pool_bytes": 20_000}


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
    index.begin(3, array([9]))  # of a problem that has nothing
    texts = [*held_out, held_out[0]]
    for handle, text in enumerate(texts):
        if handle < 3:
            index.begin(handle, array([handle, 1]))
        append(index, handle, text[:40])
    found = []
    for at in range(40, 140):
        found.append((drafts(index, range(4)), drafts(index, range(4), 8, 3, 16)))
        for handle, text in enumerate(texts):
            append(index, handle, text[at : at + 1])
    for handle in range(4):
        index.finish(handle, False, 0)
    return found


def test_a_saved_index_drafts_the_same_when_loaded(tmp_path: Path) -> None:
    index = make(**POOLED)
    held_out = filled(np.random.default_rng(4), index)
    path = str(tmp_path / "index")
    index.save(path)
    expected = all_drafts(index, held_out)
    assert sum(len(tokens) for chains, _ in expected for tokens, _, _ in chains) > 1000
    assert any(tokens for chains, _ in expected for tokens, _, _ in chains[3:])
    loaded = make(**POOLED)
    loaded.publish(array([0, 1]), array([5] * 50), 0)  # replaced by what the file says
    loaded.load(path)
    assert (loaded.window_tokens, loaded.pool_tokens) == (index.window_tokens, index.pool_tokens)
    assert (loaded.bytes, loaded.problems) == (index.bytes, index.problems)
    assert all_drafts(loaded, held_out) == expected
    assert [entry.name for entry in tmp_path.iterdir()] == ["index"]


@pytest.mark.parametrize("kinds", [(POOLED, SMALL), (SMALL, POOLED), (POOLED, {}), ({}, POOLED)])
def test_an_index_with_other_limits_keeps_the_latest_rollouts(
    tmp_path: Path, kinds: tuple[dict[str, int], dict[str, int]]
) -> None:
    """What is loaded is what would be there if the smaller limits had held all along."""
    saved, loaded = (make(**kind) for kind in kinds)
    reference = make(
        min(kind.get("window_bytes", 8 << 20) for kind in kinds), min(kind.get("pool_bytes", 0) for kind in kinds)
    )
    held_out = filled(np.random.default_rng(5), saved)
    filled(np.random.default_rng(5), reference)
    saved.save(str(tmp_path / "index"))
    loaded.load(str(tmp_path / "index"))
    reference.flush()
    assert loaded.pool_tokens == reference.pool_tokens
    assert all_drafts(loaded, held_out) == all_drafts(reference, held_out)


def test_a_damaged_file_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    index = make(**POOLED)
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
    for path, said in (("old", "format 1, this build reads format 2"), ("new", "format 3, this build reads format 2")):
        header = content[:8] + int(said.split()[1][:-1]).to_bytes(4, "little") + content[12:]
        (tmp_path / path).write_bytes(header)
        with pytest.raises(RuntimeError, match=said):
            index.load(str(tmp_path / path))
    assert all_drafts(index, held_out) == expected
    with pytest.raises(RuntimeError, match="missing: "):
        index.load(str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match="partial: "):
        index.save(str(tmp_path / "no" / "index"))
