"""The flat weight buffer: round trip, alignment, zero copy, corruption."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.checksum import checksum
from models.manifest import ALIGNMENT_BYTES
from models.weights import WeightsCorruptError, pack, unpack

Shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)


@given(Shapes, st.data())
def test_round_trip(shapes: list[list[int]], data: st.DataObject) -> None:
    named = {
        f"tensor.{i}": torch.randn(shape).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
        for i, shape in enumerate(shapes)
    }
    manifest, buffer = pack(named, version=7)
    assert manifest.version == 7
    assert manifest.total_bytes == buffer.size
    assert all(spec.offset_bytes % ALIGNMENT_BYTES == 0 for spec in manifest.tensors)
    again = dict(unpack(manifest, buffer))
    assert list(again) == list(named)
    for name, tensor in named.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor)


def test_views_share_the_buffer_even_when_read_only() -> None:
    manifest, buffer = pack({"a": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, version=0)
    buffer.flags.writeable = False
    for spec, (_, tensor) in zip(manifest.tensors, unpack(manifest, buffer), strict=True):
        assert tensor.data_ptr() == buffer.ctypes.data + spec.offset_bytes


def test_strided_tensors_and_a_reused_buffer() -> None:
    matrix = torch.randn(6, 4)
    manifest, buffer = pack({"t": matrix.T, "rows": matrix[2:4]}, version=1)
    buffer[:] = 255  # the padding too
    again, same = pack({"t": matrix.T, "rows": matrix[2:4]}, version=2, out=buffer)
    assert same is buffer
    assert again.checksum == manifest.checksum
    assert torch.equal(dict(unpack(again, buffer))["t"], matrix.T)
    with pytest.raises(ValueError, match=r"must be uint8 \[128\]|must be uint8 \[192\]"):
        pack({"t": matrix.T, "rows": matrix[2:4]}, version=2, out=np.zeros(5, np.uint8))


@pytest.mark.parametrize("position", [0, 77, -1])
def test_one_flipped_bit_is_found(position: int) -> None:
    manifest, buffer = pack({"a": torch.randn(64), "b": torch.randn(3)}, version=5)
    buffer[position] ^= 1
    assert checksum(buffer) != manifest.checksum
    with pytest.raises(WeightsCorruptError, match="version 5: checksum"):
        unpack(manifest, buffer)
    assert len(list(unpack(manifest, buffer, verify=False))) == 2


def test_wrong_buffers_are_refused() -> None:
    manifest, buffer = pack({"a": torch.randn(64)}, version=5)
    with pytest.raises(WeightsCorruptError, match=r"uint8 \[192\], the manifest says uint8 \[256\]"):
        unpack(manifest, buffer[:-64])
    longer = dataclasses.replace(manifest.tensors[0], shape=(65,))
    with pytest.raises(WeightsCorruptError, match="a ends at byte 260"):
        dict(unpack(dataclasses.replace(manifest, tensors=(longer,)), buffer))
    with pytest.raises(TypeError, match="ids: weights travel as float32"):
        pack({"ids": torch.arange(3)}, version=0)
