"""Who leaves a shared GPU when, and which way weights take: what each configuration gives."""

from typing import Any

import pytest

from launch.config import Config
from launch.dispatch import SeatState, WorkerNow
from launch.run import phases
from launch.run.phases import SharedMemory, memory_phases
from launch.run.publish import way_of
from tests.context import run_context


def config(cluster: dict[str, Any], backend: str = "native", device: str = "auto") -> Config:
    return Config.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "data": {"train": "d.jsonl"},
            "rollout": {"engine": {"backend": backend, "device": device}},
            "cluster": cluster,
        }
    )


@pytest.mark.parametrize(
    ("cluster", "backend", "device", "way"),
    [
        ({}, "native", "auto", None),
        ({"weights": "broadcast"}, "native", "auto", "broadcast"),
        ({"layout": "colocated"}, "native", "auto", "auto"),
        ({"layout": "colocated"}, "native", "cpu", None),
        ({"layout": "colocated"}, "vllm", "auto", None),
        ({"layout": "colocated", "weights": "store"}, "native", "auto", None),
        ({"layout": "disaggregated"}, "native", "auto", "auto"),
        ({"layout": "disaggregated", "gpus_per_worker": 0}, "native", "auto", None),
        ({"layout": "disaggregated", "weights": "ipc"}, "native", "auto", "ipc"),
    ],
)
def test_the_way_of_weights_follows_from_the_layout(
    cluster: dict[str, Any], backend: str, device: str, way: str | None
) -> None:
    chosen, why = way_of(config(cluster, backend, device))
    assert chosen == way
    assert why


def test_the_least_that_fits_is_done_and_all_of_it_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: set[tuple[bool, bool]] = set()
    monkeypatch.setattr(
        phases, "phase_fits", lambda c, b, *, engines_sleep, optimizer_away: (engines_sleep, optimizer_away) in fits
    )
    colocated = config({"layout": "colocated"})
    assert memory_phases(colocated, None) == (True, True)
    assert memory_phases(colocated, 80) == (True, True)
    fits.add((False, True))
    assert memory_phases(colocated, 80) == (False, True)
    fits.add((True, False))
    assert memory_phases(colocated, 80) == (True, False)
    fits.add((False, False))
    assert memory_phases(colocated, 80) == (False, False)


def test_who_shares_no_gpu_stays_unless_told() -> None:
    assert memory_phases(config({}), None) == (False, False)
    assert memory_phases(config({"layout": "disaggregated"}), None) == (False, False)
    assert memory_phases(config({"layout": "colocated"}, device="cpu"), None) == (False, False)
    assert memory_phases(config({"layout": "colocated", "offload": "never"}), None) == (False, False)
    assert memory_phases(config({"offload": "always"}), None) == (True, True)


class Recorded:
    """Learner and dispatcher in one, which tell what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.running = 0
        self.to_mend = False

    def rest(self, *, optimizer: bool) -> None:
        self.asked.append(f"rest {optimizer}")

    def renew(self) -> bool:
        self.asked.append("renew")
        return True

    def mend(self) -> None:
        self.asked.append("mend")
        self.to_mend = False

    def workers(self) -> dict[str, WorkerNow]:
        return {"rollout-0": WorkerNow(SeatState.READY, self.running, "a", retiring=False)}

    def sleep(self, timeout_s: float) -> dict[str, str]:
        self.asked.append("sleep")
        return {"rollout-1": "it has requests"}


def test_the_optimizer_leaves_before_engines_decode_and_they_sleep_before_the_learner_works() -> None:
    actors, events = Recorded(), list[tuple[str, str]]()
    memory = SharedMemory(
        actors, actors, run_context(config({"offload": "always"}), on_event=lambda *event: events.append(event))
    )
    memory.decode()
    memory.learn()
    assert actors.asked == ["rest True", "sleep"]
    assert [kind for kind, _ in events] == ["memory_phases", "engine_awake"]
    assert "rollout-1 keeps its KV cache while the learner works: it has requests" in events[1][1]
    quiet = Recorded()
    memory = SharedMemory(quiet, quiet, run_context(config({}), on_event=lambda *event: events.append(event)))
    memory.decode()
    memory.learn()
    assert (quiet.asked, len(events)) == ([], 2)


@pytest.mark.parametrize(("cluster", "while_busy"), [({"offload": "always"}, []), ({}, ["renew"])])
def test_no_learner_is_made_again_beside_engines_that_decode_on_its_gpus(
    cluster: dict[str, Any], while_busy: list[str]
) -> None:
    actors = Recorded()
    memory = SharedMemory(actors, actors, run_context(config(cluster)))
    actors.running = 3
    assert memory.renew()
    assert actors.asked == while_busy
    actors.running = 0
    assert memory.renew()
    assert actors.asked == [*while_busy, "renew"]
    actors.asked.clear()
    actors.to_mend, actors.running = True, 3
    memory.look()
    assert actors.asked == (["mend"] if while_busy else [])
    actors.running = 0
    memory.look()
    memory.look()
    assert actors.asked == ["mend"]
