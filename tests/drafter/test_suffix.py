"""The suffix drafter as an engine drives it: catching up late, siblings, other workers, files."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.speculation import SuffixOptions
from config.strategy import Strategy
from drafter.protocol import BatchView
from drafter.suffix import SuffixDrafter
from tests.native import needs_suffixes

pytestmark = needs_suffixes
SLOTS, MAX_TOKENS = 4, 64
PROMPT = np.array([90, 91, 92, 93, 94], np.int32)
RESPONSE = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], np.int32)
CHAIN = Strategy("suffix", 4)


class Engine:
    """The part of an engine that a drafter sees."""

    def __init__(self, **options: Any) -> None:
        self.drafter = SuffixDrafter(SuffixOptions(**options), SLOTS, MAX_TOKENS)
        self.history = np.zeros((SLOTS, MAX_TOKENS), np.int32)
        self.lengths: dict[int, int] = {}
        self.prompts: dict[int, int] = {}

    def begin(self, slot: int, prompt: np.ndarray = PROMPT, response: np.ndarray = RESPONSE[:0]) -> None:
        self.drafter.begin(slot, prompt, response)
        self.lengths[slot] = self.prompts[slot] = 0
        self.sample(slot, prompt)
        self.prompts[slot] = len(prompt)
        self.sample(slot, response)

    def sample(self, slot: int, tokens: np.ndarray) -> None:
        at = self.lengths[slot]
        self.history[slot, at : at + len(tokens)] = tokens
        self.lengths[slot] += len(tokens)

    def end(self, slot: int, finished: bool = True) -> None:
        length = self.lengths.pop(slot)
        self.drafter.end(slot, self.history[slot, :length].copy(), self.prompts[slot], finished)
        self.history[slot] = -1

    def drafts(self, strategy: Strategy = CHAIN, room: int = 99) -> dict[int, list[int]]:
        slots = np.array(list(self.lengths), np.int64)
        count = len(slots)
        batch = BatchView(
            request_ids=slots,
            prompt_ids=slots,
            slots=slots,
            history=self.history,
            lengths=np.array(list(self.lengths.values()), np.int64),
            prompt_lengths=np.array([self.prompts[int(slot)] for slot in slots], np.int64),
            noise_keys=slots,
            temperatures=np.ones(count, np.float32),
            vocab_size=100,
            top_k=np.zeros(count, np.int64),
            top_p=np.ones(count, np.float32),
            room=np.full(count, room, np.int64),
        )
        found = self.drafter.propose(batch, strategy)
        assert (found.parents is None) == (not strategy.is_tree)
        assert found.tokens.shape == (count, strategy.tokens_to_verify)
        return {int(slot): found.tokens[r, : found.counts[r]].tolist() for r, slot in enumerate(slots)}

    def rollout(self, response: np.ndarray = RESPONSE, prompt: np.ndarray = PROMPT) -> None:
        self.begin(0, prompt)
        self.sample(0, response)
        self.end(0)


def test_a_finished_rollout_drafts_for_running_siblings_and_later_ones() -> None:
    engine = Engine()
    engine.begin(1)
    engine.begin(2, np.array([80, 81], np.int32))  # another problem
    assert engine.drafts() == {1: [], 2: []}
    engine.begin(0)
    engine.sample(0, RESPONSE)
    engine.end(0)
    assert engine.drafts() == {1: [1, 2, 3, 4], 2: []}
    engine.sample(1, RESPONSE[:6])
    assert engine.drafts()[1] == [7, 8, 9, 10]
    assert engine.drafts(room=2)[1] == [7, 8]
    assert engine.drafts(room=0)[1] == []


def test_an_unfinished_request_leaves_nothing_and_comes_back_with_what_it_had() -> None:
    engine = Engine()
    engine.begin(0)
    engine.sample(0, RESPONSE)
    assert engine.drafts() == {0: []}
    engine.end(0, finished=False)
    assert engine.drafter.problems == 0
    engine.begin(3, response=np.concatenate((RESPONSE, RESPONSE[:3])))
    assert engine.drafts() == {3: [4, 5, 6, 7]}


def test_the_prompt_and_the_own_text_are_searched_without_any_window() -> None:
    engine = Engine()
    engine.begin(0)
    engine.sample(0, PROMPT[:3])
    assert engine.drafts()[0] == [93, 94, 90, 91]
    engine.sample(0, PROMPT[3:4])
    assert engine.drafts()[0] == [94, 90, 91, 92]


def test_catching_up_late_drafts_as_catching_up_at_every_step() -> None:
    rng = np.random.default_rng(0)
    eager, late = Engine(), Engine()
    for engine in (eager, late):
        for _ in range(3):
            engine.rollout(RESPONSE)
        engine.begin(1)
    for _ in range(12):
        tokens = rng.choice(RESPONSE, 4).astype(np.int32)
        for token in tokens:
            for engine in (eager, late):
                engine.sample(1, np.array([token]))
            eager.drafts()
        assert eager.drafts() == late.drafts()


def test_trees_hold_the_alternatives_most_probable_first() -> None:
    engine = Engine()
    for last in (50, 60, 60):
        engine.rollout(np.array([1, 2, 3, last, last + 1, last + 2], np.int32))
    engine.begin(1)
    engine.sample(1, RESPONSE[:3])
    drafts = engine.drafts(Strategy("suffix", 3, 2, 6))
    assert drafts[1][:3] == [60, 61, 62]
    assert sorted(drafts[1][3:]) == [50, 51, 52]


def test_rollouts_of_other_workers_and_a_window_that_slides() -> None:
    engine = Engine(window_bytes=1 << 16)
    engine.drafter.remember([PROMPT], [RESPONSE])
    engine.begin(1)
    engine.sample(1, RESPONSE[:2])
    assert engine.drafts()[1] == [3, 4, 5, 6]
    rollouts = (1 << 16) // (128 + 10 * len(RESPONSE))
    before = engine.drafter.bytes
    engine.drafter.remember([PROMPT] * rollouts, [RESPONSE + 20 * i for i in range(1, rollouts + 1)])
    assert engine.drafts()[1] == [3, 4, 5, 6]  # of the pool
    # The pool gains them, the window some of them.
    assert before + rollouts * (128 + 10 * len(RESPONSE)) < engine.drafter.bytes < before + 3 * (1 << 16)


def test_without_the_pool_a_problem_drafts_from_its_own_window_only() -> None:
    engine = Engine(window_bytes=1 << 16, pool=False)
    engine.drafter.remember([PROMPT], [RESPONSE])
    other = np.array([80, 81], np.int32)
    engine.begin(1)
    engine.begin(2, other)
    for slot in (1, 2):
        engine.sample(slot, RESPONSE[:2])
    assert engine.drafts() == {1: [3, 4, 5, 6], 2: []}
    rollouts = (1 << 16) // (128 + 10 * len(RESPONSE))
    engine.drafter.remember([PROMPT] * rollouts, [RESPONSE + 20 * i for i in range(1, rollouts + 1)])
    assert engine.drafts()[1] == []  # it has left the window, and nothing else knows it


def test_newer_rollouts_outweigh_older_ones() -> None:
    def first_draft(decay: float) -> list[int]:
        engine = Engine(version_decay=decay)
        for _ in range(2):
            engine.rollout(np.array([1, 2, 3, 30, 31], np.int32))
        for version in range(1, 5):
            engine.drafter.new_target(version)
        engine.rollout(np.array([1, 2, 3, 40, 41], np.int32))
        engine.begin(1)
        engine.sample(1, RESPONSE[:3])
        return engine.drafts()[1][:1]

    assert first_draft(1.0) == [30]
    assert first_draft(0.5) == [40]


def test_saved_windows_return_and_unreadable_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, other = Engine(), Engine()
    with caplog.at_level(logging.WARNING):
        other.drafter.load(str(tmp_path))
    assert "starts empty" in caplog.text
    engine.rollout()
    engine.drafter.save(str(tmp_path))
    other.drafter.load(str(tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        other.drafter.load(str(tmp_path))
    assert str(file) in caplog.text
    other.begin(1)
    assert other.drafts()[1] == RESPONSE[:4].tolist()


def test_rollouts_behind_a_loaded_index_are_as_old_as_the_weights(tmp_path: Path) -> None:
    """Saved at version 50: what is sampled next, with the weights of version 50, is not fifty versions old."""
    engine, other = Engine(version_decay=0.5), Engine(version_decay=0.5)
    engine.drafter.new_target(50)
    for _ in range(2):
        engine.rollout(np.array([1, 2, 3, 30, 31], np.int32))
    engine.drafter.save(str(tmp_path))
    other.drafter.load(str(tmp_path))
    for _ in range(3):
        other.rollout(np.array([1, 2, 3, 40, 41], np.int32))
    other.begin(1)
    other.sample(1, RESPONSE[:3])
    assert other.drafts()[1][:1] == [40]


def test_a_history_of_another_shape_or_an_unknown_slot_is_refused() -> None:
    engine = Engine()
    engine.begin(0)
    engine.lengths[1], engine.prompts[1] = 3, 2
    with pytest.raises(ValueError, match="without a request"):
        engine.drafts()
    engine.history = engine.history[:, :32].copy()
    with pytest.raises(ValueError, match="was made for"):
        engine.drafts()


def test_a_sibling_under_way_drafts_for_the_others_until_it_ends() -> None:
    engine, without = Engine(), Engine(siblings=False)
    for one in (engine, without):
        one.begin(0)
        one.begin(1)
        one.begin(2, np.array([80, 81], np.int32))  # another problem
        one.sample(0, RESPONSE)
        one.sample(1, RESPONSE[:6])
        one.sample(2, RESPONSE[:6])
    assert engine.drafts() == {0: [], 1: [7, 8, 9, 10], 2: []}
    assert without.drafts() == {0: [], 1: [], 2: []}
    engine.sample(1, RESPONSE[6:9])
    engine.end(0, finished=False)
    assert engine.drafts()[1] == []
    assert engine.drafter.accepted_from() == {"running": 3}


def test_a_sibling_on_another_worker_is_heard_in_parts_and_drafts() -> None:
    engine = Engine()
    engine.begin(1)
    engine.sample(1, RESPONSE[:4])
    engine.drafter.hear(1, 77, 0, RESPONSE[:6])
    assert engine.drafts()[1] == [5, 6]
    engine.drafter.hear(1, 77, 8, RESPONSE[8:])  # tokens 6 and 7 are missing: nothing can be added
    assert engine.drafts()[1] == [5, 6]
    engine.drafter.hear(1, 77, 2, RESPONSE[2:])
    assert engine.drafts()[1] == [5, 6, 7, 8]
    engine.sample(1, np.array([5, 6, 50], np.int32))
    engine.end(1)
    assert engine.drafter.accepted_from() == {"elsewhere": 2}
    assert engine.drafter.live_bytes < 4096


def test_accepted_tokens_are_counted_where_the_longest_match_was_found() -> None:
    engine = Engine()
    engine.drafter.new_target(3)
    engine.rollout(RESPONSE)
    engine.begin(1)
    engine.sample(1, RESPONSE[:5])
    assert engine.drafts()[1] == [6, 7, 8, 9]
    engine.sample(1, RESPONSE[5:8])
    engine.drafts()
    assert engine.drafter.accepted_from() == {"finished": 3}
    engine.drafter.new_target(4)
    engine.sample(1, RESPONSE[8:10])
    engine.drafts()
    assert engine.drafter.accepted_from() == {"finished": 2}  # drafted before the weights were new
    engine.sample(1, RESPONSE[10:])
    engine.end(1)
    assert engine.drafter.accepted_from() == {"older": 2}
    assert engine.drafter.accepted_from() == {}


def test_what_is_heard_stays_within_the_bytes_of_one_problem() -> None:
    engine = Engine(window_bytes=1 << 16)
    engine.begin(0)
    for request in range(20):
        engine.drafter.hear(0, request, 0, np.arange(1, 1000, dtype=np.int32))
    assert 1 << 15 < engine.drafter.live_bytes < (1 << 16) + 4096


def test_siblings_that_add_nothing_rest_and_come_back_with_newer_weights() -> None:
    """Two requests repeat their own texts, which siblings cannot better; then one is ahead of the other."""
    engine = Engine()
    own = [np.arange(k, k + 3, dtype=np.int32) for k in (10, 20)]
    for _ in range(2100):
        for slot in (0, 1):
            engine.begin(slot)
            engine.sample(slot, np.tile(own[slot], 4))
        engine.drafts()
        for slot in (0, 1):
            engine.sample(slot, own[slot])
        for slot in (0, 1):
            engine.end(slot, finished=False)
    drafts, accepted, without = engine.drafter.sibling_gain()
    assert drafts == 256
    assert accepted == without > drafts

    def ahead() -> list[int]:
        engine.begin(2)
        engine.begin(3)
        engine.sample(2, RESPONSE)
        engine.sample(3, RESPONSE[:6])
        found = engine.drafts()[3]
        engine.end(2, finished=False)
        engine.end(3, finished=False)
        return found

    assert ahead() == []
    engine.drafter.new_target(7)
    assert ahead() == []
    engine.drafter.new_target(8)
    assert ahead() == [7, 8, 9, 10]
