"""The text of a strategy: what is written is read back, and what no step could run is refused."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.strategy import PLAIN, Strategy

chains = st.builds(Strategy, st.sampled_from(("suffix", "ngram", "eagle")), st.integers(1, 64))
trees = st.builds(
    lambda drafter, depth, top_k, more: Strategy(drafter, depth, top_k, depth + more),
    st.sampled_from(("suffix", "eagle")),
    st.integers(1, 32),
    st.integers(2, 16),
    st.integers(0, 100),
)


@given(st.one_of(st.just(PLAIN), chains, trees))
def test_text_is_read_back(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "drafter", "depth", "top_k", "verify"),
    [
        ("plain", "none", 0, 1, 0),
        ("suffix:8", "suffix", 8, 1, 8),
        ("eagle:4x2/12", "eagle", 4, 2, 12),
        ("eagle:4x3", "eagle", 4, 3, 12),  # verifies depth x top-k where nothing else is said
        ("eagle:4x1/4", "eagle", 4, 1, 4),
    ],
)
def test_text_means(text: str, drafter: str, depth: int, top_k: int, verify: int) -> None:
    found = Strategy.parse(text)
    assert (found.drafter, found.depth, found.top_k, found.tokens_to_verify) == (drafter, depth, top_k, verify)
    assert found.is_tree == (top_k > 1)


def test_only_trees_write_their_width() -> None:
    assert [str(s) for s in (PLAIN, Strategy("suffix", 8), Strategy("eagle", 4, 2, 12))] == [
        "plain",
        "suffix:8",
        "eagle:4x2/12",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "suffix",
        "suffix:",
        "suffix:deep",
        "suffix:0",  # a drafter that drafts nothing is plain decoding
        "suffix:-4",
        "none:4",
        "suffix:8x",
        "eagle:4x2/",
        "eagle:4x0/4",
        "eagle:4x2/3",  # a path of 4 does not fit into 3 nodes
        "eagle:4x1/12",  # a chain verifies its depth
        "eagle:4/12",
        "eagle:4.5",
    ],
)
def test_what_no_step_could_run_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a strategy") as error:
        Strategy.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("drafter", "depth", "top_k", "verify"),
    [("none", 4, 1, 4), ("suffix", 0, 1, 0), ("suffix", -1, 1, -1), ("eagle", 4, 0, 4), ("eagle", 4, 2, 3)],
)
def test_built_by_hand_it_is_refused_too(drafter: str, depth: int, top_k: int, verify: int) -> None:
    with pytest.raises(ValueError, match=f"drafter='{drafter}'"):
        Strategy(drafter, depth, top_k, verify)
