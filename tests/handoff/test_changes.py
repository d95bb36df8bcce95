"""Broadcasts of what changed: the engines' tensors are bitwise those of a full hand-over, or everything is sent."""

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.handoff import receive, send
from actors.handoff.changes import Changer, PieceLayout, encode
from actors.handoff.receive import Receiver
from contracts.handoff import HandOffError, Received, Sent, Way
from models.checksum import BLOCK_BYTES
from models.dtypes import DTYPES
from models.manifest import WeightsManifest, lay_out
from models.weights import pack
from tests.handoff.tools import Meeting, equal, like

KINDS = ("float32", "bfloat16", "int8", "uint8", "float8_e4m3fn")


@pytest.fixture(autouse=True)
def small_pieces_and_little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", BLOCK_BYTES)
    for module in (send, receive):
        monkeypatch.setattr(module, "COME_S", 10.0)
        monkeypatch.setattr(module, "PATIENCE_S", 10.0)


def bits(size: int, random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8))


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 60), max_size=2).map(tuple)), max_size=6),
    st.sampled_from([0.0, 0.0003, 0.01, 0.2, 0.6, 1.0]),
    st.sampled_from([64, 128, 4096]),
    st.integers(0, 2**32),
)
def test_changes_lead_from_any_bits_to_any_others(
    shapes: list[tuple[str, tuple[int, ...]]], share: float, piece: int, seed: int
) -> None:
    """NaN and -0.0 included, over pieces that end within tensors; and no body is larger than its piece."""
    random = np.random.default_rng(seed)
    specs, total = lay_out((f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(shapes))
    layout, old = PieceLayout(specs, total, piece), torch.zeros(total, dtype=torch.uint8)
    new = old.clone()
    targets = {}
    for spec in specs:
        item = torch.empty((), dtype=DTYPES[spec.dtype]).element_size()
        count = int(np.prod(spec.shape))
        was = bits(count * item, random)
        now = was.view(count, item).clone()
        hit = torch.from_numpy(random.random(count) < share)
        now[hit] ^= 1 + bits(int(hit.sum()) * item, random).view(-1, item) % 255
        for buffer, values in ((old, was), (new, now.view(-1))):
            buffer[spec.offset_bytes : spec.offset_bytes + count * item] = values
        targets[spec.name] = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        targets[spec.name].view(-1).view(torch.uint8).copy_(was)
    changer = Changer(layout, targets)
    for number in range(layout.pieces):
        was, now = (buffer[number * piece : (number + 1) * piece] for buffer in (old, new))
        header, body = encode(layout, number, was, now)
        flat = header.view(-1).view(torch.uint8)
        assert changer.header_bytes(number) == flat.numel()
        assert changer.body_bytes(number, flat) == body.numel() <= now.numel()
        changer.take(number, flat, body)
    made = torch.zeros(total, dtype=torch.uint8)
    for spec in specs:
        flat = targets[spec.name].reshape(-1).view(torch.uint8)
        made[spec.offset_bytes : spec.offset_bytes + flat.numel()] = flat
    assert torch.equal(made, new)


@given(st.data())
def test_a_damaged_header_or_position_is_refused_or_found_by_the_checksum(data: st.DataObject) -> None:
    specs, total = lay_out([("a", "bfloat16", (500,)), ("b", "int8", (900,))])
    random = np.random.default_rng(3)
    layout, old = PieceLayout(specs, total, 2048), torch.zeros(total, dtype=torch.uint8)
    new = old.clone()
    new[torch.from_numpy(random.integers(0, 1000, 30))] = 5
    header, body = encode(layout, 0, old[:2048], new[:2048])
    flat = header.view(-1).view(torch.uint8).clone()

    def checksum(header: Tensor, body: Tensor) -> int:
        targets = {"a": torch.zeros(500, dtype=torch.bfloat16), "b": torch.zeros(900, dtype=torch.int8)}
        changer = Changer(layout, targets)
        changer.take(0, header, body[: changer.body_bytes(0, header)])
        return changer.checksum()

    good = checksum(flat, body)
    room = flat if data.draw(st.booleans()) else body
    room[data.draw(st.integers(0, room.numel() - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(HandOffError):
        assert checksum(flat, torch.cat([body, body.new_zeros(2048)])) != good


def chain(links: int) -> list[dict[str, Tensor]]:
    """Weights of two dtypes, over several pieces, of which a few elements change from one to the next."""
    random = torch.Generator().manual_seed(2)
    first = {
        "w": torch.randn(300, 400, generator=random).bfloat16(),
        "q": torch.randint(-128, 128, (200, 333), generator=random).to(torch.int8),
        "scale": torch.rand(200, generator=random),
        "still": torch.randn(40_000, generator=random),
    }
    found = [first]
    for _ in range(links):
        new = {name: tensor.clone() for name, tensor in found[-1].items()}
        for name in ("w", "q", "scale"):
            flat = new[name].view(-1)
            at = torch.randint(0, flat.numel(), (60,), generator=random)
            flat[at] = flat[at] + 1
        found.append(new)
    return found


def manifest_of(weights: dict[str, Tensor], version: int) -> WeightsManifest:
    return pack(weights, version)[0]


def bits_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in wanted.items())


class Engines:
    """Receivers with their live tensors, and the manifests of what those hold."""

    def __init__(self, meeting: Meeting, weights: dict[str, Tensor], count: int = 2, way: Way = "broadcast") -> None:
        self.meeting, self.way = meeting, way
        self.receivers: list[Receiver] = [meeting.receiver() for _ in range(count)]
        self.targets = [{name: torch.zeros_like(tensor) for name, tensor in weights.items()} for _ in range(count)]
        self.held: list[WeightsManifest | None] = [None] * count

    def take(self, weights: dict[str, Tensor], version: int) -> tuple[Sent, list[Any]]:
        receivers: list[Receiver | None] = list(self.receivers)
        (sent, *_), got = self.meeting.hand_over(weights, receivers, self.way, self.targets, held=self.held)
        assert sent is not None
        whole = [isinstance(result, Received) for result in got]
        self.held = [manifest_of(weights, version) if came else None for came in whole]
        return sent, got


WAYS: list[Way] = ["broadcast", "ipc"]


@pytest.mark.parametrize("way", WAYS)
def test_a_chain_of_changes_is_bitwise_the_last_weights_for_a_few_bytes(way: Way) -> None:
    links = chain(3)
    engines = Engines(Meeting(), links[0], way=way)
    for version, weights in enumerate(links):
        sent, got = engines.take(weights, version)
        checksum = manifest_of(weights, version).checksum
        assert got == [Received(checksum, "delta" if version else way)] * 2
        assert all(bits_equal(targets, weights) for targets in engines.targets)
        assert sent.whole == ""
        assert (sent.delta_bytes > 0) == (version > 0)
        if version:
            assert sent.delta_bytes < sent.total_bytes / 100
            assert sent.changed == pytest.approx(178 / 227_000, rel=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_one_that_holds_something_else_gets_everything_and_the_next_time_the_changes(way: Way) -> None:
    """Stale weights, weights in another order, and an engine that has just joined."""
    links = chain(5)
    engines = Engines(Meeting(), links[0], way=way)
    engines.take(links[0], 0)
    engines.held[1] = manifest_of(links[3], 0)  # others of the same version
    sent, got = engines.take(links[1], 1)
    assert "engine 1 does not hold the weights that were sent before" in sent.whole
    assert {result.way for result in got} == {way}
    assert sent.delta_bytes == 0
    sent, got = engines.take(links[2], 2)
    assert (sent.whole, {result.way for result in got}) == ("", {"delta"})
    joined = Engines(engines.meeting, links[0], 1, way)
    engines.receivers += joined.receivers
    engines.targets += joined.targets
    engines.held.append(None)
    sent, _ = engines.take(links[3], 3)
    assert "engine 2" in sent.whole
    # one that missed this hand-over took the buffer from the store
    sent, got = engines.take(links[4], 4)
    assert {result.way for result in got} == {"delta"}
    assert all(bits_equal(targets, links[4]) for targets in engines.targets)


def test_each_rank_sends_changes_to_those_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on GPUs of their own; on rank 1's an engine that has just joined, so that device gets everything, and
    an engine on neither, to which rank 0 broadcasts changes. Then rank 0 alone has nobody."""
    places: dict[str, str] = {}
    for module in (send, receive):
        monkeypatch.setattr(module, "place_of", lambda _: places[threading.current_thread().name])
    places |= {"rank 0": "a", "rank 1": "b", "receiver 0": "a", "receiver 1": "b", "receiver 2": "c"}
    links, meeting = chain(4), Meeting(ranks=2)
    engines = Engines(meeting, links[0], 3, way="auto")
    _, got = engines.take(links[0], 0)
    assert [result.way for result in got] == ["ipc", "ipc", "broadcast"]
    sent, got = engines.take(links[1], 1)
    assert ([result.way for result in got], sent.whole) == (["delta"] * 3, "")
    engines.held[1] = None
    sent, got = engines.take(links[2], 2)
    assert [result.way for result in got] == ["delta", "ipc", "delta"]
    assert "engine 1 does not hold" in sent.whole
    assert all(bits_equal(targets, links[2]) for targets in engines.targets)
    places |= {"receiver 0": "b", "receiver 2": "b"}
    _, got = engines.take(links[3], 3)
    assert [result.way for result in got] == ["delta"] * 3  # rank 1 holds what was sent to one engine only
    sent, got = engines.take(links[4], 4)
    assert ([result.way for result in got], sent.whole) == (["delta"] * 3, "")
    assert 0 < sent.delta_bytes < sent.total_bytes / 100, "as rank 1 tells"
    assert all(bits_equal(targets, links[4]) for targets in engines.targets)


def test_another_layout_and_a_new_sender_have_no_base() -> None:
    links, meeting = chain(2), Meeting()
    engines = Engines(meeting, links[0])
    engines.take(links[0], 0)
    wider = {name: tensor.float() for name, tensor in links[1].items()}
    (sent,), _ = meeting.hand_over(wider, list(engines.receivers), "broadcast", [like(wider)] * 2, held=engines.held)
    assert isinstance(sent, Sent)
    assert sent.delta_bytes == 0
    sent, _ = engines.take(links[2], 2)
    assert sent.delta_bytes == 0


def test_tensors_that_are_not_what_was_said_are_found_by_the_checksum() -> None:
    """As by a flipped bit in an engine's memory: it wants everything, and the others have theirs."""
    links = chain(2)
    engines = Engines(Meeting(), links[0])
    engines.take(links[0], 0)
    engines.targets[0]["still"].view(torch.uint8)[77] ^= 4
    _, got = engines.take(links[1], 1)
    assert isinstance(got[0], HandOffError)
    assert got[0].began
    assert "checksum" in str(got[0])
    assert got[1] == Received(manifest_of(links[1], 1).checksum, "delta")
    assert bits_equal(engines.targets[1], links[1])


def test_changes_that_are_damaged_on_the_way_cost_that_engine_a_whole_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    links = chain(1)
    engines = Engines(Meeting(), links[0])
    engines.take(links[0], 0)
    take = Changer.take

    def damaged(self: Changer, number: int, header: Tensor, body: Tensor) -> None:
        if threading.current_thread().name == "receiver 0" and body.numel():
            body = body.clone()
            body[-1] ^= 1
        take(self, number, header, body)

    monkeypatch.setattr(Changer, "take", damaged)
    _, got = engines.take(links[1], 1)
    assert isinstance(got[0], HandOffError)
    assert isinstance(got[1], Received)
    assert bits_equal(engines.targets[1], links[1])


def test_without_memory_for_a_copy_everything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    links = chain(1)
    engines = Engines(Meeting(), links[0])
    empty, total = torch.empty, manifest_of(links[0], 0).total_bytes

    def full(*size: Any, **options: Any) -> Tensor:
        if size == (total,):
            raise torch.OutOfMemoryError("the device is full")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", full)
    for version in range(2):
        sent, got = engines.take(links[version], version)
        assert "no memory for a copy of" in sent.whole
        assert {result.way for result in got} == {"broadcast"}
    assert all(equal(targets, links[1]) for targets in engines.targets)
