"""The engine in its own process: a bounded life, and a reason whenever it ends. What it answers: test_contract.py."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from actors.engine import child as child_module
from actors.engine.process import EngineStartError, RolloutEngine, spawn_engine
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from contracts.engine import (
    Abort,
    Sleep,
    Submit,
    UpdateDrafter,
    UpdateWeights,
    Wake,
)
from contracts.rollout import (
    DrafterLoaded,
    EngineDiedError,
    EngineIdle,
    Event,
    Progress,
    Recorded,
    Slept,
    WeightsLoaded,
)
from drafter.eagle.model import init_eagle
from models import weights
from models.checkpoint import hf_state_dict, init_model, save_model
from tests.engine.support import assert_same, engine, make_requests, rollouts, run, tiny_model, write_config
from tests.engine.test_recording import check_all

OPTIONS = EngineOptions(max_running=8, kv_tokens=4096, block_tokens=8, threads=1, progress_every_tokens=5)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(init_model(write_config(directory / "config"), 0), directory / "hf")
    return directory / "hf"


def speculative(model_dir: Path, strategies: tuple[str, ...], **changes: Any) -> RolloutEngine:
    speculation = SpeculationOptions(mode="adaptive", strategies=strategies, **changes)
    return spawn_engine(ModelOptions(path=str(model_dir)), OPTIONS, speculation=speculation)


@pytest.fixture
def child(model_dir: Path) -> Iterator[RolloutEngine]:
    spawned = spawn_engine(ModelOptions(path=str(model_dir)), OPTIONS, seed=1, name="engine-0")
    yield spawned
    spawned.close()


def collect(spawned: RolloutEngine, until: type[Event]) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + DEADLINE_S
    while not any(isinstance(event, until) for event in events):
        assert time.monotonic() < deadline, f"no {until.__name__} within {DEADLINE_S} s"
        events += spawned.poll(0.5)
    return events


def wait_for_death(spawned: RolloutEngine) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            spawned.poll(0.5)
        except EngineDiedError as error:
            return str(error)
    raise AssertionError("the engine's end was not noticed")


def test_a_child_draws_what_the_engine_in_process_draws(child: RolloutEngine, tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    requests = make_requests(12, prompts=4, seed=1)
    expected = run(engine(model), requests)
    child.send(Submit(tuple(requests[:6])))
    child.send(Submit(tuple(requests[6:])))
    child.send(Sleep())
    events = collect(child, Slept)  # and whatever a busy machine had finished by then
    (refused,) = [e for e in events if isinstance(e, Slept)]
    assert "before sleep" in refused.refusal
    while len(rollouts(events)) < 12:
        events += child.poll(0.5)
    if not isinstance(events[-1], EngineIdle):
        collect(child, EngineIdle)
    assert_same(rollouts(events), expected)
    assert any(isinstance(event, Progress) for event in events)
    child.send(Sleep())
    assert collect(child, Slept) == [Slept()]
    child.send(Wake())
    other = tiny_model(tmp_path, seed=5)
    manifest, buffer = weights.pack(hf_state_dict(other), version=7)
    child.send(UpdateWeights(manifest), buffer)
    buffer[:] = 0  # It was copied.
    loaded = [e for e in collect(child, WeightsLoaded) if isinstance(e, WeightsLoaded)]
    assert (loaded[0].version, loaded[0].checksum) == (7, manifest.checksum)
    child.send(Submit(tuple(requests)))
    events = collect(child, EngineIdle)
    assert_same(rollouts(events), run(engine(other), requests))
    assert {rollout.weights_version for rollout in rollouts(events).values()} == {7}
    child.send(Submit((requests[0],)))
    child.send(Abort((requests[0].request_id,)))
    assert set(rollouts(collect(child, EngineIdle))) == {requests[0].request_id}


def test_no_descriptor_or_memory_is_left_behind(model_dir: Path, tmp_path: Path) -> None:
    gc.collect()  # What earlier tests left open.
    ours = psutil.Process()
    before = ours.num_fds()
    spawned = spawn_engine(ModelOptions(path=str(model_dir)), OPTIONS)
    manifest, buffer = weights.pack(hf_state_dict(tiny_model(tmp_path)), version=1)
    process = psutil.Process(spawned.pid)
    counts = []
    for _ in range(5):
        spawned.send(UpdateWeights(manifest), buffer)
        collect(spawned, WeightsLoaded)
        counts.append(process.num_fds())
    assert len(set(counts)) == 1
    spawned.close()
    spawned.close()
    assert ours.num_fds() <= before  # fewer: what earlier tests left was collected meanwhile
    assert not process.is_running()


def test_death_is_noticed_with_its_signal(child: RolloutEngine) -> None:
    child.send(Submit(tuple(make_requests(4, seed=2, max_new_tokens=200))))
    os.kill(child.pid, signal.SIGKILL)
    assert "SIGKILL" in wait_for_death(child)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        child.send(Submit(tuple(make_requests(1))))
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        child.poll(0.0)


def test_close_is_bounded_even_if_the_child_is_stopped(model_dir: Path) -> None:
    spawned = spawn_engine(ModelOptions(path=str(model_dir)), OPTIONS)
    pid: int = spawned.pid
    os.kill(pid, signal.SIGSTOP)
    spawned.close(timeout_s=0.2)
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "/nonexistent/model"}, "/nonexistent/model"),
        ({"device": "cuda"}, "no CUDA device"),
        ({"max_model_tokens": 100_000}, "max_position_embeddings"),
        pytest.param(
            {"backend": "vllm"},
            "vLLM is not installed in this environment; .*make demo-vllm",
            marks=pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="here it is installed"),
        ),
    ],
)
def test_what_keeps_an_engine_from_starting_is_said(model_dir: Path, change: dict, words: str) -> None:
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    path = change.pop("path", str(model_dir))
    with pytest.raises(EngineStartError, match=words):
        spawn_engine(ModelOptions(path=path), OPTIONS.model_copy(update=change), name="engine-3")


def test_an_architecture_it_does_not_know_is_named(tmp_path: Path) -> None:
    directory = write_config(tmp_path, architectures=["MambaForCausalLM"], model_type="mamba")
    with pytest.raises(EngineStartError, match=r"MambaForCausalLM is not supported .*Qwen3ForCausalLM"):
        spawn_engine(ModelOptions(path=str(directory)), OPTIONS)


def test_a_start_that_takes_too_long_is_given_up(model_dir: Path) -> None:
    with pytest.raises(EngineStartError, match="not ready within"):
        spawn_engine(ModelOptions(path=str(model_dir)), OPTIONS, start_timeout_s=0.01)


def test_the_child_ends_with_its_parent(model_dir: Path) -> None:
    """Also when the parent is killed while the child decodes."""
    script = (
        "import sys, time\n"
        "from tests.engine.test_process import *\n"
        f"e = spawn_engine(ModelOptions(path={str(model_dir)!r}), OPTIONS)\n"
        "e.send(Submit(tuple(make_requests(8, seed=2, max_new_tokens=200))))\n"
        "print(e.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.kill()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def test_the_parent_does_not_import_torch() -> None:
    code = "import sys, actors.engine.process; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_child_that_cannot_speculate_as_asked_says_why(model_dir: Path) -> None:
    with pytest.raises(EngineStartError, match=r"rollout\.speculation"):
        speculative(model_dir, ("eagle:4",))


def test_recorded_states_cross_as_memory(model_dir: Path, tmp_path: Path) -> None:
    requests = make_requests(12, prompts=4, seed=1)
    spawned = spawn_engine(ModelOptions(path=str(model_dir)), OPTIONS, recording_bytes=1 << 26, recorded_layers=(0, 1))
    before = psutil.Process().num_fds()
    spawned.send(Submit(tuple(requests)))
    events = collect(spawned, EngineIdle)
    while len(rollouts(events)) < 12:
        events += collect(spawned, EngineIdle)
    spawned.close()
    assert psutil.Process().num_fds() <= before
    assert_same(rollouts(events), run(engine(tiny_model(tmp_path)), requests))
    check_all(tiny_model(tmp_path), events, requests, (0, 1))
    reports = [event for event in events if isinstance(event, Recorded)]
    assert all(report.seconds > 0 for report in reports)


def test_a_drafter_takes_new_weights_or_says_why_not(model_dir: Path, tmp_path: Path) -> None:
    target = tiny_model(tmp_path)
    model = init_eagle(target.config, 3, dtype=torch.float32, device="cpu", batch_invariant=True)
    manifest, buffer = weights.pack(model.state_dict(), version=5)
    spawned = speculative(model_dir, ("eagle:2", "ngram:2"), eagle=EagleOptions(path="random"))
    spawned.send(Submit(tuple(make_requests(4, prompts=2, seed=1))))
    spawned.send(UpdateDrafter("eagle", manifest), buffer)
    loaded = next(e for e in collect(spawned, DrafterLoaded) if isinstance(e, DrafterLoaded))
    assert (loaded.name, loaded.version, loaded.checksum, loaded.reason) == ("eagle", 5, manifest.checksum, "")
    assert loaded.seconds >= 0

    def refused(name: str, payload: np.ndarray, **tensors: torch.Tensor) -> str:
        sent = manifest
        if tensors:
            sent, payload = weights.pack(tensors, version=6)
        spawned.send(UpdateDrafter(name, sent), payload)
        return next(e for e in collect(spawned, DrafterLoaded) if isinstance(e, DrafterLoaded)).reason

    damaged = buffer.copy()
    damaged[3] ^= 255
    assert "checksum" in refused("eagle", damaged)
    assert "drafter.algorithm" in refused("eagle", buffer, other=torch.zeros(3))
    assert "no weights" in refused("ngram", buffer)
    assert "no drafter" in refused("eagel", buffer)
    spawned.send(Submit(tuple(make_requests(4, prompts=2, seed=2))))
    collect(spawned, EngineIdle)
    spawned.close()


@pytest.mark.parametrize(
    ("device", "driver", "visible", "on_gpu"),
    [
        ("cpu", True, "0", False),
        ("cuda", True, "0", True),
        ("auto", True, "0,1", True),
        ("auto", True, None, True),
        ("auto", True, "", False),
        ("auto", False, None, False),
    ],
)
def test_only_an_engine_on_cpu_lowers_its_priority(
    device: str, driver: bool, visible: str | None, on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU every late launch leaves it idle."""
    control = tmp_path / "nvidiactl"
    if driver:
        control.touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert child_module._on_gpu(device, control) is on_gpu
