"""Ctrl-C: told at once from a thread of its own, obeyed where nothing is lost, and obeyed at once the second time."""

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.observer import RunObserver
from launch.cluster.session import RaySession
from launch.config import Config, load_config
from launch.interrupt import Interrupt, Interrupted, interrupt_flag
from launch.observe import Observer
from launch.observe.journal import read
from launch.run import train

Write = Callable[..., Path]
WAIT_S = 30.0


def test_the_first_request_is_told_once_and_not_on_the_main_thread() -> None:
    told: queue.Queue[tuple[str, bool]] = queue.Queue()

    class Told(RunObserver):
        def stopping(self, signal_name: str) -> None:
            told.put((signal_name, threading.current_thread() is threading.main_thread()))

    with interrupt_flag() as flag:
        flag.when_asked(Told())
        os.kill(os.getpid(), signal.SIGINT)
        assert told.get(timeout=WAIT_S) == ("SIGINT", False)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            flag.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert told.empty()


def test_a_second_ctrl_c_ends_with_the_command_that_resumes(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(write_config(), [f"run.dir={tmp_path}/runs", "run.name=x", "observe.tensorboard=false"]).config

    def run(config: Config, observer: Observer, interrupt: Interrupt, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)

    class Session:
        def __enter__(self) -> RaySession:
            return RaySession("", owned=True, dashboard_url=None)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train, "load_inputs", lambda config: None)
    monkeypatch.setattr(train, "compared", lambda session, observer: None)  # it asks Ray
    monkeypatch.setattr(train, "ray_session", lambda **_: Session())
    assert train.train(config, config_source="a.yaml", resume=False) == train.EXIT_INTERRUPTED
    assert "(there is no checkpoint yet) with: paceline train a.yaml" in capsys.readouterr().out
    kinds = [event["kind"] for event in read(tmp_path / "runs/x/events.jsonl")]
    assert [kind for kind in kinds if kind != "stopping"] == ["started", "interrupted"]
