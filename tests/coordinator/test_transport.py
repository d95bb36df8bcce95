"""The socket, over localhost: who is heard, what is dropped and counted, and what survives a restart."""

import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Busy, Idle, Register, Reregister, RolloutComplete, RolloutStarted, State, Stop, Train
from coordinator.errors import SetupError
from coordinator.machine import Machine
from coordinator.transport.client import Command, DriverClient
from coordinator.transport.security import ClientKeys, client_keys, server_keys, write_keys
from coordinator.transport.server import HARD_LIMIT_BYTES, CoordinatorServer
from coordinator.wire import MAX_FRAME_BYTES, Ack, Say, Tell, encode
from tests.coordinator.cluster import OPTIONS, Raw, eventually, served, states, train_command, worker

REGISTER = Say(1, 0, Register("w0", 1, "n0", "g", State.BUSY))


def test_a_session_from_idle_to_stopped() -> None:
    commands: SimpleQueue[Command] = SimpleQueue()
    with (
        served() as server,
        worker(server.endpoint, "w0") as first,
        worker(server.endpoint, "w1", on_command=commands.put) as second,
        closing(DriverClient(server.endpoint, 1, OPTIONS)) as driver,
    ):
        driver.rollout_started(1)
        # A report that overtakes a registration lost while connecting is answered with the request for another one,
        # which ends the session that it joins.
        eventually(lambda: states(server) == {"w0": "BUSY", "w1": "BUSY"})
        first.idle()
        train = train_command(first)
        assert train.members == ("w0",)
        first.started(train.session, train.epoch, "h0:7")
        second.idle()
        assert train_command(first, members=2).members == ("w0", "w1")
        joined = commands.get(timeout=20)
        assert isinstance(joined, Train)
        assert (joined.members, joined.store) == (("w0", "w1"), "h0:7")
        first.started(joined.session, joined.epoch, "h0:7")
        second.started(joined.session, joined.epoch)
        eventually(lambda: set(states(server).values()) == {"TRAINING running"})
        assert first.connected
        assert driver.connected

        driver.rollout_complete(1)
        stop = commands.get(timeout=20)
        assert isinstance(stop, Stop)
        assert [type(command) for command in first.poll(20)] == [Stop]
        first.stopped(joined.session)
        second.stopped(joined.session)
        eventually(lambda: set(states(server).values()) == {"IDLE"})
        assert first.error == second.error == ""
    assert [first.state, second.state] == [State.BUSY] * 2  # after goodbye nothing trains


def test_work_stops_a_trainer_unasked() -> None:
    """The coordinator hears of it afterwards: nobody waits for it."""
    with served() as server, worker(server.endpoint, "w0") as client:
        server.control(RolloutStarted(1))
        client.idle()
        train = train_command(client)
        client.started(train.session, train.epoch, "h:1")
        client.busy(running=3)
        (stop,) = client.poll()
        assert isinstance(stop, Stop)
        assert stop.reason == "it has work"
        client.stopped(train.session)
        eventually(lambda: states(server) == {"w0": "BUSY"})


def test_without_a_coordinator_nothing_blocks_and_training_ends() -> None:
    quick = CoordinatorOptions(heartbeat_s=0.1, lease_s=0.6, start_deadline_s=20, stop_deadline_s=0.2)
    with served(quick) as server, worker(server.endpoint, "w0", quick) as client:
        server.control(RolloutStarted(1))
        client.idle()
        train = train_command(client)
        client.started(train.session, train.epoch, "h:1")
        eventually(lambda: states(server) == {"w0": "TRAINING running"})
        server.close()
        (stop,) = client.poll(20)
        assert isinstance(stop, Stop)
        assert "has not answered" in stop.reason
        assert not client.connected
        for running in range(1000):
            client.busy(running)
        client.stopped(train.session)
        assert client.state is State.BUSY
        with pytest.raises(ConnectionError):
            server.counts()


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"\xc1",),
        (b"not a message",),
        (encode(REGISTER), encode(REGISTER)),
        (encode(REGISTER)[:-1],),
        (msgspec.msgpack.encode({"type": "Say", "incarnation": 1, "number": 0, "event": {"type": "Destroy"}}),),
        (msgspec.msgpack.encode(msgspec.to_builtins(REGISTER) | {"more": 1}),),
        (encode(Say(1, 0, Busy("w0", 1, running=-1))),),
        (encode(Say(1, 0, Busy("w0", 1, running=2**31))),),
        (encode(Say(1, -1, Busy("w0", 1))),),
        (msgspec.msgpack.encode(msgspec.to_builtins(REGISTER) | {"number": 2**63}),),
        (b"\x91" * 60_000,),  # nested beyond any stack
    ],
    ids=[
        "empty",
        "no msgpack",
        "text",
        "two frames",
        "cut off",
        "unknown event",
        "unknown field",
        "negative",
        "too many",
        "before the first",
        "too late",
        "nested",
    ],
)
def test_malformed_frames_are_dropped_and_counted(frames: tuple[bytes, ...]) -> None:
    with served() as server, Raw(server.endpoint) as raw:
        raw.send(*frames)
        raw.say(REGISTER)
        assert raw.answer() == Ack(1, 0, 1)
        assert server.counts() == Counter({"malformed": 1, "heard": 1})


def test_oversized_frames_are_dropped_and_counted() -> None:
    with served() as server, Raw(server.endpoint) as raw:
        raw.send(b"x" * (MAX_FRAME_BYTES + 1))
        raw.say(REGISTER)
        assert raw.answer() == Ack(1, 0, 1)
        assert server.counts() == Counter({"oversized": 1, "heard": 1})


def test_what_is_far_too_long_ends_its_connection_only() -> None:
    with served() as server, Raw(server.endpoint) as bad, Raw(server.endpoint) as good:
        bad.send(b"x" * (HARD_LIMIT_BYTES + 1))
        good.say(REGISTER)
        assert good.answer() == Ack(1, 0, 1)
        assert server.counts() == Counter({"heard": 1})


def test_a_message_sent_again_is_acknowledged_again_and_applied_once() -> None:
    with served() as server, Raw(server.endpoint) as raw:
        for say in (REGISTER, Say(1, 1, Idle("w0", 1))):
            raw.say(say)
            assert raw.answer() == Ack(1, say.number, 1)
        with server.hub() as (hub, _):
            before = repr(hub.machine.roster)
        raw.say(say)
        assert raw.answer() == Ack(1, 1, 1)
        with server.hub() as (hub, _):
            assert repr(hub.machine.roster) == before
        assert server.counts() == Counter({"heard": 2, "repeated": 1})


def test_a_refusal_is_repeated_with_its_reason() -> None:
    with served() as server, Raw(server.endpoint) as raw:
        raw.say(REGISTER)
        raw.answer()
        wrong = Say(1, 1, Register("w0", 1, "n0", "g", State.TRAINING))  # without a session
        answers = []
        for _ in range(2):
            raw.say(wrong)
            answers.append(raw.answer())
        assert answers == [Ack(1, 1, 1, "w0 registers as TRAINING with session 0")] * 2
        assert server.counts() == Counter({"heard": 2, "illegal": 1, "repeated": 1})
        assert states(server) == {"w0": "BUSY"}


def test_replayed_and_overtaking_messages_are_dropped_and_counted() -> None:
    """Recorded frames, played again over another connection, change nothing and are not answered."""
    recorded = [REGISTER, Say(1, 1, Idle("w0", 1)), Say(1, 2, Busy("w0", 1, 5))]
    with served() as server, Raw(server.endpoint) as raw, Raw(server.endpoint) as attacker:
        for say in recorded:
            raw.say(say)
            assert isinstance(raw.answer(), Ack)
        attacker.say(recorded[0])
        attacker.say(recorded[1])
        attacker.say(Say(1, 9, Idle("w0", 1)))
        attacker.say(Say(0, 3, Idle("w0", 0)))
        eventually(lambda: server.counts()["outdated"] == 1)
        assert attacker.answer(0.1) is None
        assert states(server) == {"w0": "BUSY"}
        assert server.counts() == Counter({"heard": 3, "replayed": 2, "gap": 1, "outdated": 1})
        raw.say(Say(1, 3, Idle("w0", 1)))
        assert raw.answer() == Ack(1, 3, 1)  # the answers still go to it


def test_who_is_unknown_is_asked_to_register() -> None:
    with served() as server, Raw(server.endpoint) as raw:
        raw.say(Say(4, 7, Idle("w0", 4)))
        assert raw.answer() == Tell(Reregister("w0", 1), 4, 7)
        raw.say(Say(4, 8, Register("w0", 4, "n0", "g", State.IDLE)))
        assert raw.answer() == Ack(4, 8, 1)
        assert states(server) == {"w0": "IDLE"}


def test_nobody_speaks_for_others() -> None:
    with served() as server, Raw(server.endpoint) as raw:
        raw.say(Say(1, 0, Register("driver", 1, "n0", "g", State.BUSY)))
        raw.say(Say(2, 0, Register("w0", 1, "n0", "g", State.BUSY)))  # two incarnations
        raw.say(REGISTER)
        assert raw.answer() == Ack(1, 0, 1)
        assert server.counts() == Counter({"impostor": 2, "heard": 1})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys")
    return tmp_path / "keys"


def stranger(server: ClientKeys) -> ClientKeys:
    """A good key pair that nobody has allowed."""
    public, secret = zmq.curve_keypair()
    return ClientKeys(public, secret, server.server)


def test_curve_admits_who_is_allowed_and_counts_who_is_not(keys: Path) -> None:
    allowed = client_keys(keys, "worker")
    with (
        served(keys=server_keys(keys)) as server,
        Raw(server.endpoint, stranger(allowed)) as unknown,
        Raw(server.endpoint) as bare,
        worker(server.endpoint, "w0", keys=allowed) as client,
        closing(DriverClient(server.endpoint, 1, OPTIONS, keys=client_keys(keys, "driver"))) as driver,
    ):
        unknown.say(Say(1, 0, Register("w1", 1, "n0", "g", State.IDLE)))
        bare.say(Say(1, 0, Register("w2", 1, "n0", "g", State.IDLE)))
        driver.rollout_started(1)
        client.idle()
        assert train_command(client).members == ("w0",)
        eventually(lambda: server.counts()["unauthenticated"] >= 2)
        assert list(states(server)) == ["w0"]
        assert unknown.answer(0.0) is None
        assert bare.answer(0.0) is None


def test_a_workers_key_is_no_drivers(keys: Path) -> None:
    with served(keys=server_keys(keys)) as server, Raw(server.endpoint, client_keys(keys, "worker")) as raw:
        raw.say(Say(1, 0, RolloutComplete(1)))
        raw.say(REGISTER)
        assert raw.answer() == Ack(1, 0, 1)
        assert server.counts() == Counter({"impostor": 1, "heard": 1})
        with server.hub() as (hub, _):
            assert hub.machine.rolling is None


def test_a_key_may_be_one_workers_only(keys: Path) -> None:
    allowed = server_keys(keys)
    own = client_keys(keys, "worker")
    allowed.allowed[own.public] = "w0"
    with served(keys=allowed) as server, Raw(server.endpoint, own) as raw:
        raw.say(Say(1, 0, Register("w1", 1, "n0", "g", State.IDLE)))
        raw.say(REGISTER)
        assert raw.answer() == Ack(1, 0, 1)
        assert server.counts() == Counter({"impostor": 1, "heard": 1})


def test_an_unencrypted_coordinator_gets_no_word_from_who_wants_encryption(keys: Path) -> None:
    with served() as server, Raw(server.endpoint, client_keys(keys, "worker")) as raw:
        raw.say(REGISTER)
        eventually(lambda: server.counts()["bad handshake"] >= 1)
        assert states(server) == {}


def test_key_files_are_private_and_checked(keys: Path) -> None:
    assert all((keys / f"{name}-key.json").stat().st_mode & 0o077 == 0 for name in ("coordinator", "worker", "driver"))
    with pytest.raises(FileExistsError):
        write_keys(keys)
    (keys / "worker-key.json").write_text('{"public": "short"}', encoding="utf-8")
    with pytest.raises(SetupError, match="lacks its public key"):
        client_keys(keys, "worker")
    (keys / "worker-key.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SetupError, match="no key file"):
        client_keys(keys, "worker")
    (keys / "allowed.json").unlink()
    with pytest.raises(SetupError, match="python -m coordinator keys"):
        server_keys(keys)


def test_a_taken_port_is_an_error_that_names_it() -> None:
    with served() as server, pytest.raises(OSError, match=server.endpoint):
        CoordinatorServer(Machine(OPTIONS, term=1), server.endpoint)


def test_a_bug_ends_the_coordinator_and_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it knew is not to be trusted: its owner starts another, which asks the workers."""

    def bug(self: object, now_s: float) -> None:
        raise ZeroDivisionError

    failed = threading.Event()
    server = CoordinatorServer(Machine(OPTIONS, term=1), "tcp://127.0.0.1:*", on_failure=failed.set)
    with worker(server.endpoint, "w0") as client:
        eventually(lambda: states(server) == {"w0": "BUSY"})
        monkeypatch.setattr("coordinator.hub.Hub.tick", bug)
        client.idle()
        assert failed.wait(20)
    assert "the coordinator's thread has ended" in caplog.text
    with pytest.raises(ConnectionError):
        server.counts()
    server.close()


def test_nothing_is_left_running() -> None:
    before = set(threading.enumerate())
    with served() as server, worker(server.endpoint, "w0") as client:
        client.idle()
        eventually(lambda: states(server) == {"w0": "IDLE"})
    assert set(threading.enumerate()) <= before
