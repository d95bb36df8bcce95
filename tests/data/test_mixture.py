"""Training sets in one order by their weights: shares at every moment, each set's own order, resuming."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.data import DataError, PromptOrder, load_prompts
from actors.data.mixture import MixedOrder, make_order
from config.data import DataOptions

SETS = st.dictionaries(
    st.sampled_from("abcde"), st.tuples(st.integers(1, 9), st.floats(0.1, 10.0)), min_size=1, max_size=5
)


def split(taken: list[tuple[int, int]], sets: dict[str, tuple[int, float]]) -> dict[str, list[tuple[int, int]]]:
    """(epoch, index within its set) of each set."""
    first, found = 0, {}
    for name, (size, _) in sets.items():
        found[name] = [(epoch, index - first) for epoch, index in taken if first <= index < first + size]
        first += size
    return found


@given(SETS, st.integers(0, 60), st.booleans())
def test_each_set_has_its_share_at_every_moment_and_its_own_order(
    sets: dict[str, tuple[int, float]], count: int, shuffle: bool
) -> None:
    taken = MixedOrder(sets, 7, shuffle).take(count)
    whole = sum(weight for _, weight in sets.values())
    for moment in range(count + 1):
        for name, own in split(taken[:moment], sets).items():
            owed = moment * sets[name][1] / whole
            assert abs(len(own) - owed) <= max(len(sets) - 1, 1e-9) + 1e-9
    for name, own in split(taken, sets).items():
        assert own == PromptOrder(sets[name][0], 7, shuffle, stream=name).take(len(own))


@given(SETS, st.integers(0, 30), st.integers(0, 30))
def test_it_goes_on_where_it_was(sets: dict[str, tuple[int, float]], before: int, after: int) -> None:
    order = MixedOrder(sets, 3, True)
    order.take(before)
    state = json.loads(json.dumps(order.state_dict()))
    resumed = MixedOrder(sets, 3, True)
    resumed.load_state_dict(state)
    assert resumed.take(after) == order.take(after)


def test_sets_of_one_size_have_orders_of_their_own_whatever_their_place() -> None:
    one = MixedOrder({"a": (50, 1.0), "b": (50, 1.0)}, 0, True)
    found = split(one.take(100), {"a": (50, 1.0), "b": (50, 1.0)})
    assert found["a"] != found["b"]
    other = MixedOrder({"b": (50, 1.0), "a": (50, 1.0)}, 0, True)
    assert split(other.take(100), {"b": (50, 1.0), "a": (50, 1.0)})["a"] == found["a"]


def test_other_weights_hold_from_the_resume_on_and_other_sets_are_refused() -> None:
    order = MixedOrder({"a": (90, 1.0), "b": (90, 1.0)}, 0, True)
    order.take(40)
    changed = MixedOrder({"a": (90, 1.0), "b": (90, 9.0)}, 0, True)
    changed.load_state_dict(order.state_dict())
    assert sum(index >= 90 for _, index in changed.take(20)) == 18, "no catching up on the past"
    with pytest.raises(DataError, match=r"of the sets a, b, and data.sets has a, c"):
        MixedOrder({"a": (90, 1.0), "c": (90, 1.0)}, 0, True).load_state_dict(order.state_dict())
    with pytest.raises(DataError, match=r"of one set, data.train"):
        order.load_state_dict(PromptOrder(90, 0, True).state_dict())
    with pytest.raises(DataError, match=r"is of data.sets, and this run has one set"):
        PromptOrder(90, 0, True).load_state_dict(order.state_dict())


def test_sets_are_loaded_with_fields_of_their_own(tmp_path, plain_tokenizer) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.jsonl").write_text('{"prompt": "one", "answer": "1"}\n{"prompt": "two", "answer": "2"}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "three", "solution": "3"}\n')
    options = DataOptions.model_validate(
        {
            "template": "plain",
            "sets": [
                {"name": "a", "path": str(tmp_path / "a.jsonl")},
                {"name": "b", "path": str(tmp_path / "b.jsonl"), "prompt_field": "question", "answer_field": "solution"}
                | {"weight": 3.0},
            ],
        }
    )
    made = load_prompts(options, "train", plain_tokenizer)
    assert [(p.prompt_id, p.uid, p.set, p.text, p.record["answer"]) for p in made] == [
        (0, "a/0", "a", "one", "1"),
        (1, "a/1", "a", "two", "2"),
        (2, "b/0", "b", "three", "3"),
    ]
    assert made.report.used == made.report.records == 3
    order = make_order(made, 0, True)
    assert sum(index == 2 for _, index in order.take(12)) == 9
    broken = options.model_copy(update={"sets": (*options.sets[1:], options.sets[0].model_copy(update={"path": "no"}))})
    with pytest.raises(DataError, match=r"data\.sets\.1\.path: .*does not exist"):
        load_prompts(broken, "train", plain_tokenizer)
