"""cluster.yaml against Ray's own schema and preparation, and against the run configuration that goes with it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.config.tree import Config

ROOT = Path(__file__).parents[2]
GPUS_PER_NODE = 8

Cluster = dict[str, Any]


@pytest.fixture
def raw() -> Cluster:
    loaded: Cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def example() -> Config:
    path = ROOT / "examples/cluster/qwen2.5-7b-gsm8k.yaml"
    return Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def prepare(raw: Cluster) -> Cluster:
    """What `ray up` does before it talks to AWS: fill in the defaults, then check."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: Cluster = prepare_config(copy.deepcopy(raw))
    validate_config(prepared)
    return prepared


def is_spot(node_type: Cluster) -> bool:
    market = node_type["node_config"].get("InstanceMarketOptions", {})
    return bool(market.get("MarketType") == "spot")


def test_the_file_satisfies_rays_schema(raw: Cluster) -> None:
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(raw, schema)


def test_ray_prepares_and_accepts_it(raw: Cluster) -> None:
    nodes = prepare(raw)["available_node_types"]
    assert {name: (node.get("min_workers", 0), node["max_workers"]) for name, node in nodes.items()} == {
        "head": (0, 0),
        "learner": (1, 2),
        "rollout": (0, 8),
    }


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.update(max_wrokers=3), "max_wrokers"),
        (lambda raw: raw["available_node_types"]["rollout"].update(min_worker=1), "min_worker"),
        (lambda raw: raw.update(head_node_type="haed"), "head_node_type"),
        (lambda raw: raw.update(max_workers=0), "max_workers"),
    ],
    ids=["unknown key", "unknown key of a node type", "head type that does not exist", "fewer than min_workers"],
)
def test_damage_is_found(raw: Cluster, damage: Callable[[Cluster], None], message: str) -> None:
    """The check above can fail: the same path rejects a damaged file."""
    damage(raw)
    with pytest.raises(Exception, match=message):
        prepare(raw)


def test_only_rollout_nodes_are_spot_and_gpu_nodes_are_8xh100(raw: Cluster) -> None:
    nodes = raw["available_node_types"]
    assert {name for name, node in nodes.items() if is_spot(node)} == {"rollout"}
    for name in ("learner", "rollout"):
        assert nodes[name]["node_config"]["InstanceType"] == "p5.48xlarge"
        assert nodes[name]["resources"]["GPU"] == GPUS_PER_NODE
        assert nodes[name]["resources"][name] == GPUS_PER_NODE
    assert "GPU" not in nodes["head"]["resources"]


def test_every_start_command_asks_for_the_token(raw: Cluster) -> None:
    starts = [c for key in ("head", "worker") for c in raw[f"{key}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "~/.ray/auth_token" in raw["file_mounts"]


def test_the_cluster_can_hold_the_run(raw: Cluster, example: Config) -> None:
    """The custom resources of the run exist, each on its own node type, and there are enough GPUs of each."""
    nodes = raw["available_node_types"]
    needs = {
        example.cluster.learner_resource: example.learner.ranks * example.cluster.gpus_per_learner,
        example.cluster.rollout_resource: example.rollout.workers * example.cluster.gpus_per_worker,
    }
    assert len(needs) == 2
    for resource, gpus in needs.items():
        holders = [node for node in nodes.values() if resource in node["resources"]]
        assert len(holders) == 1
        assert gpus <= holders[0]["resources"]["GPU"] * holders[0]["max_workers"]
