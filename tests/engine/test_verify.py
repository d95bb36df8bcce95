"""The accept rule against its definition in words, one request at a time; drafts of any kind come out clean."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.batch.step.verify import accept, accept_tree
from actors.engine.native.schedule.blocks import BlockPool

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


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_accept_tree_walks_like_token_by_token_decoding(data: st.DataObject) -> None:
    nodes, grown = data.draw(st.integers(1, 7)), list[tuple[int, int]]()
    for token, parent in data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 6)), min_size=nodes, max_size=nodes)
    ):
        if (token, parent) not in grown and parent < len(grown):
            grown.append((token, parent))
    nodes = len(grown)
    tokens, parents = np.array([[t for t, _ in grown]], np.int64), np.array([[p for _, p in grown]], np.int64)
    draws = np.array([data.draw(st.lists(st.integers(0, 2), min_size=nodes + 1, max_size=nodes + 1))])
    stop = np.array([[data.draw(st.integers(-1, 2)), -1]])
    remaining = np.array([data.draw(st.integers(1, 8))])
    emitted, accepted, stopped, path = accept_tree(draws, tokens, parents, stop, remaining)
    out: list[int] = []
    stood, node = 0, -1
    while True:
        token = int(draws[0, node + 1])
        out.append(token)
        children = [i for i, known in enumerate(grown) if known == (token, node)]
        stood += bool(children)
        if token in stop[0] or len(out) == remaining[0] or not children:
            break
        (node,) = children
    assert draws[0, path[0, : emitted[0]]].tolist() == out
    assert accepted[0] == stood
    assert stopped[0] == (out[-1] in stop[0])


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 30)), max_size=60))
def test_blocks_are_free_exactly_when_nobody_holds_them(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    held: list[int] = []  # one entry per reference
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
