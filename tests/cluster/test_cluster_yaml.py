"""cluster.yaml (AWS) and examples/cluster/gcp.yaml: against Ray's own schema and preparation, what the clouds can be
asked for, and the run configuration that goes with them."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.tree import Config

ROOT = Path(__file__).parents[2]
GPUS_PER_NODE = 8

Cluster = dict[str, Any]


FILES = {"aws": "cluster.yaml", "gcp": "examples/cluster/gcp.yaml"}
MACHINES = {"aws": ("InstanceType", "p5.48xlarge", 192), "gcp": ("machineType", "a3-highgpu-8g", 208)}


@pytest.fixture(params=FILES)
def raw(request: pytest.FixtureRequest) -> Cluster:
    loaded: Cluster = yaml.safe_load((ROOT / FILES[request.param]).read_text(encoding="utf-8"))
    assert loaded["provider"]["type"] == request.param
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
    market = node_type["node_config"].get("InstanceMarketOptions", {}).get("MarketType")
    return market == "spot" or node_type["node_config"].get("scheduling", {}).get("provisioningModel") == "SPOT"


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
    key, machine, cpus = MACHINES[raw["provider"]["type"]]
    for name in ("learner", "rollout"):
        assert nodes[name]["node_config"][key] == machine
        assert nodes[name]["resources"]["CPU"] == cpus
        assert nodes[name]["resources"]["GPU"] == GPUS_PER_NODE
        assert nodes[name]["resources"][name] == GPUS_PER_NODE
    assert "GPU" not in nodes["head"]["resources"]


def test_every_start_command_asks_for_the_token(raw: Cluster) -> None:
    starts = [c for key in ("head", "worker") for c in raw[f"{key}_start_ray_commands"] if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert all("RAY_worker_niceness=0" in command for command in starts), "engines go before the spot trainer"
    assert "~/.ray/auth_token" in raw["file_mounts"]


def test_the_cluster_can_hold_the_run(raw: Cluster, example: Config) -> None:
    """The custom resources of the run exist, each on its own node type, and there are enough GPUs of each."""
    nodes = raw["available_node_types"]
    needs = {
        example.cluster.learner_resource: example.learner.ranks * example.cluster.gpus_per_learner,
        example.cluster.rollout_resource: example.rollout.workers.max * example.cluster.gpus_per_worker,
    }
    assert len(needs) == 2
    for resource, gpus in needs.items():
        holders = [node for node in nodes.values() if resource in node["resources"]]
        assert len(holders) == 1
        assert gpus <= holders[0]["resources"]["GPU"] * holders[0]["max_workers"]


def test_what_amazon_is_asked_for_is_a_request_that_amazon_has() -> None:
    """Every node_config with what the launcher adds, against boto3's own model of the call."""
    import boto3
    from botocore.validate import validate_parameters

    raw = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    model = boto3.Session().client("ec2", region_name="us-east-1").meta.service_model.operation_model("RunInstances")
    shape = model.input_shape
    for node in raw["available_node_types"].values():
        validate_parameters({**node["node_config"], "MinCount": 1, "MaxCount": 1}, shape)
        with pytest.raises(Exception, match="InstanceTyp"):
            validate_parameters({**node["node_config"], "InstanceTyp": "x", "MinCount": 1, "MaxCount": 1}, shape)


def test_the_spot_machines_notices_are_within_reach() -> None:
    """What cluster.spot listens to: the metadata service, and on Google Cloud the time before the switch-off."""
    aws, gcp = (yaml.safe_load((ROOT / name).read_text(encoding="utf-8")) for name in FILES.values())
    metadata = aws["available_node_types"]["rollout"]["node_config"]["MetadataOptions"]
    assert (metadata["HttpEndpoint"], metadata["HttpTokens"]) == ("enabled", "required")
    scheduling = gcp["available_node_types"]["rollout"]["node_config"]["scheduling"]
    assert int(scheduling["preemptionNoticeDuration"]["seconds"]) == 120
    assert scheduling["instanceTerminationAction"] == "DELETE"


def test_google_machines_and_their_disks_are_in_the_one_zone() -> None:
    raw = yaml.safe_load((ROOT / "examples/cluster/gcp.yaml").read_text(encoding="utf-8"))
    zone = raw["provider"]["availability_zone"]
    assert zone.startswith(raw["provider"]["region"])
    for node in raw["available_node_types"].values():
        (disk,) = node["node_config"]["disks"]
        assert disk["initializeParams"]["diskType"].startswith(f"zones/{zone}/")
        assert [each["nicType"] for each in node["node_config"]["networkInterfaces"]] == ["GVNIC"]


def test_all_nodes_have_one_image_and_install_the_same_pinned_versions(raw: Cluster) -> None:
    """Else Ray refuses a node's Python, or the run its Paceline or torch (launch/cluster/versions.py)."""

    def image(config: Cluster) -> str:
        return str(config["ImageId"] if "ImageId" in config else config["disks"][0]["initializeParams"]["sourceImage"])

    assert len({image(node["node_config"]) for node in raw["available_node_types"].values()}) == 1
    (install,) = (command for command in raw["setup_commands"] if "pip install" in command and "tar.gz" in command)
    assert "--constraint ~/paceline/constraints/tested.txt" in install
    assert any("tar -xzf ~/paceline.tar.gz" in command for command in raw["setup_commands"])
    assert not raw.get("worker_setup_commands")


def test_installing_waits_for_a_machine_that_still_installs_itself(raw: Cluster) -> None:
    installing = [one for key in raw if key.endswith("_commands") for one in raw[key] if "apt-get" in one]
    assert len(installing) == 2
    assert all(one.count("-o DPkg::Lock::Timeout=300") == one.count("apt-get") == 2 for one in installing)
    assert raw["initialization_commands"][0].startswith("cloud-init status --wait")
