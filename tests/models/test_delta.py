"""A delta and the buffer before it make the buffer after it, bit for bit, or the delta is refused."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.handoff.base import BaseWeights
from models import delta as deltas
from models.checksum import checksum
from models.delta import Bytes, DeltaError, Held, apply, changed_elements, encode, share_changed
from models.manifest import ITEM_BYTES, TensorSpec, WeightsManifest, lay_out

BITS = {  # -0.0, 0.0, quiet and signalling NaN, infinity: equal or unequal to themselves as numbers, and not as bits
    1: (0x00, 0x80, 0x7F, 0xFF),
    2: (0x0000, 0x8000, 0x7FC0, 0x7F81, 0xFFC0, 0x7F80),
    4: (0x00000000, 0x80000000, 0x7FC00000, 0x7F800001, 0xFFC00000, 0x7F800000),
}


def held(version: int, tensors: Sequence[TensorSpec], buffer: Bytes) -> Held:
    return Held(WeightsManifest(version, checksum(buffer), tuple(tensors), buffer.size), buffer)


def whole(old: Held, new: Held) -> Bytes:
    """A delta, however large."""
    found = encode(old, new, limit_bytes=1 << 40)
    assert found is not None
    return found


@st.composite
def chains(draw: st.DrawFn, links: int = 2) -> list[Held]:
    """Random tensors of all dtypes, and what random updates make of them."""
    shapes = st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 40), max_size=3).map(tuple)), max_size=5
    )
    tensors, total = lay_out((f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(draw(shapes)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    chain = [np.zeros(total, np.uint8)]
    for _ in range(links):
        buffer = chain[-1].copy()
        for spec in tensors:
            item = ITEM_BYTES[spec.dtype]
            view = buffer[spec.offset_bytes :][: int(np.prod(spec.shape)) * item].view(f"u{item}")
            hit = random.random(view.size) < draw(st.sampled_from((0, 0.001, 0.02, 0.2, 0.6, 1)))
            fresh = random.integers(0, 256, view.nbytes, dtype=np.uint8).view(view.dtype)
            special = random.choice(np.array(BITS[item], view.dtype), view.size)
            view[hit] = np.where(random.random(view.size) < 0.3, special, fresh)[hit]
        chain.append(buffer)
    return [held(version, tensors, buffer) for version, buffer in enumerate(chain)]


@given(chains(), st.integers(1, 300))
def test_a_chain_of_deltas_is_the_last_buffer_bit_for_bit(chain: list[Held], part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # parts that end within tensors
        patch.setattr(deltas, "PART_ELEMENTS", part)
        base = BaseWeights()
        base.keep(chain[0].manifest, chain[0].buffer)
        for old, new in pairwise(chain):
            before = old.buffer.copy()
            found = base.change(new.manifest, [whole(old, new)])
            assert found.tobytes() == new.buffer.tobytes()
            assert old.buffer.tobytes() == before.tobytes()  # whoever reads the last one still does
        late = BaseWeights()
        late.keep(chain[0].manifest, chain[0].buffer)
        at_once = late.change(chain[-1].manifest, [whole(old, new) for old, new in pairwise(chain)])
        assert at_once.tobytes() == chain[-1].buffer.tobytes()


@given(chains(3))
def test_a_lost_or_reordered_link_is_refused_and_what_was_held_stays(chain: list[Held]) -> None:
    base = BaseWeights()
    with pytest.raises(DeltaError, match="no weights are held"):
        base.change(chain[1].manifest, [whole(chain[0], chain[1])])
    base.keep(chain[0].manifest, chain[0].buffer)
    for lost in (1, 2):
        with pytest.raises(DeltaError, match=f"from version {lost}, held is version 0"):
            base.change(chain[lost + 1].manifest, [whole(chain[lost], chain[lost + 1])])
    with pytest.raises(DeltaError, match="to version 1 came, wanted is version 2"):
        base.change(chain[2].manifest, [whole(chain[0], chain[1])])
    assert base.version == 0
    for some in ([0, 2], [1, 0, 2], [0, 1, 1, 2], [1, 2]):
        with pytest.raises(DeltaError):
            base.change(chain[3].manifest, [whole(chain[i], chain[i + 1]) for i in some])
        assert base.version == 0
    for old, new in pairwise(chain):
        buffer = base.change(new.manifest, [whole(old, new)])
    assert buffer.tobytes() == chain[-1].buffer.tobytes()
    with pytest.raises(DeltaError, match="from version 0, held is version 3"):  # one that comes again
        base.change(chain[1].manifest, [whole(chain[0], chain[1])])


@given(chains(1), st.data())
def test_a_damaged_delta_never_passes_for_another_buffer(chain: list[Held], data: st.DataObject) -> None:
    old, new = chain
    found = whole(old, new)
    at, flip = data.draw(st.integers(0, found.size - 1)), data.draw(st.integers(1, 255))
    damaged = found.copy()
    damaged[at] ^= flip
    cut = found[: data.draw(st.integers(0, found.size - 1))].copy()
    for bad in (damaged, cut):
        base = BaseWeights()
        base.keep(old.manifest, old.buffer)
        try:
            buffer = base.change(new.manifest, [bad])
        except DeltaError:
            assert base.version == 0
        else:  # a bit that says nothing, as the last ones of a bitmap
            assert buffer.tobytes() == new.buffer.tobytes()


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.0007, 0.018, 0.12, 0.5, 1.0])
def test_a_delta_is_as_small_as_its_smallest_form(dtype: str, item: int, share: float) -> None:
    tensors, total = lay_out([("w", dtype, (1 << 18,))])
    random = np.random.default_rng(0)
    old = random.integers(0, 256, total, dtype=np.uint8)
    new = old.copy()
    words = new.view(f"u{item}")
    hit = np.flatnonzero(random.random(words.size) < share)
    words[hit] ^= 1
    found = whole(was := held(1, tensors, old), now := held(2, tensors, new))
    assert changed_elements(found) == hit.size
    gaps = np.diff(hit, prepend=-1) - 1
    forms = [(gaps // 255 + 1).sum(), 2 * (gaps // 65535 + 1).sum(), words.size // 8]
    best = min(int(min(forms)) + hit.size * item, words.nbytes) if hit.size else 0
    assert found.size == 8 * (8 + 4) + best
    assert encode(was, now, limit_bytes=found.size) is not None
    assert encode(was, now, limit_bytes=found.size - 1) is None


def test_other_layouts_have_no_delta_and_a_look_at_a_sample_is_enough_for_what_changed_all_over() -> None:
    tensors, total = lay_out([("w", "float32", (1 << 20,))])
    others, _ = lay_out([("v", "float32", (1 << 20,))])
    old, new = np.zeros(total, np.uint8), np.full(total, 7, np.uint8)
    assert encode(held(0, tensors, old), held(1, others, new), limit_bytes=1 << 40) is None
    assert share_changed(old, new) == 1.0
    assert share_changed(old, old) == 0.0
    new[:] = 0
    new[:2] = 1  # in a block that is looked at
    assert 0 < share_changed(old, new) < 0.001


def test_large_buffers_are_encoded_by_several_threads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, total = lay_out([("a", "bfloat16", (3, 1000)), ("b", "int8", (5000,))])
    random = np.random.default_rng(1)
    old = random.integers(0, 256, total, dtype=np.uint8)
    new = old.copy()
    new[random.integers(0, 11_000, 500)] ^= 3
    monkeypatch.setattr(deltas, "PART_ELEMENTS", 64)
    first = whole(held(1, tensors, old), held(2, tensors, new))
    monkeypatch.setattr(deltas, "_THREADS_FROM_BYTES", 0)
    assert whole(held(1, tensors, old), held(2, tensors, new)).tobytes() == first.tobytes()
    buffer = old.copy()
    apply(first, held(2, tensors, new).manifest, held(1, tensors, old).manifest, buffer)
    assert buffer.tobytes() == new.tobytes()
