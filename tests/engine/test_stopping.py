"""When a response ends: the law against text searched by Python, markers against text, and the coin."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from actors.data.errors import DataError
from actors.data.stop_strings import compile_marker, stop_strings, vocabulary_bytes
from actors.engine.stopping import NOWHERE, End, find_end, kept, run
from contracts.rollout import FinishReason, Request, SamplingParams, StopRule
from models.noise import noise_key
from models.philox import KEEP, philox4x32, uniform

TEXT = st.text("ab\n", min_size=1, max_size=4).map(str.encode)
VOCABULARY = st.lists(st.text("ab\n\u00e9", max_size=5).map(str.encode), min_size=2, max_size=12)
PATTERNS = st.lists(TEXT, min_size=1, max_size=3)


def first_with(patterns: list[bytes], vocabulary: list[bytes], tokens: list[int]) -> int:
    """The slow definition: decode after every token."""
    for count in range(1, len(tokens) + 1):
        text = b"".join(vocabulary[token] for token in tokens[:count])
        if any(pattern in text for pattern in patterns):
            return count
    return NOWHERE


@settings(deadline=None)
@given(VOCABULARY, PATTERNS, st.data())
def test_a_marker_is_found_with_the_token_that_completes_it(
    vocabulary: list[bytes], patterns: list[bytes], data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=30))
    marker = compile_marker(patterns, vocabulary)
    array = np.array(tokens, np.int32)
    assert run(marker, array)[1] == first_with(patterns, vocabulary, tokens)
    split = data.draw(st.integers(0, len(tokens)))
    state, before = run(marker, array[:split])
    after = run(marker, array[split:], state)[1]
    assert min(before, NOWHERE if after == NOWHERE else split + after) == run(marker, array)[1] or before != NOWHERE


RULES = st.fixed_dictionaries(
    {
        "poll_from_tokens": st.integers(1, 12),
        "grace_tokens": st.integers(0, 4),
        "give_up_at_tokens": st.none() | st.integers(1, 15),
        "keep": st.sampled_from([0.0, 0.3, 1.0]),
    }
)


def request_of(key: int, most: int, stops: tuple[int, ...], rule: StopRule | None = None) -> Request:
    return Request(
        request_id=0,
        prompt_id=0,
        prompt_tokens=np.zeros(1, np.int32),
        noise_key=key,
        sampling=SamplingParams(max_new_tokens=most, stop_token_ids=stops),
        stop=rule,
    )


def slow_end(
    request: Request, tokens: list[int], texts: tuple[Any, Any], vocabulary: list[bytes], most: int
) -> End | None:
    """Token by token, as a reader of the response would decide."""
    rule = request.stop
    assert rule is not None
    strings, answers = texts
    answered: int | None = None
    doubted = False
    for count, token in enumerate(tokens, start=1):
        text = b"".join(vocabulary[t] for t in tokens[:count])
        if answered is None and answers and any(a in text for a in answers):
            answered = count
        keep = rule.keep if doubted else 1.0
        if token in request.sampling.stop_token_ids or (strings and any(s in text for s in strings)):
            return End(count, FinishReason.STOP, keep)
        if answered is not None and count >= max(answered, rule.poll_from_tokens) + rule.grace_tokens:
            return End(count, FinishReason.ANSWERED, keep)
        if count == most:
            return End(count, FinishReason.LENGTH, keep)
        if count == rule.give_up_at_tokens and answered is None:
            if not kept(rule, request.noise_key):
                return End(count, FinishReason.GIVEN_UP, rule.keep)
            doubted = True
    return None


@settings(deadline=None, max_examples=300)
@given(VOCABULARY, st.none() | PATTERNS, st.none() | PATTERNS, RULES, st.integers(0, 2**63 - 1), st.data())
def test_a_response_ends_where_a_reader_of_its_text_would_end_it(
    vocabulary: list[bytes], strings: Any, answers: Any, rule: dict[str, Any], key: int, data: st.DataObject
) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1), min_size=1, max_size=20))
    most = data.draw(st.integers(1, 20))
    stops = tuple(data.draw(st.lists(st.integers(0, len(vocabulary) - 1), max_size=1)))
    markers = [None if texts is None else compile_marker(texts, vocabulary) for texts in (strings, answers)]
    request = request_of(key, most, stops, StopRule(strings=markers[0], answer=markers[1], **rule))
    wanted = slow_end(request, tokens, (strings, answers), vocabulary, most)
    for count in range(len(tokens) + 1):  # and nobody who sees a part of it says anything else
        found = find_end(request, np.array(tokens[:count], np.int32), most)
        assert found == (wanted if wanted is not None and wanted.tokens <= count else None)


def test_without_a_rule_only_stop_tokens_and_the_limit_end_a_response() -> None:
    request = request_of(1, 4, (7,))
    ends = [find_end(request, np.array(t, np.int32), 4) for t in ([], [1, 2], [1, 7], [1, 7, 3], [1, 2, 3, 4])]
    assert ends == [None, None, End(2, FinishReason.STOP), End(2, FinishReason.STOP), End(4, FinishReason.LENGTH)]


def test_the_coin_is_a_function_of_the_noise_key_and_falls_as_often_as_asked() -> None:
    keys = [noise_key(3, 0, i, 1) for i in range(4000)]
    rule = StopRule(give_up_at_tokens=5, keep=0.25)
    share = sum(kept(rule, key) for key in keys) / len(keys)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(keys)) ** 0.5
    key, mask = keys[0], 2**32 - 1
    words = philox4x32(
        tuple(torch.tensor(word) for word in (0, 0, KEEP, 0)), (torch.tensor(key & mask), torch.tensor(key >> 32))
    )
    assert uniform(key, KEEP) == (int(words[0]) + 0.5) / 2**32
    assert uniform(key - 2**64, KEEP) == uniform(key, KEEP)  # as the slot table holds it


TEXTS = ["Hello w\u00f6rld, \u6f22\u5b57 \U0001f600!\n\n", "<answer> 42 </answer>\n", "  a\tb  \u00e9\u00e8 </answer>."]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    pieces = [
        "<unk>",
        "<eos>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "</",
        "answer",
        ">",
        "\u2581a",
    ]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def wrapped(tokenizer: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token=None)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_bytes_of_a_responses_tokens_are_those_of_its_text(make: Any) -> None:
    tokenizer = wrapped(make())
    table = vocabulary_bytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(table[i] for i in ids) == text.encode()
        assert tokenizer.decode(ids) == text
    assert table[tokenizer.eos_token_id] == b"<eos>"
    marker = stop_strings(["</answer>", "<eos>"], tokenizer)
    ids = tokenizer.encode("<answer> 42 </answer>\n", add_special_tokens=False)
    text = ""
    for count, _ in enumerate(ids, start=1):
        if "</answer>" in (text := tokenizer.decode(ids[:count])):
            break
    assert "</answer>" in text
    assert run(marker, np.array(ids, np.int32))[1] == count
    assert run(marker, np.array([ids[0], tokenizer.eos_token_id], np.int32))[1] == 2


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused_by_key() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "<eos>": 2}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(DataError, match=r"rollout\.sampling\.stop_strings: .*WordPiece.*stop_token_ids"):
        stop_strings(["a"], wrapped(tokenizer))
