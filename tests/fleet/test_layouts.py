"""Whole runs on several real raylets that join and die: each samples and learns what one process does without Ray.
PACELINE_EVERY_LAYOUT=1 with `-m long`: every scenario in every layout. More: test_fleet_chaos.py."""

import os

import pytest

from launch.local import RunRecord
from launch.observe.journal import read
from tests.fleet.layouts import CPU, LAYOUTS, SCENARIOS, STEPS, Act, Case, Job, act, difference, survive_alone
from tests.fleet.nodes import Nodes
from tests.notices.metadata import Aws
from tests.train.conftest import SHARP, Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # beside four busy processes
LONG = [("colocated", "head"), ("embedded", "drain")]
if os.environ.get("PACELINE_EVERY_LAYOUT"):
    LONG = [(layout, scenario) for layout in LAYOUTS for scenario in SCENARIOS]


def job(nodes: Nodes, runs: Runs, layout: str, *, workers: str = "2") -> Job:
    """A run that begins, on nodes of that layout."""
    for node, has in LAYOUTS[layout].nodes.items():
        nodes.add(node, cpus=has.cpus, gpus=has.gpus, resources=has.resources or {})
    run = runs.root / layout
    settings = (
        SHARP,
        STEPS,
        "cluster.spot.provider=none",
        f"rollout.workers={workers}",
        *CPU,
        *LAYOUTS[layout].overrides,
    )
    return Job(nodes, runs.config, runs.overrides(run.name, *settings), run)


def survive(begun: Job, layout: str, *acts: Act) -> list[str]:
    """All acts happen, the run ends by itself; the kinds of its events."""
    try:
        for deed in acts:
            act(deed, begun, LAYOUTS[layout].newcomer, Aws())
        assert begun.ended() == 0, begun.tail()
    finally:
        begun.close()
        for name in begun.nodes.names:
            begun.nodes.end_node(name)
    return [event["kind"] for event in read(begun.run / "events.jsonl")]


@pytest.mark.long
def test_embedded_an_elastic_run_loses_a_node_while_another_joins(
    nodes: Nodes, runs: Runs, one_process: RunRecord
) -> None:
    begun = job(nodes, runs, "embedded", workers="{min: 2, max: 3}")
    kinds = survive(begun, "embedded", Act(2, "rollout", "add", "x"), Act(3, "rollout", "kill", "rollout"))
    assert difference(one_process, begun.run) is None
    assert "worker_lost" in kinds


def test_disaggregated_the_learners_node_and_a_workers_are_lost(
    nodes: Nodes, runs: Runs, one_process: RunRecord
) -> None:
    begun = job(nodes, runs, "disaggregated")
    acts = (
        Act(1, "rollout", "add", "x"),
        Act(2, "learn", "kill", "learner"),
        Act(3, "rollout", "add", "y"),
        Act(4, "rollout", "kill", "rollout"),
    )
    kinds = survive(begun, "disaggregated", *acts)
    assert difference(one_process, begun.run) is None
    assert "learner_restarted" in kinds
    assert "worker_lost" in kinds


@pytest.mark.long
@pytest.mark.parametrize(("layout", "scenario"), LONG)
def test_a_run_is_the_same_whatever_becomes_of_its_nodes(
    runs: Runs, one_process: RunRecord, layout: str, scenario: str
) -> None:
    acts, more = SCENARIOS[scenario]
    survive_alone(Case(f"{layout}-{scenario}", layout, acts, (*more,)), runs, one_process)
