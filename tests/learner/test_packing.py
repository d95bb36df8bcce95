"""The micro-batch plan and layout: properties for any lengths, and one layout written out by hand."""

from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from actors.training.packing import (
    Plan,
    build_micro_batch,
    bundles_of,
    depth_first,
    lay_out_shared,
    plan_packed,
    plan_padded,
)

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)


def flat(plan: Plan) -> list[int]:
    return [i for rank in plan for micro in rank for i in micro]


@example([1, 1, 1, 9], 1, 2)  # what is above the budget leaves no room to the others
@given(LENGTHS, st.integers(1, 800), st.integers(1, 4))
def test_packed_plan_uses_every_sequence_once_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    plan = plan_packed(lengths, budget_tokens=budget, ranks=ranks)
    assert sorted(flat(plan)) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for micro in (m for rank in plan for m in rank):
        assert len(micro) <= 1 or sum(lengths[i] for i in micro) <= budget
    assert plan == plan_packed(list(lengths), budget_tokens=budget, ranks=ranks)


@given(LENGTHS, st.integers(1, 800), st.integers(1, 4))
def test_padded_plan_counts_the_padding(lengths: list[int], budget: int, ranks: int) -> None:
    plan = plan_padded(lengths, budget_tokens=budget, ranks=ranks)
    assert sorted(flat(plan)) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for micro in (m for rank in plan for m in rank):
        assert len(micro) <= 1 or len(micro) * max(lengths[i] for i in micro) <= budget


def micro_batches(lengths: Sequence[int], budget: int) -> int:
    return len(plan_packed(lengths, budget_tokens=budget, ranks=1)[0])


def lower_bound(lengths: Sequence[int], budget: int) -> int:
    """Fewest bins that any plan could do with (Martello and Toth 1990, L2): the volume, and what long items waste."""
    sizes = [min(length, budget) for length in lengths]
    bounds = [-(-sum(sizes) // budget)]
    for small in {size for size in sizes if 2 * size <= budget}:
        alone = sum(size > budget - small for size in sizes)
        halves = [size for size in sizes if budget < 2 * size and size <= budget - small]
        rest = sum(size for size in sizes if small <= size and 2 * size <= budget)
        bounds.append(alone + len(halves) + max(0, -(-(rest - len(halves) * budget + sum(halves)) // budget)))
    return max(bounds)


def fewest(lengths: Sequence[int], budget: int) -> int:
    """By trying every assignment, up to which of the empty bins is taken."""

    def search(left: tuple[int, ...], rooms: tuple[int, ...]) -> int:
        if not left:
            return len(rooms)
        length, rest = left[0], left[1:]
        choices = [
            search(rest, tuple(sorted((*rooms[:b], room - length, *rooms[b + 1 :]))))
            for b, room in enumerate(rooms)
            if room >= length and room not in rooms[:b]
        ]
        return min([*choices, search(rest, tuple(sorted((*rooms, max(0, budget - length)))))])

    return search(tuple(sorted(lengths, reverse=True)), ())


@pytest.mark.parametrize(
    ("lengths", "budget", "count"),
    [
        ([100, 200, 300, 150, 250], 500, 2),  # the volume's bound; emptiest-first needs 3
        ([6, 4, 5, 3, 5, 2, 3, 2], 10, 3),
        ([7, 7, 7], 13, 3),  # just over half: each alone
        ([20, 3, 3], 10, 2),  # one above the budget is alone
        ([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 61, 3),  # decreasing fits need 4
    ],
)
def test_plans_by_hand(lengths: list[int], budget: int, count: int) -> None:
    assert micro_batches(lengths, budget) == count


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(10, 30))
def test_short_lists_are_cut_as_well_as_by_trying_everything(lengths: list[int], budget: int) -> None:
    best = fewest(lengths, budget)
    assert lower_bound(lengths, budget) <= best <= micro_batches(lengths, budget) <= best + (best > 2)


@pytest.mark.parametrize("tightness", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("count", [512, 10_000])
def test_long_tailed_lengths_come_within_two_percent_of_the_lower_bound(count: int, tightness: float) -> None:
    for seed in range(3):
        lengths = np.clip(np.random.default_rng(seed).lognormal(7.5, 0.6, count), 100, 8192).astype(int).tolist()
        budget = int(8192 * tightness)
        volume = -(-sum(lengths) // budget)
        assert micro_batches(lengths, budget) <= 1.02 * volume


@pytest.mark.parametrize("budget", [8192, 12_000, 16_384, 10**6])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_rank_has_three_percent_more_work_than_the_mean(ranks: int, budget: int) -> None:
    for seed in range(3):
        for rng_lengths in (
            np.random.default_rng(seed).lognormal(6, 1, 512),
            np.random.default_rng(seed).uniform(100, 8192, 512),
        ):
            lengths = np.clip(rng_lengths, 10, 8192).astype(int).tolist()
            plan = plan_packed(lengths, budget_tokens=budget, ranks=ranks)
            loads = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
            assert max(loads) * ranks <= 1.03 * sum(loads)


@given(st.lists(st.integers(10, 200), min_size=32, max_size=128), st.integers(2, 4))
def test_one_round_is_balanced_up_to_a_sequence(lengths: list[int], ranks: int) -> None:
    plan = plan_packed(lengths, budget_tokens=10**6, ranks=ranks)
    loads = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def test_ranks_run_no_round_more_than_the_micro_batches_need() -> None:
    """17 micro-batches on 8 ranks are 3 rounds; more would be collectives for nothing."""
    lengths = [900, 100] * 17
    plan = plan_packed(lengths, budget_tokens=1000, ranks=8)
    assert {len(rank) for rank in plan} == {3}


PROMPTS = [np.array([1, 2], np.int32), np.array([3], np.int32)]
RESPONSES = [np.array([4, 5, 6], np.int32), np.array([7, 8], np.int32)]


def test_layout_by_hand() -> None:
    packed = build_micro_batch([1, 0], PROMPTS, RESPONSES)
    assert packed.tokens.tolist() == [3, 7, 1, 2, 4, 5]
    assert packed.lengths == (2, 4)
    assert packed.rows.tolist() == [0, 1, 3, 4, 5]
    assert packed.targets.tolist() == [7, 8, 4, 5, 6]
    padded = build_micro_batch([1, 0], PROMPTS, RESPONSES, padded=True)
    assert padded.tokens.tolist() == [3, 7, 0, 0, 1, 2, 4, 5]
    assert padded.lengths == (4, 4)
    assert padded.rows.tolist() == [0, 1, 5, 6, 7]
    assert padded.targets.tolist() == packed.targets.tolist()


@pytest.mark.parametrize("padded", [False, True])
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8))
def test_every_row_predicts_the_token_after_it(padded: bool, shapes: list[tuple[int, int]]) -> None:
    counter = iter(range(1, 10_000))
    prompts = [np.array([next(counter) for _ in range(p)], np.int32) for p, _ in shapes]
    responses = [np.array([next(counter) for _ in range(t)], np.int32) for _, t in shapes]
    batch = build_micro_batch(range(len(shapes)), prompts, responses, padded=padded)
    # Prompt and response of one sequence count upwards without a gap, so the token before t is t - 1.
    assert batch.tokens[batch.rows].tolist() == [
        (list(p) + list(r))[len(p) - 1 + k] for p, r in zip(prompts, responses, strict=True) for k in range(len(r))
    ]
    segment = np.searchsorted(np.cumsum(batch.lengths), batch.rows, side="right")
    assert segment.tolist() == np.repeat(np.arange(len(shapes)), batch.response_lengths).tolist()


def test_shared_layout_by_hand() -> None:
    """Three answers to one prompt, two of them alike up to their second token, and a prompt that begins alike."""
    prompts = [np.array(p, np.int32) for p in ([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 9])]
    responses = [np.array(r, np.int32) for r in ([5, 6, 7], [4], [5, 6, 8, 9], [5, 6])]
    batch = build_micro_batch([0, 1, 2, 3], prompts, responses, shared=True)
    assert batch.tokens.tolist() == [1, 2, 3, 5, 6, 8, 9, 5]
    assert (batch.lengths, batch.parents) == ((2, 1, 2, 1, 2), (-1, 0, 1, 2, 0))
    assert batch.rows.tolist() == [2, 3, 4, 2, 2, 3, 4, 5, 6, 7]
    assert batch.targets.tolist() == [5, 6, 7, 4, 5, 6, 8, 9, 5, 6]
    assert batch.response_lengths.tolist() == [3, 1, 4, 2]


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(sequences)
def test_shared_tokens_are_laid_out_once(inputs: list[list[int]]) -> None:
    arrays = [np.array(tokens, np.int32) for tokens in inputs]
    tokens, lengths, parents, places = lay_out_shared(arrays)
    assert len(tokens) == sum(lengths) == len({tuple(each[: n + 1]) for each in inputs for n in range(len(each))})
    ends = np.cumsum(lengths)
    for own, place in zip(inputs, places, strict=True):
        assert tokens[place].tolist() == own
        # What its last token sees, by the segments' parents, is the sequence itself.
        segment, seen = int(np.searchsorted(ends, place[-1], side="right")), list[int]()
        last = int(place[-1])
        while segment >= 0:
            seen = [*range(int(ends[segment]) - lengths[segment], last + 1), *seen]
            segment = parents[segment]
            last = int(ends[segment]) - 1
        assert seen == place.tolist()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=40), st.integers(1, 4))
def test_bundles_hold_every_sequence_once_within_the_budget(shapes: list[tuple[int, int]], ranks: int) -> None:
    prompts = [np.arange(kind, kind + 3, dtype=np.int32) for kind, _ in shapes]
    responses = [np.full(length, 10 + i, np.int32) for i, (_, length) in enumerate(shapes)]
    bundles, lengths = bundles_of(prompts, responses, budget_tokens=40, ranks=ranks)
    assert sorted(i for bundle in bundles for i in bundle) == list(range(len(shapes)))
    for bundle, length in zip(bundles, lengths, strict=True):
        assert len({int(prompts[i][0]) for i in bundle}) == 1
        assert length == len(prompts[bundle[0]]) + sum(len(responses[i]) - 1 for i in bundle)
        assert length <= 40 or len(bundle) == 1


FORKS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9), min_size=1, max_size=9)


@given(FORKS, st.integers(4, 30))
def test_a_tree_is_cut_where_that_repeats_the_fewest_tokens(responses: list[list[int]], budget: int) -> None:
    prompt = np.array([7, 8, 9], np.int32)
    arrays = [np.array(tokens, np.int32) for tokens in responses]
    inputs = [np.concatenate((prompt, tokens[:-1])) for tokens in arrays]
    bundles, lengths = bundles_of([prompt] * len(arrays), arrays, budget_tokens=budget, ranks=1)
    for bundle, length in zip(bundles, lengths, strict=True):
        assert length == len(lay_out_shared([inputs[i] for i in bundle])[0])
        assert length <= budget or len(bundle) == 1
    order = depth_first(inputs)
    fewest = min(
        tokens
        for cuts in product((False, True), repeat=len(order) - 1)
        if (tokens := _tokens_of(cuts, [inputs[i] for i in order], budget)) is not None
    )
    assert (sum(lengths), len(lengths)) == fewest


def _tokens_of(cuts: Sequence[bool], inputs: list[np.ndarray], budget: int) -> tuple[int, int] | None:
    """Tokens and number of the pieces, by layout; None if one is too large."""
    borders = [0, *(at for at, cut in enumerate(cuts, 1) if cut), len(inputs)]
    pieces = [inputs[a:b] for a, b in pairwise(borders)]
    sizes = [len(lay_out_shared(piece)[0]) for piece in pieces]
    fits = all(size <= budget or len(piece) == 1 for size, piece in zip(sizes, pieces, strict=True))
    return (sum(sizes), len(pieces)) if fits else None


def test_turns_whose_prompts_continue_each_other_are_one_tree() -> None:
    first = np.array([1, 2, 3], np.int32)
    answer, second = np.array([4, 5, 6], np.int32), np.array([1, 2, 3, 4, 5, 6, 30, 31], np.int32)
    other = np.array([1, 2, 9, 9], np.int32)  # begins as the others do, and is a prompt of its own
    prompts, responses = [first, second, other, second], [answer, answer + 10, answer, answer + 20]
    bundles, lengths = bundles_of(prompts, responses, budget_tokens=100, ranks=1)
    assert (bundles, lengths) == ([[0, 1, 3], [2]], [8 + 2 + 2, 4 + 2])


def test_a_rank_without_work_has_a_token_that_predicts_nothing() -> None:
    batch = build_micro_batch([], PROMPTS, RESPONSES)
    assert (batch.tokens.size, batch.rows.size, batch.lengths) == (1, 0, (1,))
