"""The accept rule against its definition in words, one request at a time; drafts of any kind come out clean."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.native.blocks import BlockPool
from actors.engine.native.verify import accept, clean_drafts

TOKENS = st.integers(0, 3)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    requests, depth, stops = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.integers(1, 2))
    draws = np.array(draw(st.lists(TOKENS, min_size=requests * (depth + 1), max_size=requests * (depth + 1))))
    drafts = np.full((requests, depth), -1)
    for row in drafts:
        count = draw(st.integers(0, depth))
        row[:count] = draw(st.lists(TOKENS, min_size=count, max_size=count))
    stop = np.array(draw(st.lists(st.integers(-1, 3), min_size=requests * stops, max_size=requests * stops)))
    remaining = np.array(draw(st.lists(st.integers(1, 6), min_size=requests, max_size=requests)))
    return draws.reshape(requests, -1), drafts, stop.reshape(requests, -1), remaining


@given(batches())
@settings(max_examples=500, deadline=None)
def test_accept_is_token_by_token_decoding(batch: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
    draws, drafts, stop, remaining = batch
    emitted, accepted, stopped = accept(draws, drafts, stop, remaining)
    for i in range(len(draws)):
        tokens: list[int] = []
        stood = 0
        while True:
            token = int(draws[i, len(tokens)])  # Valid: every earlier draft stood.
            place = len(tokens)
            tokens.append(token)
            drafted = place < drafts.shape[1] and drafts[i, place] == token
            stood += drafted
            if token in stop[i] or len(tokens) == remaining[i] or not drafted:
                break
        assert emitted[i] == len(tokens)
        assert accepted[i] == stood
        assert stopped[i] == (tokens[-1] in stop[i])


@given(
    st.lists(st.lists(st.integers(-5, 12), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(-3, 9), min_size=4, max_size=4),
    st.integers(1, 5),
)
def test_clean_drafts_are_prefixes_inside_the_vocabulary(rows: list[list[int]], counts: list[int], depth: int) -> None:
    cleaned = clean_drafts(np.array(rows), np.array(counts[: len(rows)]), None, len(rows), depth, depth, 10)
    for i, row in enumerate(rows):
        wanted: list[int] = []
        for token in row[: min(depth, max(counts[i], 0))]:
            if not 0 <= token < 10:
                break
            wanted.append(token)
        found = [] if cleaned is None else [int(t) for t in cleaned.tokens[i] if t >= 0]
        assert found == wanted


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 30)), max_size=60))
def test_blocks_are_free_exactly_when_nobody_holds_them(actions: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(6), []  # `held`: one entry per reference
    for action, number in actions:
        if action == "allocate" and pool.free:
            blocks = pool.allocate(1 + number % pool.free)
            assert not set(blocks) & set(held)
            held += blocks
        elif action == "share" and held:
            pool.share([held[number % len(held)]])
            held.append(held[number % len(held)])
        elif action == "release" and held:
            pool.release([held.pop(number % len(held))])
        assert pool.free == pool.total - len(set(held))
