"""A complete coordinator: its admin service, its address file, its restart, and the command that runs it alone."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from config.coordinator import CoordinatorOptions
from contracts.coordinator import Changed, Drain, Pause, RolloutStarted, Stop
from coordinator.__main__ import main
from coordinator.address import Address
from coordinator.admin import admin_pb2 as pb
from coordinator.admin.client import AdminClient, NoCoordinatorError, RequestRefusedError
from coordinator.admin.credentials import Credentials
from coordinator.admin.messages import SERVICE, change_message, change_record, status_message, status_record
from coordinator.errors import SetupError
from coordinator.feed import CAPACITY, StatusFeed
from coordinator.machine import UnknownTargetError
from coordinator.service import CoordinatorService
from coordinator.status import Change, SessionStatus, Status, WorkerStatus
from coordinator.transport.client import DriverClient
from coordinator.transport.security import Keys, write_keys
from tests.coordinator.cluster import OPTIONS, Leaping, eventually, train_command, worker


@pytest.fixture
def service() -> Iterator[CoordinatorService]:
    with CoordinatorService(OPTIONS) as service:
        yield service


@pytest.fixture
def admin(service: CoordinatorService) -> Iterator[AdminClient]:
    with AdminClient(service.address.admin) as client:
        yield client


def by_name(status: Status) -> dict[str, WorkerStatus]:
    return {worker.name: worker for worker in status.workers}


def test_status_shows_workers_and_sessions(service: CoordinatorService, admin: AdminClient) -> None:
    empty = admin.status()
    assert (empty.workers, empty.rollout_step, empty.rolling) == ((), None, False)
    with worker(service.endpoint, "w0") as first, worker(service.endpoint, "w1") as second:
        service.rollout_started(5)
        second.busy(running=17)
        first.idle()
        train = train_command(first)
        first.started(train.session, train.epoch, "h:1")
        first.progress(step=12)
        second.progress(running=16)
        eventually(lambda: [w.step or w.running for w in admin.status().workers] in ([12, 16], [16, 12]))
        status = admin.status()
    workers = by_name(status)
    assert (workers["w0"].state, workers["w0"].phase, workers["w0"].session) == ("TRAINING", "running", train.session)
    assert (workers["w1"].state, workers["w1"].phase, workers["w1"].session) == ("BUSY", "", 0)
    assert status.sessions == (SessionStatus("g", train.session, train.epoch, ("w0",)),)
    assert (status.rollout_step, status.rolling, status.threshold) == (5, True, 1)
    assert status.counts["heard"] >= 4
    assert status.endpoint == service.endpoint


def test_drain_stops_who_trains_and_promotes_nobody(service: CoordinatorService, admin: AdminClient) -> None:
    with worker(service.endpoint, "w0") as client:
        service.rollout_started(1)
        client.idle()
        train = train_command(client)
        client.started(train.session, train.epoch, "h:1")
        status = admin.drain(node="n0", reason="spot instance ends")
        assert status.drained_nodes == ("n0",)
        assert status.workers[0].drained
        (stop,) = client.poll(20)
        assert isinstance(stop, Stop)
        assert stop.reason == "spot instance ends"
        client.stopped(train.session)
        eventually(lambda: admin.status().workers[0].state == "IDLE")
        assert client.poll(0.05) == []
        admin.undrain(node="n0")
        assert train_command(client).session > train.session
        with pytest.raises(RequestRefusedError, match="no worker 'w9'; registered: w0"):
            admin.drain(worker="w9")
        with pytest.raises(RequestRefusedError, match="a worker or a node"):
            admin.drain()
        with pytest.raises(RequestRefusedError, match="a worker or a node"):
            admin.undrain(worker="w0", node="n0")


def test_pause_resume_and_threshold(service: CoordinatorService, admin: AdminClient) -> None:
    with worker(service.endpoint, "w0") as first, worker(service.endpoint, "w1") as second:
        service.rollout_started(1)
        assert admin.pause().paused
        first.idle()
        eventually(lambda: "IDLE" in {w.state for w in admin.status().workers})
        assert admin.set_threshold(2).threshold == 2
        assert not admin.resume().paused
        assert first.poll(0.05) == []  # one is idle, two are needed
        second.idle()
        eventually(lambda: bool(first.poll() or second.poll()))
        with pytest.raises(RequestRefusedError, match="at least 1"):
            admin.set_threshold(0)


def test_watch_tells_every_change_in_order(service: CoordinatorService, admin: AdminClient) -> None:
    updates = admin.watch(every_s=60)
    assert isinstance(next(updates), Status)
    with worker(service.endpoint, "w0") as client:
        eventually(lambda: client.connected)
        service.rollout_started(1)
        client.idle()
        train = train_command(client)
    changes = [next(updates) for _ in range(6)]
    assert all(isinstance(change, Change) for change in changes)
    told = [(c.worker or c.group, c.before, c.after, c.members) for c in changes if isinstance(c, Change)]
    assert told == [
        ("w0", "", "BUSY", ()),
        ("w0", "BUSY", "IDLE", ()),
        ("g", "", "", ("w0",)),
        ("w0", "IDLE", "TRAINING", ()),
        ("w0", "TRAINING", "", ()),
        ("g", "", "", ()),
    ]
    assert train.session == next(c.session for c in changes if isinstance(c, Change) and c.group)
    updates.close()  # type: ignore[attr-defined]


def test_watch_says_the_status_again_and_ends_with_the_coordinator() -> None:
    with CoordinatorService(OPTIONS) as service, AdminClient(service.address.admin) as admin:
        updates = admin.watch(every_s=0.05)
        assert [type(next(updates)) for _ in range(3)] == [Status] * 3
        service.close()
        with pytest.raises(NoCoordinatorError):
            list(updates)


def test_a_watcher_that_falls_behind_is_cut_off_and_nobody_waits_for_it() -> None:
    feed = StatusFeed()
    with feed.subscribe() as slow, feed.subscribe() as quick:
        for i in range(CAPACITY + 1):
            feed.publish(Changed("w0", "", "BUSY", str(i)), 1.0)
            quick.changes.get_nowait()
        assert slow.cut_off
        assert not quick.cut_off
        feed.publish(Changed("w0", "BUSY", "", "last"), 1.0)
        assert quick.changes.get_nowait() == Change(at_s=1.0, worker="w0", before="BUSY", reason="last")


def test_records_survive_the_wire() -> None:
    whole = WorkerStatus(
        name="w",
        incarnation=2**62,
        node="n",
        group="g",
        state="TRAINING",
        phase="running",
        session=7,
        running=3,
        step=9,
        in_state_s=0.5,
        silent_s=0.25,
        drained=True,
        rests_s=1.5,
        trainer_failures=2,
    )
    session = SessionStatus("g", 7, 9, ("w", "x"))
    counts = {"heard": 3}
    status = Status(
        term=4,
        epoch=9,
        uptime_s=1.5,
        endpoint="tcp://h:1",
        rollout_step=None,
        rolling=True,
        paused=True,
        settling=True,
        threshold=2,
        workers=(whole,),
        sessions=(session,),
        drained_nodes=("n",),
        counts=counts,
    )
    assert status_record(pb.Status.FromString(status_message(status).SerializeToString())) == status
    change = Change(
        at_s=1.5, worker="w", group="g", before="a", after="b", reason="why", session=7, epoch=9, members=("w", "x")
    )
    assert change_record(pb.Change.FromString(change_message(change).SerializeToString())) == change
    for record, message in ((WorkerStatus, pb.Worker), (Status, pb.Status), (Change, pb.Change)):
        assert {field.name for field in fields(record)} == set(message.DESCRIPTOR.fields_by_name)


def test_health_and_reflection() -> None:
    """As grpcurl and Kubernetes' probes ask for them."""
    with CoordinatorService(OPTIONS) as service, grpc.insecure_channel(service.address.admin) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=10)
        assert SERVICE in {item.name for item in listed.list_services_response.service}
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        (found,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]), timeout=10)
        assert b"SetThreshold" in found.file_descriptor_response.file_descriptor_proto[0]


def test_a_restarted_coordinator_takes_over_ports_and_sessions(tmp_path: Path) -> None:
    options, clock = OPTIONS.model_copy(update={"heartbeat_s": 0.1, "lease_s": Leaping.LEASE_S}), Leaping()
    with (
        CoordinatorService(options, directory=tmp_path, clock=clock) as before,
        closing(DriverClient(before.endpoint, 1, options)) as driver,
        worker(before.endpoint, "w0", options) as w0,
        worker(before.endpoint, "w1", options) as w1,
    ):
        driver.rollout_started(3)
        w0.idle()
        train = train_command(w0)
        w0.started(train.session, train.epoch, "h:1")
        eventually(lambda: by_name(before.status())["w0"].phase == "running")
        before.close()
        with CoordinatorService(options, directory=tmp_path, clock=clock) as after:
            assert (after.endpoint, after.address.admin) == (before.endpoint, before.address.admin)
            assert after.address.term > before.address.term
            assert Address.read(tmp_path) == after.address
            eventually(lambda: set(by_name(after.status())) == {"w0", "w1"})
            assert after.status().settling
            w1.idle()  # is promoted once it has settled, not before, into the session that was there
            clock.settle(after)
            again = train_command(w0)
            assert (again.session, again.members, again.term) == (train.session, ("w0",), after.address.term)
            assert not after.status().settling
            w0.started(again.session, again.epoch, "h:1")
            assert train_command(w1).members == ("w0", "w1")
            assert after.status().rollout_step == 3  # the driver said so again, unasked


def test_the_first_coordinator_of_a_run_need_not_settle(tmp_path: Path) -> None:
    with CoordinatorService(OPTIONS, directory=tmp_path) as service:
        assert not service.status().settling
    (tmp_path / "coordinator.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SetupError, match=r"coordinator\.json"):
        CoordinatorService(OPTIONS, directory=tmp_path)


def test_a_predecessors_port_that_is_taken_is_given_up(tmp_path: Path) -> None:
    with CoordinatorService(OPTIONS, directory=tmp_path) as first:
        with CoordinatorService(OPTIONS, directory=tmp_path) as second:
            assert second.endpoint != first.endpoint
        asked_for = OPTIONS.model_copy(update={"port": int(first.endpoint.rpartition(":")[2])})
        with pytest.raises(OSError, match=r"cannot listen for workers.*coordinator\.port=0 takes a free port"):
            CoordinatorService(asked_for)
        taken = OPTIONS.model_copy(update={"admin_port": int(first.address.admin.rpartition(":")[2])})
        with pytest.raises(OSError, match=r"admin service cannot listen.*coordinator\.admin_port=0 takes a free port"):
            CoordinatorService(taken)


def test_requests_of_this_process_and_notices() -> None:
    with (
        CoordinatorService(OPTIONS) as service,
        service._feed.subscribe() as subscription,
        worker(service.endpoint, "w0") as client,
    ):
        eventually(lambda: client.connected)
        service.control(RolloutStarted(1))
        client.idle()
        train_command(client)
        service.control(Pause())
        service.rollout_complete(1)
        assert service.status().paused
        with pytest.raises(UnknownTargetError):
            service.control(Drain(worker="nobody"))
    changes = [subscription.changes.get_nowait() for _ in range(subscription.changes.qsize())]
    assert [change.after for change in changes if change.worker][:3] == ["BUSY", "IDLE", "TRAINING"]


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(SetupError, match=r"lease_s: 5 is less than 2 heartbeat_s \+ stop_deadline_s = 6"):
        CoordinatorService(CoordinatorOptions(lease_s=5))


def test_with_curve_from_key_files(tmp_path: Path) -> None:
    write_keys(tmp_path)
    options = OPTIONS.model_copy(update={"curve": OPTIONS.curve.model_copy(update={"directory": str(tmp_path)})})
    with (
        CoordinatorService(options) as service,
        worker(service.endpoint, "w0", options, keys=Keys(options, tmp_path).worker("w0")),
        worker(service.endpoint, "w1", options),
    ):
        eventually(lambda: service.status().counts.get("unauthenticated", 0) >= 1)
        eventually(lambda: set(by_name(service.status())) == {"w0"})


def test_alone_as_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", str(tmp_path / "keys")]) == 0
    assert json.loads((tmp_path / "keys" / "driver-key.json").read_text())["public"]
    assert main(["keys", str(tmp_path / "keys")]) == 1
    assert "exists" in capsys.readouterr().err
    assert main(["run", "--lease-s", "1"]) == 1
    assert "lease_s" in capsys.readouterr().err
    command = [sys.executable, "-m", "coordinator", "run", "--directory", str(tmp_path), "--heartbeat-s", "0.5"]
    command += ["--curve-directory", str(tmp_path / "keys")]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as process:
        killer = threading.Timer(240, process.kill)
        killer.start()
        assert process.stdout is not None
        assert process.stdout.readline().startswith("workers: tcp://127.0.0.1:")
        address = Address.read(tmp_path)
        assert address is not None
        assert address.pid == process.pid
        with AdminClient(address.admin, Credentials.read(tmp_path)) as admin:
            assert admin.status().term == address.term
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        killer.cancel()
    with AdminClient(address.admin, timeout_s=1) as admin, pytest.raises(NoCoordinatorError, match=address.admin):
        admin.status()


SIGNALLED = """
import faulthandler, os, signal, sys, threading
import coordinator.__main__ as program

left = 0

def trace(frame, event, argument):  # every line that Python runs between the announcement and the wait, and in it
    global left
    left -= 1
    if left == 0:
        signal.raise_signal(signal.SIGTERM)
    return trace

def announced(*args, **more):
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()  # the later moments are in no line of Python
    sys._getframe(1).f_trace = trace
    sys.settrace(trace)

program.print = announced
faulthandler.dump_traceback_later(200, exit=True)
for moment in range(1, 16):
    left = moment
    assert program.main(["run"]) == 0
    sys.settrace(None)
"""


def test_a_signal_at_any_moment_ends_it() -> None:
    """A handler interrupts whatever the main thread does, with the locks that it holds."""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
