"""Drafts of the suffix index while windows are merged, and what it refuses."""

import threading

import numpy as np
import pytest

from tests.drafter.suffix_oracle import INDEX_BYTES, ROLLOUT_BYTES, TOKEN_BYTES
from tests.drafter.test_suffix_index import HANDLES, append, array, drafts, make, real_like


def test_drafts_go_on_while_windows_are_merged_in_the_background() -> None:
    rng = np.random.default_rng(8)
    limit = INDEX_BYTES + 8 * (ROLLOUT_BYTES + TOKEN_BYTES * 4001)  # with the prompt in front
    index = make(limit, 100_000, inline_tokens=0, handles=8)
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
    reference = make(limit, 100_000, handles=8)
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
    for limits in ({"window_bytes": 4095}, {"max_bytes": 4095}, {"pool_bytes": 4095}, {"handles": 0}):
        with pytest.raises(ValueError, match="at least 4096 bytes"):
            make(**limits)
    with pytest.raises(ValueError, match="bytes >= 0"):
        make(pool_bytes=-1)
