"""Weights in pieces from a learner's ranks to engines: who gets them how, and what a failure costs the others."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actors.handoff import receive, send
from actors.handoff.receive import Receiver
from actors.handoff.window import _STORAGE_DEVICE, Window, opened
from contracts.handoff import HandOffError, Received, Sent, Way
from models.checksum import BLOCK_BYTES
from models.pieces import HOST, PieceSums, Scatter
from models.weights import pack
from tests.handoff.tools import Meeting, equal, like, slow_down, some_weights


@pytest.fixture(autouse=True)
def small_pieces_and_little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", BLOCK_BYTES)
    for module in (send, receive):
        monkeypatch.setattr(module, "COME_S", 5.0)  # beside busy processes too
        monkeypatch.setattr(module, "PATIENCE_S", 5.0)


def began(result: object) -> bool:
    assert isinstance(result, HandOffError), result
    return result.began


@pytest.mark.parametrize("way", ["ipc", "broadcast", "auto"])
def test_everybody_holds_the_learners_weights_and_their_checksum(way: Way) -> None:
    weights = some_weights()
    meeting, targets = Meeting(), [like(weights) for _ in range(2)]
    (sent,), got = meeting.hand_over(weights, [meeting.receiver(), meeting.receiver()], way, targets)
    checksum, expected = pack(weights, 1)[0].checksum, "broadcast" if way == "broadcast" else "ipc"
    assert isinstance(sent, Sent)
    assert (sent.checksum, sent.ways) == (checksum, (expected, expected))
    assert got == [Received(checksum, expected)] * 2
    assert all(equal(target, weights) for target in targets)


def test_the_group_is_kept_while_its_members_stay_and_formed_anew_when_one_is_another() -> None:
    weights, meeting = some_weights(), Meeting()
    first, second, third = (meeting.receiver() for _ in range(3))
    names = []
    for receivers in ([first, second], [first, second], [first, third], [third]):
        targets = [like(weights) for _ in receivers]
        _, got = meeting.hand_over(weights, list(receivers), "broadcast", targets)
        assert all(isinstance(result, Received) for result in got)
        assert all(equal(target, weights) for target in targets)
        names.append(meeting.senders[0]._group.name)
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_each_engine_copies_from_the_rank_on_its_device_and_the_rest_get_a_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three engines, two ranks: two share a device with one rank each, the third with none."""
    devices = {"rank 0": "a", "rank 1": "b", "receiver 0": "b", "receiver 1": "a", "receiver 2": "c"}

    def place(device: torch.device) -> str:
        return devices[threading.current_thread().name]

    monkeypatch.setattr(send, "place_of", place)
    monkeypatch.setattr(receive, "place_of", place)
    weights, meeting = some_weights(), Meeting(ranks=2)
    gathering = threading.Barrier(2, timeout=10)  # both ranks are in every gather

    def gathered(rank: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            gathering.wait()
            yield name, tensor

    targets = [like(weights) for _ in range(3)]
    sent, got = meeting.hand_over(weights, [meeting.receiver() for _ in range(3)], "auto", targets, tensors=gathered)
    assert [isinstance(part, Sent) for part in sent] == [True, False]
    assert [result.way for result in got if isinstance(result, Received)] == ["ipc", "ipc", "broadcast"]
    assert all(equal(target, weights) for target in targets)


@pytest.mark.parametrize("way", ["ipc", "broadcast"])
def test_an_engine_that_does_not_come_is_left_out(way: Way) -> None:
    weights = some_weights()
    meeting, targets = Meeting(), [like(weights) for _ in range(2)]
    (sent,), got = meeting.hand_over(weights, [None, meeting.receiver()], way, targets)
    assert sent is not None
    assert "did not come" in sent.ways[0]
    assert isinstance(got[1], Received)
    assert equal(targets[1], weights)


def test_ipc_alone_leaves_out_an_engine_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "place_of", lambda device: "elsewhere")
    weights = some_weights()
    target = like(weights)
    meeting = Meeting()
    _, (got,) = meeting.hand_over(weights, [meeting.receiver()], "ipc", [target])
    assert not began(got)
    assert equal(target, like(weights))


def test_an_engine_that_stops_taking_pieces_costs_the_others_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = some_weights()
    take = Scatter.take

    def gives_up(self: Scatter, piece: Tensor) -> None:
        if threading.current_thread().name == "receiver 0" and self._at:
            raise HandOffError("out of order")
        take(self, piece)

    monkeypatch.setattr(Scatter, "take", gives_up)
    meeting, targets = Meeting(), [like(weights) for _ in range(2)]
    (sent,), got = meeting.hand_over(weights, [meeting.receiver(), meeting.receiver()], "ipc", targets)
    assert isinstance(sent, Sent)
    assert began(got[0])
    assert isinstance(got[1], Received)
    assert equal(targets[1], weights)


def test_a_piece_that_arrives_damaged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = PieceSums.add

    def added(self: PieceSums, piece: Tensor) -> None:
        if threading.current_thread().name == "receiver 0":
            piece = piece.clone()
            piece[5] ^= 1
        add(self, piece)

    monkeypatch.setattr(PieceSums, "add", added)
    weights = some_weights()
    meeting = Meeting()
    _, (got,) = meeting.hand_over(weights, [meeting.receiver()], "ipc", [like(weights)])
    assert began(got)
    assert "checksum" in str(got)


def test_other_names_shapes_and_dtypes_are_refused_before_anything_is_written() -> None:
    weights = some_weights()
    without = {name: tensor for name, tensor in like(weights).items() if name != "norm"}
    wider = like(weights) | {"extra": torch.zeros(3)}
    half = {name: tensor.bfloat16() for name, tensor in like(weights).items()}
    meeting = Meeting()
    _, got = meeting.hand_over(weights, [meeting.receiver() for _ in range(3)], "ipc", [without, wider, half])
    assert [began(result) for result in got] == [False, False, False]
    assert all(bool((tensor == 7).all()) for target in (without, half) for tensor in target.values())


@pytest.mark.parametrize("way", ["ipc", "broadcast"])
def test_an_engine_that_is_killed_in_the_middle_leaves_the_learner_whole_and_the_others_bounded(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "COME_S", 60.0)  # a child needs a moment to start
    weights, meeting = some_weights(), Meeting()
    manifest, _ = pack(weights, 1)
    terms = meeting.terms(2, way)
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.handoff.tools", meeting.address, terms.name, str(index)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for index in range(2)
    ]
    victim, other = children
    try:

        def kill() -> None:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "piece\n"
            os.kill(victim.pid, signal.SIGKILL)
            victim.wait(10)

        given = slow_down(iter(weights.items()), "down", kill)
        sent = meeting.senders[0].send(terms, (manifest.tensors, manifest.total_bytes), given)
        assert sent is not None
        assert sent.checksum == manifest.checksum
        assert next(given, None) is None  # the other ranks' gathers are done with
        said = other.communicate(timeout=60)[0].splitlines()[-1]
        if way == "ipc":
            assert said == "whole"
        else:
            assert said.startswith("failed True")
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_a_learner_that_is_killed_ends_the_wait_of_its_receivers() -> None:
    script = (
        "import os, sys, signal\n"
        "from actors.handoff import send\n"
        "from models.checksum import BLOCK_BYTES\n"
        "from models.weights import pack\n"
        "from tests.handoff.tools import Meeting, slow_down, some_weights\n"
        "send.PIECE_BYTES = BLOCK_BYTES\n"
        "meeting, weights = Meeting(), some_weights()\n"
        "manifest, _ = pack(weights, 1)\n"
        "terms = meeting.terms(1, sys.argv[1])\n"
        "print(meeting.address, terms.name, flush=True)\n"
        "end = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        "given = slow_down(iter(weights.items()), 'down', end)\n"
        "meeting.senders[0].send(terms, (manifest.tensors, manifest.total_bytes), given)\n"
    )
    weights = some_weights()
    manifest, _ = pack(weights, 1)
    for way in ("ipc", "broadcast"):
        learner = subprocess.Popen([sys.executable, "-c", script, way], stdout=subprocess.PIPE, text=True)
        assert learner.stdout is not None
        address, name = learner.stdout.readline().split()
        meeting = Meeting()
        meeting.address = address
        offer = replace(meeting.offer(meeting.terms(1), 0, manifest), name=name)
        with pytest.raises(HandOffError) as failed:
            Receiver(HOST).receive(offer, like(weights))
        assert failed.value.began
        learner.communicate(timeout=10)
        assert learner.returncode == -signal.SIGKILL


def test_a_store_that_nobody_holds_is_said_at_once() -> None:
    weights, meeting = some_weights(), Meeting()
    manifest, _ = pack(weights, 1)
    meeting.address = "127.0.0.1:1"
    with pytest.raises(HandOffError, match="not reachable"):
        Receiver(HOST).receive(meeting.offer(meeting.terms(1), 0, manifest), like(weights))


def test_a_window_is_seen_by_whoever_opened_it_and_leaves_no_file() -> None:
    window = Window(HOST, BLOCK_BYTES)
    exported = window.export()
    seen = opened(exported, HOST)
    window.pieces[1][3] = 9
    assert int(seen[BLOCK_BYTES + 3]) == 9
    window.close()
    assert not os.path.exists(exported)  # noqa: PTH110
    assert int(seen[BLOCK_BYTES + 3]) == 9
    with pytest.raises(HandOffError, match="cannot be opened"):
        opened(exported, HOST)
    descriptor, another = int(exported.rpartition("/")[2]), os.memfd_create("another")
    if another != descriptor:
        os.dup2(another, descriptor)
    with pytest.raises(HandOffError, match="something else has its descriptor"):
        opened(exported, HOST)
    for one in {another, descriptor}:
        os.close(one)


def test_a_learner_that_is_killed_leaves_no_memory_behind() -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    code = (
        "import os, signal, torch\n"
        "from actors.handoff.window import Window\n"
        "window = Window(torch.device('cpu'), 4096)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "window" in name}  # noqa: PTH208


def test_a_rank_without_memory_for_a_window_says_so_at_once_and_gathers_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("actors.handoff.window._take", full)
    weights, meeting = some_weights(), Meeting()
    target = like(weights)
    (sent,), (got,) = meeting.hand_over(weights, [meeting.receiver()], "ipc", [target])
    assert isinstance(sent, Sent)
    assert sent.checksum == pack(weights, 1)[0].checksum
    assert "No space left" in sent.ways[0]
    assert not began(got)
    assert "No space left" in str(got)
    assert equal(target, like(weights))


def test_torchs_handle_of_cuda_memory_has_the_device_where_we_change_it() -> None:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    assert list(inspect.signature(rebuild_cuda_tensor).parameters)[_STORAGE_DEVICE] == "storage_device"
