"""`cluster.start_timeout_s` is how long every engine and every trainer may take to start, in each layout."""

import asyncio
from functools import partial
from typing import Any

import pytest

from actors.engine import process
from actors.engine.process import spawn_engine
from actors.rollout_worker import RolloutWorker
from config.model import ModelOptions
from config.rollout import EngineOptions


class WaitsError(Exception):
    """Raised in place of a start: how long it would have waited."""


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []

    class NeverStarts:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def wait_until_ready(self, timeout_s: float) -> None:
            seconds.append(timeout_s)
            raise WaitsError

    monkeypatch.setattr(process, "RolloutEngine", NeverStarts)
    return seconds


@pytest.mark.parametrize("backend", ["native", "vllm"])
def test_the_childs_start_is_waited_for_as_long_as_it_was_told(backend: str, waited: list[float]) -> None:
    with pytest.raises(WaitsError):
        spawn_engine(ModelOptions(path="m"), EngineOptions(backend=backend), start_timeout_s=777.0)
    assert waited == [777.0]


def test_an_engine_on_several_gpus_waits_as_long(monkeypatch: pytest.MonkeyPatch, waited: list[float]) -> None:
    spawn = partial(spawn_engine, ModelOptions(path="m"), EngineOptions(), start_timeout_s=777.0)
    for gpus in (None, [3, 5]):
        monkeypatch.setattr("actors.rollout_worker.group_gpus", lambda timeout_s, gpus=gpus: gpus)
        with pytest.raises(WaitsError):
            asyncio.run(RolloutWorker("w", spawn, gpus_timeout_s=1.0).restart_engine())
    assert waited == [777.0, 777.0]
