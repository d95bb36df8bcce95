"""Drains, a pause and a threshold hold beyond the coordinator that was told of them; a file that is none is named."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.coordinator import ControlEvent, Drain, Pause, Resume, SetThreshold, Stop, Undrain
from coordinator.address import Address
from coordinator.admin.client import AdminClient
from coordinator.admin.credentials import Credentials
from coordinator.errors import SetupError
from coordinator.machine import Machine
from coordinator.service import CoordinatorService
from coordinator.standing import FILE_NAME, Standing
from tests.coordinator.cluster import OPTIONS, PATIENCE_S, Leaping, eventually, train_command, worker

names = st.lists(st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable()), max_size=4).map(tuple)
standings = st.builds(Standing, st.booleans(), st.none() | st.integers(1, 2**31), names, names)


@given(standings, st.text(max_size=5))
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, standing: Standing, run: str) -> None:
    folder = tmp_path_factory.mktemp("standing")
    standing.write(folder, run)
    assert Standing.read(folder, run) == standing
    assert Standing.read(folder, run + "x") is None
    assert [path.name for path in folder.iterdir()] == [FILE_NAME]


@given(standings, st.data())
def test_half_a_file_and_a_changed_one_are_read_as_written_or_refused(
    tmp_path_factory: pytest.TempPathFactory, standing: Standing, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("standing")
    standing.write(folder, "r")
    path = folder / FILE_NAME
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] = data.draw(st.integers(0, 255))
    else:
        del whole[at:]
    path.write_bytes(whole)
    try:
        found = Standing.read(folder, "r")
    except SetupError as error:
        assert str(path) in str(error)  # noqa: PT017 - it need not be raised
    else:
        assert found is None or isinstance(found, Standing)


def test_a_machine_holds_what_its_predecessor_was_asked_for() -> None:
    before = Machine(OPTIONS, term=1)
    asked: list[ControlEvent] = [Pause(), Drain(node="n0"), Drain(node="n1"), Undrain(node="n1"), SetThreshold(3)]
    for event in asked:
        before.step(event, 0.0)
    assert before.standing == Standing(True, 3, (), ("n0",))
    after = Machine(OPTIONS, term=2, settles_at_s=1.0, standing=before.standing)
    assert after.standing == before.standing
    asked = [Resume(), Undrain(node="n0"), SetThreshold(OPTIONS.threshold)]
    for event in asked:
        after.step(event, 0.0)
    assert after.standing == Standing()


def test_a_service_that_follows_another_obeys_what_that_one_was_told(tmp_path: Path) -> None:
    options, clock = OPTIONS.model_copy(update={"heartbeat_s": 0.1, "lease_s": Leaping.LEASE_S}), Leaping()
    with (
        CoordinatorService(options, directory=tmp_path, run="a", clock=clock) as before,
        worker(before.endpoint, "w0", options) as w0,
    ):
        before.rollout_started(1)
        w0.idle()
        train = train_command(w0)
        w0.started(train.session, train.epoch, "h:1")
        eventually(lambda: before.status().workers[0].phase == "running")
        before.control(Drain(worker="w0"))
        before.control(Drain(node="n7"))
        before.close()
        with CoordinatorService(options, directory=tmp_path, run="a", clock=clock) as after:
            after.rollout_started(1)
            assert isinstance(w0.poll(PATIENCE_S)[0], Stop)  # a drain needs no decision
            w0.stopped(train.session)
            eventually(lambda: [(w.state, w.drained) for w in after.status().workers] == [("IDLE", True)])
            assert after.status().settling
            clock.settle(after)
            assert after.status().drained_nodes == ("n7",)
            after.control(Undrain(worker="w0"))
            assert train_command(w0).session > train.session
        with CoordinatorService(options, directory=tmp_path, run="b") as other:  # another run of this folder
            assert other.status().drained_nodes == ()


@pytest.mark.parametrize("content", ["", "{", '{"run": "", "standing": {"threshold": 0}}', '{"paused": true}', "\0"])
def test_a_file_that_is_none_is_named_and_the_coordinator_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with CoordinatorService(OPTIONS, directory=tmp_path) as service:
        assert not service.status().paused
        service.control(Pause())
    assert str(tmp_path / FILE_NAME) in caplog.text
    kept = Standing.read(tmp_path, "")
    assert kept is not None
    assert kept.paused


def test_what_cannot_be_kept_is_obeyed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).mkdir()  # nothing can be renamed to it
    with CoordinatorService(OPTIONS, directory=tmp_path) as service:
        service.control(Drain(node="n0"))
        assert service.status().drained_nodes == ("n0",)
    assert "a restart would forget them" in caplog.text


@contextmanager
def process(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """`python -m coordinator run`, when it serves."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "coordinator", "run", "--directory", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": root}
    ) as running:
        killer = threading.Timer(240, running.kill)
        killer.start()
        try:
            assert running.stdout is not None
            assert running.stdout.readline().startswith("workers: ")
            yield running
        finally:
            killer.cancel()
            running.kill()


def test_drains_and_a_pause_outlive_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    def admin() -> AdminClient:
        address = Address.read(tmp_path)
        assert address is not None
        return AdminClient(address.admin, Credentials.read(tmp_path))

    with process(tmp_path) as first, admin() as client:
        client.drain(node="10.0.0.5", reason="spot")
        client.drain(node="ab" * 28)
        client.undrain(node="ab" * 28)
        client.set_threshold(2)
        assert client.pause().paused
        first.send_signal(signal.SIGKILL)
        first.wait()
    with process(tmp_path), admin() as client:
        status = client.status()
        assert (status.paused, status.threshold, status.drained_nodes) == (True, 2, ("10.0.0.5",))
        assert client.undrain(node="10.0.0.5").drained_nodes == ()


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    Standing(True, None, ("w0",), ("n0",)).write(tmp_path, "r")
    assert msgspec.json.decode((tmp_path / FILE_NAME).read_bytes()) == {
        "run": "r",
        "standing": {"paused": True, "threshold": None, "workers": ["w0"], "nodes": ["n0"]},
    }
