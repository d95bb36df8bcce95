"""How weights get on and off a GPU: two processes over CUDA IPC first, then what learner and engine hold and copy."""

import multiprocessing
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import tests.pretended
from actors.handoff import send
from actors.handoff.receive import Receiver
from actors.training.away import Away
from contracts.handoff import HandOffError, Received
from models.checkpoint import hf_state_dict
from models.checksum import BLOCK_BYTES, checksum
from models.pieces import PieceSums
from models.weights import pack, pack_each
from tests.engine.support import engine, make_requests, run, tiny_model
from tests.gpu.test_cuda import on_device
from tests.handoff.tools import Meeting, like, some_weights

DEVICE = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
one_machine = pytest.mark.skipif(tests.pretended.active(), reason="CUDA IPC is between two real processes")


def child_receives(pipe: Connection) -> None:
    """In a process of its own: take the weights that are offered, and give them back through the pipe."""
    targets = {name: tensor.to(DEVICE) for name, tensor in like(some_weights()).items()}
    receiver = Receiver(DEVICE)
    while (offer := pipe.recv()) is not None:
        try:
            received = receiver.receive(offer, targets)
            pipe.send((received.way, received.checksum, {name: t.cpu() for name, t in targets.items()}))
        except HandOffError as error:
            pipe.send(("failed", 0, str(error)))


@one_machine
def test_another_process_on_this_gpu_takes_weights_by_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", 4 * BLOCK_BYTES)
    weights = some_weights()
    manifest, _ = pack(weights, 1)
    meeting = Meeting()
    sender = send.Sender(0, 1, DEVICE, meeting.address)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=child_receives, args=(theirs,), daemon=True)
    child.start()
    try:
        for _ in range(2):
            terms = meeting.terms(1, "auto")
            ours.send(meeting.offer(terms, 0, manifest))
            given = ((name, tensor.to(DEVICE)) for name, tensor in weights.items())
            sent = sender.send(terms, (manifest.tensors, manifest.total_bytes), given)
            assert ours.poll(60)
            way, found, tensors = ours.recv()
            assert (way, found) == ("ipc", manifest.checksum), tensors
            assert sent is not None
            assert sent.checksum == manifest.checksum
            assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())
        ours.send(None)
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_the_devices_checksum_is_the_hosts() -> None:
    buffer = torch.randint(
        0, 256, (5 * BLOCK_BYTES + 64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    sums = PieceSums()
    for piece in buffer.to(DEVICE).split(2 * BLOCK_BYTES):
        sums.add(piece)
    assert sums.value() == checksum(buffer.numpy())


def test_packing_on_the_device_gives_the_hosts_buffer_and_holds_one_tensor_and_two_pieces() -> None:
    weights = some_weights()
    manifest, expected = pack(weights, 1)
    held = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    given = ((name, tensor.to(DEVICE)) for name, tensor in weights.items())
    again, buffer = pack_each(manifest.tensors, manifest.total_bytes, given, 1, device=DEVICE)
    assert again == manifest
    assert (buffer == expected).all()
    largest = max(tensor.nbytes for tensor in weights.values())
    pieces = 2 * manifest.total_bytes  # they are smaller than a piece of production's size
    assert torch.cuda.max_memory_allocated(DEVICE) - held <= pieces + 2 * largest + 2**21


def test_whole_weights_come_onto_the_device_through_pinned_memory(tmp_path: Path) -> None:
    old = on_device(tiny_model(tmp_path / "a", seed=1, invariant=False), torch.float32)
    new = tiny_model(tmp_path / "b", seed=2, invariant=False)
    manifest, buffer = pack(hf_state_dict(new), 1)
    core = engine(old)
    core.update_weights(manifest, buffer)
    for name, tensor in hf_state_dict(old).items():
        assert torch.equal(tensor.cpu(), hf_state_dict(new)[name]), name
    requests = make_requests(2, seed=3, max_new_tokens=4)
    assert {rollout.weights_version for rollout in run(core, requests).values()} == {1}


def test_an_engine_on_the_device_takes_pieces_by_broadcast_over_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner on the host; the other half of what a GPU needs NCCL for."""
    monkeypatch.setattr(send, "PIECE_BYTES", BLOCK_BYTES)
    old = on_device(tiny_model(tmp_path / "a", seed=1, invariant=False), torch.float32)
    new = tiny_model(tmp_path / "b", seed=2, invariant=False)
    meeting, named = Meeting(), hf_state_dict(new)
    manifest, _ = pack(named, 3)
    terms = meeting.terms(1, "broadcast", 3)
    given = iter(named.items())
    sending = threading.Thread(
        target=meeting.senders[0].send, args=(terms, (manifest.tensors, manifest.total_bytes), given)
    )
    sending.start()
    answer = engine(old).receive_weights(meeting.offer(terms, 0, manifest))
    sending.join(60)
    assert (answer.failure, answer.way, answer.checksum) == ("", "broadcast", manifest.checksum)
    assert all(torch.equal(tensor.cpu(), named[name]) for name, tensor in hf_state_dict(old).items())


def test_a_learner_on_the_device_hands_pieces_to_an_engine_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", BLOCK_BYTES)
    weights, meeting = some_weights(), Meeting()
    meeting.senders = [send.Sender(0, 1, DEVICE, meeting.address)]
    target = like(weights)
    (sent,), (got,) = meeting.hand_over(
        weights,
        [meeting.receiver()],
        "auto",
        [target],
        tensors=lambda rank: ((name, tensor.to(DEVICE)) for name, tensor in weights.items()),
    )
    assert sent is not None
    assert sent.ways == ("broadcast",)
    assert isinstance(got, Received), got
    assert got.checksum == sent.checksum == pack(weights, 1)[0].checksum
    assert all(torch.equal(target[name], tensor) for name, tensor in weights.items())


@pytest.mark.skipif(tests.pretended.active(), reason="a pretended tensor keeps its shape")
def test_tensors_leave_the_device_and_come_back_bit_for_bit() -> None:
    tensors = [torch.randn(2**20, device=DEVICE) for _ in range(4)]
    before = [tensor.cpu() for tensor in tensors]
    held, away = torch.cuda.memory_allocated(DEVICE), Away()
    away.leave(tensors)
    assert torch.cuda.memory_allocated(DEVICE) <= held - 4 * 2**22
    away.come_back()
    assert all(torch.equal(tensor.cpu(), was) for tensor, was in zip(tensors, before, strict=True))
