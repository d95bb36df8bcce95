"""Readers of stop rules: whom they name is whom the law ends, however lazily they read, and both read alike."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.data.stop_strings import compile_marker
from actors.engine.batch.markers import NativeReader, PlainReader, StopReader
from actors.engine.batch.slots import SlotTable
from actors.engine.stopping import NOWHERE, Found, end_by_rule, kept, run
from contracts.rollout import Marker, Request, SamplingParams, StopRule
from models.ops.native import kernels
from tests.engine.test_stopping import PATTERNS, RULES, VOCABULARY

SLOTS, WIDTH = 4, 40
WITH_NATIVE = hasattr(kernels, "StopReader")


def readers(table: SlotTable, vocab_size: int) -> list[StopReader]:
    return [PlainReader(table), *([NativeReader(table, vocab_size)] if WITH_NATIVE else [])]


def complete(marker: Marker | None, tokens: list[int]) -> int:
    return NOWHERE if marker is None else run(marker, np.array(tokens, np.int32))[1]


@settings(deadline=None, max_examples=200)
@given(VOCABULARY, st.none() | PATTERNS, st.none() | PATTERNS, st.lists(RULES, min_size=1, max_size=3), st.data())
def test_a_reader_names_those_that_the_law_ends_at_every_length(
    vocabulary: list[bytes], strings: Any, answers: Any, rules: list[dict[str, Any]], data: st.DataObject
) -> None:
    markers = [None if texts is None else compile_marker(texts, vocabulary) for texts in (strings, answers)]
    table = SlotTable(SLOTS, WIDTH, 1)
    both = readers(table, len(vocabulary))
    running: dict[int, tuple[StopRule, int]] = {}
    token = st.integers(0, len(vocabulary) - 1)
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        if slot in running and data.draw(st.booleans()):
            del running[slot]
            for reader in both:
                reader.end(slot)
        elif slot not in running:
            rule = StopRule(strings=markers[0], answer=markers[1], **data.draw(st.sampled_from(rules)))
            prompt = data.draw(st.lists(token, min_size=1, max_size=4))
            key = data.draw(st.integers(0, 2**63 - 1))
            request = Request(
                request_id=slot,
                prompt_id=0,
                prompt_tokens=np.array(prompt, np.int32),
                noise_key=key,
                sampling=SamplingParams(30),
                stop=rule,
            )
            table.fill(slot, request, None, 0, len(prompt) + 30)
            running[slot] = rule, key
            for reader in both:
                reader.begin(slot, rule)
        for slot in running:  # as a step with drafts leaves them: none, one or several new tokens
            new = data.draw(st.lists(token, max_size=5))
            length = int(table.length[slot])
            new = new[: WIDTH - length]
            table.tokens[slot, length : length + len(new)] = new
            table.length[slot] += len(new)
        ending = set()
        for slot, (rule, key) in running.items():
            response = table.tokens[slot, table.prompt_length[slot] : table.length[slot]].tolist()
            found = Found(complete(rule.strings, response), complete(rule.answer, response))
            if end_by_rule(rule, key, found, len(response), None) is not None:
                ending.add(slot)
            if data.draw(st.booleans()):
                assert all(reader.found(slot) == found for reader in both)
        for reader in both:
            named = set(reader.look() or [])
            assert named >= ending
            for slot in named - ending:
                rule, key = running[slot]
                assert rule.give_up_at_tokens is not None
                assert kept(rule, key)
                reader.spare(slot)
            assert set(reader.look() or []) == ending
        for slot in ending:
            del running[slot]
            for reader in both:
                reader.end(slot)


@pytest.mark.skipif(not WITH_NATIVE, reason="needs the native extension")
def test_a_reader_takes_no_arrays_that_would_lead_it_astray() -> None:
    rows, moves = np.zeros(4, np.int32), np.zeros((1, 2), np.uint16)
    for wrong in ((rows + 1, moves), (rows, moves + 2), (rows.astype(np.int64), moves), (rows, moves[:, :1].T + 1)):
        with pytest.raises(ValueError, match=r"row|move|dtype"):
            kernels.StopMarker(*wrong)  # type: ignore[union-attr]
    reader = kernels.StopReader(SlotTable(2, 8, 1))  # type: ignore[union-attr]
    for call in (lambda: reader.end(2), lambda: reader.found(-1), lambda: reader.begin(5, None, None, 1, 0, 9)):
        with pytest.raises(ValueError, match="slot out of range"):
            call()
    reader.begin(1, kernels.StopMarker(rows, moves), None, 1, 0, 9)  # type: ignore[union-attr]
    reader.end(1)
    for call in (lambda: reader.found(0), lambda: reader.spare(0), lambda: reader.found(1), lambda: reader.spare(1)):
        with pytest.raises(ValueError, match="no request has begun in this slot"):
            call()
    reader.end(1)
    assert reader.look() is None


def test_tables_of_a_marker_outlive_the_batch_that_read_it_and_many_markers_do_not_pile_up() -> None:
    if not WITH_NATIVE:
        pytest.skip("needs the native extension")
    table = SlotTable(2, 8, 1)
    reader = NativeReader(table, 2)
    table.prompt_length[0] = table.length[0] = 1
    made = []
    for i in range(20):
        rule = StopRule(strings=compile_marker([b"a" * (i // 2 + 1)], [b"a", b"b"]))
        assert rule.strings is not None
        reader.begin(0, rule)
        made.append(reader._markers[rule.strings.key])
        reader.end(0)
    assert all(first is second for first, second in zip(made[::2], made[1::2], strict=True))
    assert len(reader._markers) == 8
