"""Tensors to pieces of one buffer and back: the bytes are those of `pack`, whatever the sizes; and what is held."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.checksum import BLOCK_BYTES
from models.manifest import WeightsManifest
from models.pieces import HOST, PieceSums, Scatter, in_pieces, to_host
from models.weights import pack, pack_each

Shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)
KINDS = (torch.float32, torch.bfloat16)


def named(shapes: list[list[int]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"{i}": torch.randn(shape, generator=generator).to(KINDS[i % 2]) for i, shape in enumerate(shapes)}


def pieces_of(tensors: dict[str, torch.Tensor], manifest: WeightsManifest, piece_bytes: int) -> list[torch.Tensor]:
    made = in_pieces(manifest.tensors, manifest.total_bytes, tensors.items(), HOST, piece_bytes=piece_bytes)
    return [piece.clone() for piece in made]


@given(Shapes, st.sampled_from([64, 128, 192, 4096]))
def test_pieces_are_the_packed_buffer_and_scatter_into_the_same_tensors(shapes: list[list[int]], size: int) -> None:
    tensors = named(shapes)
    manifest, buffer = pack(tensors, version=1)
    pieces = pieces_of(tensors, manifest, size)
    assert all(piece.numel() == size for piece in pieces[:-1])
    assert np.array_equal(torch.cat(pieces).numpy() if pieces else np.zeros(0, np.uint8), buffer)
    targets = {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}
    scatter = Scatter(manifest.tensors, targets)
    for piece in pieces:
        scatter.take(piece)
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())


def test_scattered_into_rows_of_a_fused_parameter() -> None:
    tensors = {"q": torch.randn(8, 6), "k": torch.randn(4, 6), "norm": torch.randn(3)}
    manifest, _ = pack(tensors, version=1)
    fused, norm = torch.zeros(12, 6), torch.zeros(3)
    scatter = Scatter(manifest.tensors, {"q": fused[:8], "k": fused[8:], "norm": norm})
    for piece in pieces_of(tensors, manifest, 64):
        scatter.take(piece)
    assert torch.equal(fused, torch.cat([tensors["q"], tensors["k"]]))
    assert torch.equal(norm, tensors["norm"])


def test_other_tensors_than_were_laid_out_are_refused() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2)}
    manifest, _ = pack(tensors, version=1)
    for others in ({"a": torch.zeros(4)}, {"a": torch.zeros(5), "b": torch.zeros(2)}, tensors | {"c": torch.zeros(1)}):
        with pytest.raises(ValueError, match=r"did not come|where"):
            pieces_of(others, manifest, 64)
    with pytest.raises(ValueError, match=r"a is torch.bfloat16"):
        Scatter(manifest.tensors, {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match="not in one piece"):
        Scatter(manifest.tensors, {"a": torch.zeros(8)[::2], "b": torch.zeros(2)})


def test_two_pieces_exist_at_a_time_and_no_tensor_outlives_the_next() -> None:
    manifest, expected = pack({f"{i}": torch.full((1000,), float(i)) for i in range(40)}, version=1)
    alive: list[int] = []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        import weakref

        known: list[weakref.ref[torch.Tensor]] = []
        for i in range(40):
            alive.append(sum(ref() is not None for ref in known))
            tensor = torch.full((1000,), float(i))
            known.append(weakref.ref(tensor))
            yield f"{i}", tensor
            del tensor

    places = set()
    sums, out = PieceSums(), np.zeros(manifest.total_bytes, np.uint8)
    staged = [torch.empty(BLOCK_BYTES, dtype=torch.uint8) for _ in range(2)]

    def watched() -> Iterator[torch.Tensor]:
        made = in_pieces(
            manifest.tensors, manifest.total_bytes, one_by_one(), HOST, into=staged, piece_bytes=BLOCK_BYTES
        )
        for piece in made:
            places.add(piece.data_ptr())
            sums.add(piece)
            yield piece

    to_host(watched(), out, HOST)
    assert np.array_equal(out, expected)
    assert sums.value() == manifest.checksum
    assert places == {room.data_ptr() for room in staged}
    assert max(alive) == 0


def test_packed_one_by_one_on_the_host_without_another_copy() -> None:
    tensors = named([[64, 64], [3], [128, 2]])
    manifest, buffer = pack(tensors, version=3)
    out = np.full(buffer.size, 255, np.uint8)
    again, same = pack_each(manifest.tensors, manifest.total_bytes, tensors.items(), 3, out=out)
    assert same is out
    assert again == manifest
    assert np.array_equal(out, buffer)
