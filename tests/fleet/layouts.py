"""Whole runs in every layout on a cluster whose nodes die, join, drain and lose their head.

Each run is the command line on a Ray cluster of several nodes on this machine (`tests.fleet.nodes`): raylets are real,
GPUs and custom resources pretended, engines and learner compute on CPU. What a run must sample and learn is what one
process does without Ray (`launch.local`): the same responses, rewards, losses and gradient norms. Runs must
end by themselves, and leave no process and no shared memory.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from actors.notice_watcher import agent_of
from launch.errors import RayLostError
from launch.local import RunRecord
from launch.observe import now
from launch.observe.journal import read
from tests.fleet.nodes import Nodes
from tests.notices.metadata import Aws, serving
from tests.train.conftest import SHARP, Runs

LEARNED = ("loss/mean", "grad_norm/mean", "reward/mean", "groups/used", "tokens/generated", "logprob_gap/mean", "lr")
ROOT = Path(__file__).parents[2]
STEPS = "run.steps=12"  # of less than a second: a node takes one to join
RAYS_EXIT = 1  # Ray's core ends a driver without a raylet, now and then before the driver's own watch does
RUN_TIMEOUT_S = 300.0
NOTICE_S = 10.0  # after a notice, at most: then the node goes
_POLL_S = 0.02

# lose: the raylet alone, and what hangs on it ends by itself. notice: of the cloud, and the node goes soon after.
Deed = Literal["add", "kill", "lose", "drain", "notice", "kill_process", "terminate_process", "restart_head"]
Phase = Literal["rollout", "learn", "publish"]


@dataclass(frozen=True, slots=True)
class Node:
    """What it pretends to have."""

    cpus: int = 2
    gpus: int = 0
    resources: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes by name, and the run's keys. `first`, `learner`: the node of a rollout worker, and of the learner."""

    nodes: Mapping[str, Node]
    overrides: tuple[str, ...]
    newcomer: Node  # has room for what a lost node held


@dataclass(frozen=True, slots=True)
class Act:
    """What happens when the run is in that phase of that RL step. `node`: the name of one; "rollout", "learner": one on
    which a rollout worker (and no learner), or the learner's rank 0 runs."""

    step: int
    phase: Phase
    deed: Deed
    node: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    name: str
    layout: str
    acts: tuple[Act, ...] = ()
    overrides: tuple[str, ...] = ()


CPU = ("rollout.engine.device=cpu", "learner.device=cpu", "learner.threads=1")
LAYOUTS = {
    "embedded": Layout(
        {"a": Node(cpus=1), "b": Node(cpus=1), "c": Node(cpus=1)}, ("cluster.layout=embedded",), Node(cpus=1)
    ),
    "colocated": Layout(
        {"a": Node(gpus=1), "b": Node(gpus=1)},
        ("cluster.layout=colocated", "cluster.gpus_per_worker=1", "cluster.gpus_per_learner=1"),
        Node(gpus=1),
    ),
    "disaggregated": Layout(
        {
            "a": Node(gpus=1, resources={"rollout": 1}),
            "b": Node(gpus=1, resources={"rollout": 1}),
            "l": Node(gpus=1, resources={"learner": 1}),
        },
        (
            "cluster.layout=disaggregated",
            "cluster.rollout_resource=rollout",
            "cluster.learner_resource=learner",
        ),
        Node(gpus=1, resources={"rollout": 1, "learner": 1}),
    ),
}
MORE = ("rollout.workers={min: 2, max: 3}",)
SCENARIOS: dict[str, tuple[tuple[Act, ...], tuple[str, ...]]] = {
    "undisturbed": ((), ()),
    "join": ((Act(2, "rollout", "add", "x"),), MORE),
    "worker_node": ((Act(2, "rollout", "add", "x"), Act(2, "rollout", "kill", "rollout")), ()),
    "worker_node_orderly": ((Act(2, "rollout", "add", "x"), Act(2, "rollout", "lose", "rollout")), ()),
    "node_while_learning": ((Act(2, "learn", "add", "x"), Act(2, "learn", "kill", "rollout")), ()),
    "node_while_publishing": ((Act(2, "publish", "add", "x"), Act(2, "publish", "kill", "rollout")), ()),
    "learner_node": ((Act(2, "learn", "add", "x"), Act(3, "learn", "kill", "learner")), ()),
    "learner_node_while_sampling": ((Act(2, "learn", "add", "x"), Act(3, "rollout", "kill", "learner")), ()),
    "join_and_death": ((Act(2, "rollout", "add", "x"), Act(3, "rollout", "kill", "rollout")), MORE),
    "drain": ((Act(2, "rollout", "add", "x"), Act(2, "rollout", "drain", "rollout")), MORE),
    "notice": ((Act(2, "rollout", "add", "x"), Act(2, "rollout", "notice", "rollout")), MORE),
    "head": ((Act(3, "rollout", "restart_head"),), ()),
}


class Job:
    """The command line, in a process of its own on a cluster of nodes."""

    def __init__(self, nodes: Nodes, config: Path, overrides: Sequence[str], run: Path) -> None:
        self.nodes, self.run = nodes, run
        self._words = [sys.executable, "-m", "launch", "train", str(config), *overrides]
        self.log = run.with_name(f"{run.name}.log")
        self._process = self._start()

    def _start(self, *flags: str) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*self._words, *flags], env=self.nodes.environment(), stdout=log, stderr=log, cwd=ROOT
            )

    def reach(self, step: int, phase: Phase) -> None:
        """Wait until the run is in that phase of that step, or past it; of rollouts a third has finished then. Raises
        RuntimeError if it ends before."""
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while not self._reached(step, phase):
            self.check()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"it did not get to step {step} in {RUN_TIMEOUT_S:g} s: {self.tail()}")
            time.sleep(_POLL_S)

    def _reached(self, step: int, phase: Phase) -> bool:
        at = now.read(self.run)
        if at is None or at.phase not in (order := ("rollout", "learn", "publish")):
            return at is not None and at.step >= step
        begun = at.step + 1, order.index(at.phase)
        wanted = step, order.index(phase)
        return begun > wanted or (begun == wanted and (phase != "rollout" or 3 * at.done >= at.total > 0))

    def check(self) -> None:
        """Raises RuntimeError if it has ended."""
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"it ended with {code}: {self.tail()}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The driver does nothing meanwhile: a run of seconds would be over before a node is up."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def ended(self) -> int:
        """Its exit code."""
        return self._process.wait(RUN_TIMEOUT_S)

    def resume(self) -> None:
        """The same command again, as a supervisor would."""
        self._process = self._start("--resume-or-start")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def tail(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


def act(deed: Act, job: Job, newcomer: Node, cloud: Aws) -> str:
    """Do it; which node it was. Raises RuntimeError if the run has ended."""
    nodes = job.nodes
    job.reach(deed.step, deed.phase)
    match deed.deed:
        case "add":
            with job.paused():
                nodes.add(deed.node, cpus=newcomer.cpus, gpus=newcomer.gpus, resources=newcomer.resources or {})
            return deed.node
        case "restart_head":
            nodes.kill_head()
            if (code := job.ended()) not in (RayLostError.exit_code, RAYS_EXIT):
                raise RuntimeError(f"the run whose head was lost ended with {code}: {job.tail()}")
            nodes.restart_head()
            job.resume()
            return "head"
    name = victim(job, deed.node)
    match deed.deed:
        case "drain":
            nodes.drain(name)
        case "notice":
            notified = agent_of(nodes.id(name))
            cloud.end(lambda agent: agent == notified)
            deadline_s = time.monotonic() + NOTICE_S
            while time.monotonic() < deadline_s and any(_is("rollout", title) for title, _ in nodes.actors(name)):
                time.sleep(_POLL_S)
            nodes.kill(name)
        case "kill_process" | "terminate_process":
            number = signal.SIGKILL if deed.deed == "kill_process" else signal.SIGTERM
            for title, pid in nodes.actors(name):
                if _is(deed.node, title):
                    os.kill(pid, number)
        case "kill" | "lose":
            nodes.kill(name, at_once=deed.deed == "kill")
        case other:
            assert_never(other)
    return name


def victim(job: Job, what: str) -> str:
    """The name of the node on which `what` runs; for rollout workers one without the learner, if there is one. Waits
    for one that is just being started. Raises RuntimeError if the run ends meanwhile."""
    nodes = job.nodes
    if what not in ("learner", "rollout"):
        return what
    while True:
        titles = {name: [title for title, _ in nodes.actors(name)] for name in nodes.names}
        found = [name for name, of in titles.items() if any(_is(what, title) for title in of)]
        found.sort(key=lambda name: what == "rollout" and any(_is("learner", title) for title in titles[name]))
        if found:
            return found[0]
        job.check()
        time.sleep(_POLL_S)


def _is(what: str, title: str) -> bool:
    return what in title.lower()


def difference(record: RunRecord, run: Path) -> str | None:
    """The first thing in which the run is not what one process does; None: nothing."""
    rows = [row for row in read(run / "metrics.jsonl") if row["kind"] == "step"]
    if len(rows) != len(record.steps):
        return f"{len(rows)} RL steps, not {len(record.steps)}"
    for row, step in zip(rows, record.steps, strict=True):
        for name in LEARNED:
            if row.get(name) != step.metrics.get(name):  # a step whose groups all tell nothing has no loss
                return f"{name} of step {row['step']} is {row.get(name)!r}, not {step.metrics.get(name)!r}"
    said = sorted((s["step"], s["prompt"], s["response"], s["reward"]) for s in read(run / "samples.jsonl"))
    told = sorted((step, s.prompt, s.response, s.reward) for step, of in record.responses.items() for s in of)
    if said != told:
        other = next((pair for pair in zip(said, told, strict=False) if pair[0] != pair[1]), "one ends early")
        return f"{len(said)} and {len(told)} responses; {other}"
    evaluated = [
        {k: v for k, v in row.items() if k.startswith("eval/")}
        for row in read(run / "metrics.jsonl")
        if row["kind"] == "eval"
    ]
    return None if evaluated == list(record.evaluations.values()) else "evaluations"


class TooLateError(RuntimeError):
    """The run was over before its moment came."""


def survive_alone(case: Case, runs: Runs, record: RunRecord) -> list[str]:
    """The run of that case on a cluster of its own: all acts happen, it ends by itself as `record` says, and leaves
    nothing; the kinds of its events. Raises TooLateError."""
    layout, folder = LAYOUTS[case.layout], runs.root / case.name
    shutil.rmtree(folder, ignore_errors=True)
    cloud, done = Aws(), 0
    with (
        tempfile.TemporaryDirectory(prefix="pln", dir="/tmp", ignore_cleanup_errors=True) as short,
        serving(cloud) as url,
    ):
        spot = f"cluster.spot={{provider: aws, base_url: {url!r}, poll_s: 0.2}}"
        settings = (SHARP, STEPS, "checkpoint.every=1", "cluster.ray_timeout_s=5", spot, *CPU, *layout.overrides)
        with Nodes(Path(short), cpus=0) as nodes:
            for name, has in layout.nodes.items():
                nodes.add(name, cpus=has.cpus, gpus=has.gpus, resources=has.resources or {})
            job = Job(nodes, runs.config, runs.overrides(case.name, *settings, *case.overrides), folder)
            try:
                for deed in case.acts:
                    act(deed, job, layout.newcomer, cloud)
                    done += 1
                code = job.ended()
            except RuntimeError:
                if done == len(case.acts) or job.ended() != 0:
                    raise
                code = 0
            finally:
                job.close()
        assert not nodes.left, nodes.left
    assert code == 0, job.tail()
    assert difference(record, folder) is None
    if done < len(case.acts):
        raise TooLateError(f"{case.name} did {done} of {len(case.acts)} acts")
    return [event["kind"] for event in read(folder / "events.jsonl")]
