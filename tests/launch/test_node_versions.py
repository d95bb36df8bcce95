"""Nodes whose installation differs: what is compared, who is refused, what is said; on a scripted cluster, and once on
real raylets of which one finds another torch."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import NodeDiedError, RayTaskError

from launch.cluster.installed import NONE, code, installed
from launch.cluster.versions import NodeRefused, NodeVersions, RefusedGone, differences
from launch.errors import OUR_PACKAGES, PacelineError
from tests.context import Heard

MINE = {"Python": "3.11", "Ray": "2.60.0", "torch": "2.13.0", "Paceline": "0.1.0"}
ROOT = Path(__file__).parents[2]


@dataclass
class Nodes:
    """A cluster whose answers come when they are given."""

    here: dict[str, str]
    answers: dict[str, Mapping[str, str] | Exception] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    heard: Heard = field(default_factory=Heard)
    refused: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    now_s: float = 0.0

    @property
    def events(self) -> list[tuple[str, str]]:
        return self.heard

    def versions(self, **more: object) -> NodeVersions:
        return Versions(
            self,
            observer=self.heard,
            mine=MINE,
            clock=lambda: self.now_s,
            **more,
        )

    def ask(self, node_id: str) -> str:
        self.asked.append(node_id)
        return f"{node_id} {len(self.asked)}"

    def wait(self, asked: Sequence[str], timeout_s: float) -> list[str]:
        self.now_s += timeout_s
        return [each for each in asked if each.split()[0] in self.answers][:1]

    def get(self, asked: str) -> Mapping[str, str]:
        answer = self.answers[asked.split()[0]]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Versions(NodeVersions):
    """Whose changes are written down."""

    def __init__(self, nodes: Nodes, **options: Any) -> None:
        super().__init__(**options)
        self._written = nodes

    def _alive(self) -> Mapping[str, str]:
        return self._written.here

    def _ask(self, node_id: str) -> Any:
        return self._written.ask(node_id)

    def _wait(self, asked: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        return self._written.wait(asked, timeout_s)

    def _get(self, asked: Any) -> Mapping[str, str]:
        return self._written.get(asked)

    def look(self, timeout_s: float = 0.0) -> list[NodeRefused | RefusedGone]:
        changed = super().look(timeout_s)
        self._written.refused += [change.node_id for change in changed if isinstance(change, NodeRefused)]
        self._written.gone += [change.node_id for change in changed if isinstance(change, RefusedGone)]
        return changed


def test_what_is_installed_is_compared_by_name_and_said_with_both_versions() -> None:
    assert differences(MINE, MINE) == []
    assert differences(MINE, MINE | {"more": "1"}) == []
    assert differences(MINE, MINE | {"torch": "2.12.0"}) == ["torch 2.12.0 where the driver has 2.13.0"]
    assert differences(MINE, {}) == [f"{name} unknown where the driver has {value}" for name, value in MINE.items()]


def test_a_refused_node_that_goes_is_forgotten_and_one_that_was_only_not_listed_is_asked_again() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1", "bbbb": "10.0.0.2"}, {"aaaa": MINE, "bbbb": {}})
    versions = nodes.versions()
    versions.look(timeout_s=1.0)
    del nodes.here["bbbb"]
    versions.look(timeout_s=1.0)
    assert (nodes.gone, versions.refused) == (["bbbb"], {})
    nodes.here["bbbb"] = "10.0.0.2"
    versions.look(timeout_s=1.0)
    assert nodes.refused == ["bbbb", "bbbb"]


def test_a_node_that_differs_is_refused_and_named_once_and_others_are_not() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1", "bbbb": "10.0.0.2"}, {"aaaa": MINE, "bbbb": MINE | {"Paceline": "0.2.0"}})
    versions = nodes.versions()
    versions.look(timeout_s=60.0)
    versions.look(timeout_s=60.0)
    versions.require_one()
    assert nodes.asked == ["aaaa", "bbbb"] or nodes.asked == ["bbbb", "aaaa"]
    reason = "node 10.0.0.2 (bbbb) has Paceline 0.2.0 where the driver has 0.1.0"
    assert versions.refused == {"bbbb": reason}
    ((kind, message),) = nodes.events
    assert kind == "node_refused"
    assert message.startswith(f"{reason}: the node is not used; install there")
    assert nodes.refused == ["bbbb"]


def test_a_node_that_joins_later_is_asked_then_without_waiting() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1"}, {"aaaa": MINE})
    versions = nodes.versions()
    versions.look(timeout_s=60.0)
    nodes.here = {"aaaa": "10.0.0.1", "cccc": "10.0.0.3"}
    nodes.now_s = 100.0
    versions.look()
    assert nodes.asked == ["aaaa", "cccc"]
    assert nodes.now_s == 100.0
    assert versions.refused == {}  # it has not answered yet
    nodes.answers["cccc"] = MINE | {"Ray": "2.59.0"}
    versions.look()
    assert nodes.refused == ["cccc"]


def test_the_cluster_is_not_listed_at_every_look() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1"}, {"aaaa": MINE})
    versions = nodes.versions()
    versions.look()
    nodes.here = {"bbbb": "10.0.0.2"}
    versions.look()
    assert nodes.asked == ["aaaa"]


def test_a_node_that_cannot_import_paceline_is_refused_with_the_reason() -> None:
    error = RayTaskError("installed", "Traceback\nModuleNotFoundError: No module named 'launch'\n", RuntimeError("x"))
    nodes = Nodes({"aaaa": "10.0.0.1"}, {"aaaa": error})
    versions = nodes.versions()
    versions.look(timeout_s=1.0)
    assert (
        "Paceline cannot be imported there (ModuleNotFoundError: No module named 'launch')" in versions.refused["aaaa"]
    )


def test_a_node_that_is_lost_while_it_is_asked_is_asked_again_and_never_for_ever() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1"}, {"aaaa": NodeDiedError("gone")})
    versions = nodes.versions()
    for at_s in range(0, 100, 10):
        nodes.now_s = float(at_s)
        versions.look()
    assert nodes.asked == ["aaaa"] * 3
    assert versions.refused == {}


def test_nobody_starts_on_a_node_before_it_has_answered_and_a_silent_one_is_not_waited_for_for_ever() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1"}, {"aaaa": MINE})
    versions = nodes.versions(trusted=["home"])
    assert versions.vouched("home")
    versions.look(timeout_s=60.0)
    assert versions.vouched("aaaa")
    nodes.here = {"aaaa": "10.0.0.1", "bbbb": "10.0.0.2", "cccc": "10.0.0.3"}
    assert not versions.vouched("bbbb")
    versions.look()  # at once, although the nodes were listed just now
    assert nodes.asked == ["aaaa", "bbbb", "cccc"] or nodes.asked == ["aaaa", "cccc", "bbbb"]
    assert not versions.vouched("bbbb")
    nodes.answers["bbbb"] = MINE | {"torch": "2.0.0"}
    versions.look()
    assert not versions.vouched("bbbb")
    assert not versions.vouched("cccc")
    assert versions.unvouched() == {"bbbb", "cccc"}
    assert versions.asking()
    nodes.now_s += 61.0
    assert versions.vouched("cccc")
    assert not versions.asking(), "bbbb is refused"
    assert versions.unvouched() == {"bbbb"}


def test_a_list_that_fails_ends_no_run_and_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes({"aaaa": "10.0.0.1"}, {"aaaa": MINE, "bbbb": MINE | {"torch": "2.0.0"}})
    versions = nodes.versions()

    def fails() -> Mapping[str, str]:
        raise RuntimeError("the head restarts")

    versions.look(timeout_s=60.0)
    nodes.now_s += 10.0
    with monkeypatch.context() as patched:
        patched.setattr(versions, "_alive", fails)
        versions.look()
    nodes.here = {"aaaa": "10.0.0.1", "bbbb": "10.0.0.2"}
    nodes.now_s += 10.0
    versions.look()
    assert list(versions.refused) == ["bbbb"]


def test_a_node_on_which_the_task_is_lost_again_and_again_may_be_used() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1"}, {"aaaa": NodeDiedError("gone")})
    versions = nodes.versions()
    for _ in range(5):
        versions.vouched("aaaa")
        versions.look()
    assert nodes.asked == ["aaaa"] * 3
    assert versions.vouched("aaaa")


def test_a_cluster_of_which_no_node_can_be_used_is_an_error_that_names_all() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1", "bbbb": "10.0.0.2"})
    nodes.answers = {"aaaa": MINE | {"torch": "2.12.0"}, "bbbb": MINE | {"Python": "3.12"}}
    versions = nodes.versions()
    versions.look(timeout_s=60.0)
    with pytest.raises(
        PacelineError, match=r"none of .* 10\.0\.0\.1 .*torch 2\.12\.0.* 10\.0\.0\.2 .*Python 3\.12"
    ) as info:
        versions.require_one()
    assert "docs/tutorials/cluster.md" in str(info.value.remedy)


def test_trusted_nodes_are_not_asked() -> None:
    nodes = Nodes({"aaaa": "10.0.0.1"})
    nodes.versions(trusted=["aaaa"]).look(timeout_s=60.0)
    assert nodes.asked == []


def test_every_value_is_known_here() -> None:
    found = installed()
    assert set(found) > MINE.keys()
    assert {name: value for name, value in found.items() if value == NONE and "native" not in name} == {}
    assert "+" not in found["torch"]


def test_code_is_told_apart_by_content_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.py").write_text("x = 1\n")
    first = code(tmp_path, ["a"])
    (tmp_path / "a/__pycache__").mkdir()
    (tmp_path / "a/__pycache__/one.pyc").write_bytes(b"x")
    assert code(tmp_path, ["a"]) == first
    (tmp_path / "a/one.py").write_text("x = 2\n")
    assert code(tmp_path, ["a"]) != first
    (tmp_path / "a/one.py").rename(tmp_path / "a/two.py")
    (tmp_path / "a/two.py").write_text("x = 1\n")
    assert code(tmp_path, ["a"]) != first


SCRIPT = """
import ray
from ray.cluster_utils import Cluster
from actors.placement import off, reserve
from actors.placement_plan import PlacementError, plan
from launch.cluster.session import ray_session
from launch.cluster.versions import NodeRefused, RefusedGone, compared
from actors.observer import RunObserver
from config.tree import ClusterOptions

class Lines(RunObserver):
    def event(self, kind, message):
        print(f"{kind}: {message}")

small = {"object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **small})
other = cluster.add_node(num_cpus=4, env_vars={"PYTHONPATH": OTHER}, **small)
cluster.wait_for_nodes()
with ray_session(address=cluster.address) as session:
    versions = compared(session, Lines())
    assert list(versions.refused) == [other.node_id], versions.refused
    made = reserve(plan(ClusterOptions(), workers=1, ranks=0, available_cpus=1.0), 20.0, versions.refused)
    where = ray.get(ray.remote(lambda: ray.get_runtime_context().get_node_id()).options(
        num_cpus=0, label_selector=off(versions.refused)).remote())
    assert where != other.node_id
    made.release()
    try:
        reserve(plan(ClusterOptions(), workers=3, ranks=0, available_cpus=4.0), 1.0, versions.refused)
    except PlacementError as error:
        print(f"PlacementError: {error}")
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_real_node_with_another_torch_is_named_and_gets_no_reservation(tmp_path: Path) -> None:
    """In a process of its own: a cluster of several raylets, with a temporary directory of its own."""
    metadata = tmp_path / "torch-9.9.9.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    temp_dir = Path(tempfile.mkdtemp(prefix="plver"))  # short: it holds Unix sockets
    (temp_dir / "ray").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(temp_dir), "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.replace("OTHER", repr(str(tmp_path)))],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    refused, placement = (line for line in done.stdout.splitlines() if line.startswith(("node_refused", "PlacementE")))
    assert "torch 9.9.9 where the driver has" in refused
    assert "not used: node" in placement
    assert "torch 9.9.9" in placement


def test_our_packages_are_all_part_of_the_code_that_is_compared() -> None:
    assert all((ROOT / package / "__init__.py").is_file() for package in OUR_PACKAGES)
