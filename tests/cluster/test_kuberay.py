"""KubeRay's manifests: field by field (an unknown one is an error), against the run that goes with them and the Ray
that is installed. And files of Ray's launcher, by the same check."""

import copy
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from config.tree import Config
from launch.config import Issue
from launch.errors import UsageError
from launch.manifests import check_manifest

ROOT = Path(__file__).parents[2]
FILES = {"RayJob": "examples/cluster/kuberay.yaml", "RayCluster": "examples/cluster/kuberay-cluster.yaml"}
Manifest = dict[str, Any]


@pytest.fixture(params=FILES)
def manifest(request: pytest.FixtureRequest) -> Manifest:
    loaded: Manifest = yaml.safe_load((ROOT / FILES[request.param]).read_text(encoding="utf-8"))
    assert loaded["kind"] == request.param
    return loaded


def cluster_of(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest["spec"]
    return spec if manifest["kind"] == "RayCluster" else spec["rayClusterSpec"]


def group(manifest: Manifest, name: str) -> Manifest:
    (found,) = (each for each in cluster_of(manifest)["workerGroupSpecs"] if each["groupName"] == name)
    return dict(found)


def checked(manifest: Manifest, tmp_path: Path) -> list[Issue]:
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest), encoding="utf-8")
    return check_manifest(path)


def test_nothing_is_found_in_them(manifest: Manifest, tmp_path: Path) -> None:
    assert checked(manifest, tmp_path) == []


def pod(manifest: Manifest) -> Manifest:
    return dict(cluster_of(manifest)["headGroupSpec"]["template"]["spec"])


@pytest.mark.parametrize(
    ("damage", "key", "says"),
    [
        (lambda m: m["spec"].update(rayVersoin="2.60.0"), "rayVersoin", "no such field"),
        (
            lambda m: cluster_of(m)["headGroupSpec"].update(rayStartParam={}),
            "headGroupSpec.rayStartParam",
            "no such field",
        ),
        (lambda m: pod(m)["containers"][0].update(volumeMount=[]), "containers.0.volumeMount", "no such field"),
        (
            lambda m: cluster_of(m)["headGroupSpec"]["template"]["spec"].update(nodeselector={}),
            "nodeselector",
            "no such",
        ),
        (
            lambda m: cluster_of(m)["workerGroupSpecs"][1].pop("minReplicas"),
            "workerGroupSpecs.1.minReplicas",
            "required",
        ),
        (lambda m: cluster_of(m)["workerGroupSpecs"][1].update(minReplicas="1"), "minReplicas", "integer"),
        (lambda m: cluster_of(m)["workerGroupSpecs"][1].update(minReplicas=1.0), "minReplicas", "integer"),
        (lambda m: cluster_of(m)["workerGroupSpecs"][1].update(minReplicas=True), "minReplicas", "integer"),
        (lambda m: cluster_of(m).update(rayVersion="2.59.0"), "rayVersion", f"installed here is {version('ray')}"),
        (lambda m: cluster_of(m).pop("rayVersion"), "rayVersion", "missing"),
        (lambda m: cluster_of(m).pop("authOptions"), "authOptions", "without a token"),
        (lambda m: cluster_of(m)["authOptions"].update(mode="tokens"), "authOptions.mode", "['disabled', 'token']"),
        (lambda m: cluster_of(m).update(enableInTreeAutoscaling=False), "maxReplicas", "nobody scales it"),
        (lambda m: cluster_of(m)["workerGroupSpecs"][1].update(maxReplicas=-1), "maxReplicas", "minimum of 0"),
        (lambda m: cluster_of(m)["workerGroupSpecs"][1].update(groupName="learner"), "workerGroupSpecs", "2 groups"),
        (lambda m: cluster_of(m)["workerGroupSpecs"][0].update(replicas=7), "replicas", "7 is not between"),
        (
            lambda m: pod(m)["containers"][0].update(image="rayproject/ray:2.40.0-py311-gpu"),
            "image",
            "holds Ray 2.40.0",
        ),
        (lambda m: pod(m)["containers"][0].update(lifecycle={"preStopp": {}}), "lifecycle", "'preStop'"),
        (lambda m: m.update(kind="RayServices"), "kind", "RayServices is not checked here"),
        (lambda m: m.update(apiVersion="ray.io/v2"), "apiVersion", "ray.io/v1"),
    ],
)
def test_damage_is_found_and_named(
    manifest: Manifest, tmp_path: Path, damage: Callable[[Manifest], object], key: str, says: str
) -> None:
    damaged = copy.deepcopy(manifest)
    damage(damaged)
    found = checked(damaged, tmp_path)
    assert [issue for issue in found if key in issue.key and says in issue.message], found


def test_each_fault_is_told_once(manifest: Manifest, tmp_path: Path) -> None:
    damaged = copy.deepcopy(manifest)
    second = cluster_of(damaged)["workerGroupSpecs"][1]
    del second["minReplicas"], second["maxReplicas"]
    found = [issue.key.rpartition("workerGroupSpecs.")[2] for issue in checked(damaged, tmp_path)]
    assert sorted(found) == ["1.maxReplicas", "1.minReplicas"]


def test_unknown_keys_that_are_no_texts_are_named(manifest: Manifest, tmp_path: Path) -> None:
    """YAML 1.1 reads `on:` as true."""
    damaged = copy.deepcopy(manifest)
    damaged["spec"] |= {True: 1, "rayVersoin": "2.60.0"}
    assert {issue.key for issue in checked(damaged, tmp_path)} >= {"spec.True", "spec.rayVersoin"}


def test_the_run_fits_the_pods_of_its_cluster(manifest: Manifest) -> None:
    """Every resource that the run asks for is offered by one group, at least and at most as many as it may want."""
    path = "examples/cluster/qwen2.5-7b-gsm8k.yaml"
    if manifest["kind"] == "RayJob":
        named = re.search(r"/opt/paceline/(\S+\.yaml)", manifest["spec"]["entrypoint"])
        assert named is not None
        assert named[1] == path
    run = Config.model_validate(yaml.safe_load((ROOT / path).read_text(encoding="utf-8")))
    assert run.cluster.learner_resource is not None
    assert run.cluster.rollout_resource is not None
    learners = run.learner.ranks * run.cluster.gpus_per_learner
    workers = run.rollout.workers.max * run.cluster.gpus_per_worker
    for resource, gpus in {run.cluster.learner_resource: learners, run.cluster.rollout_resource: workers}.items():
        group = next(
            each
            for each in cluster_of(manifest)["workerGroupSpecs"]
            if resource in json.loads(json.loads(each["rayStartParams"]["resources"]))
        )
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert gpus <= group["maxReplicas"] * int(limits["nvidia.com/gpu"])


def test_every_pod_has_the_shared_files_shared_memory_and_no_root(manifest: Manifest) -> None:
    cluster = cluster_of(manifest)
    for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = each["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000  # the image's (Dockerfile)


def test_a_run_whose_cluster_was_lost_is_tried_again_and_goes_on() -> None:
    job = yaml.safe_load((ROOT / FILES["RayJob"]).read_text(encoding="utf-8"))["spec"]
    assert job["backoffLimit"] > 0
    assert job["entrypoint"].endswith("--resume-or-start")


def test_spot_pods_leave_within_the_time_that_they_have() -> None:
    for name in FILES.values():
        spot_pods(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")))


def spot_pods(cluster: Manifest) -> None:
    rollout = group(cluster, "rollout")
    pod = rollout["template"]["spec"]
    (command,) = (part for part in pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] if "leave" in part)
    within = re.search(r"--within (\d+)", command)
    assert within is not None
    assert 5 < int(within[1]) < pod.get("terminationGracePeriodSeconds", 30)
    assert group(cluster, "learner")["minReplicas"] == 1
    assert "lifecycle" not in group(cluster, "learner")["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is not YAML"),
        ("- 1\n", "holds no description"),
        ("", "holds no description"),
        ("run: {}\n", "no `provider`"),
    ],
)
def test_what_describes_no_cluster_is_said(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        check_manifest(path)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        check_manifest(tmp_path / "x.yaml")


def launcher(tmp_path: Path, change: Callable[[Manifest], object]) -> list[Issue]:
    raw = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    change(raw)
    return checked(raw, tmp_path)


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        (lambda raw: raw["provider"].update(type="asw"), "provider.type", "did you mean aws"),
        (lambda raw: raw["provider"].update(type="lambda"), "provider.type", "lambda is no cloud"),
        (lambda raw: raw.update(max_wrokers=1), "", "max_wrokers"),
        (lambda raw: raw.update(head_node_type="haed"), "", "head_node_type"),
        (
            lambda raw: raw["setup_commands"].append("pip install 'ray[default]==2.59.1'"),
            "setup_commands",
            f"installs Ray 2.59.1, but the Ray that is installed here is {version('ray')}",
        ),
        (
            lambda raw: raw["worker_start_ray_commands"].append("ray start --address=x"),
            "worker_start_ray_commands",
            "without its token",
        ),
    ],
)
def test_files_of_the_launcher_are_checked_too(
    tmp_path: Path, change: Callable[[Manifest], object], key: str, says: str
) -> None:
    found = launcher(tmp_path, change)
    assert [issue for issue in found if issue.key == key and says in issue.message], found


def test_an_unknown_cloud_comes_with_the_choices(tmp_path: Path) -> None:
    (issue,) = launcher(tmp_path, lambda raw: raw["provider"].update(type="asw"))
    assert "aws, gcp, azure" in issue.remedy


def test_the_files_of_the_repository_pass() -> None:
    assert [check_manifest(ROOT / name) for name in ("cluster.yaml", "examples/cluster/gcp.yaml", *FILES.values())] == [
        []
    ] * 4


def test_whoever_asks_for_gpus_tolerates_their_taint(manifest: Manifest) -> None:
    for name in ("learner", "rollout"):
        spec = group(manifest, name)["template"]["spec"]
        assert "nvidia.com/gpu" in spec["containers"][0]["resources"]["limits"]
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"setup_commands": ["pip install 'ray~=2.40'"]}, "setup_commands"),
        ({"setup_commands": ["pip install 'ray[default]==2.40.*' boto3"]}, "setup_commands"),
        (
            {
                "setup_commands": [
                    f"pip install 'ray[default]=={version('ray')[:-1]}*' 'ray~={version('ray')}' ray_other==1"
                ]
            },
            "",
        ),
        ({"docker": {"image": "rayproject/ray:2.40.0", "container_name": "ray"}}, "docker.image"),
        ({"docker": {"image": "ours/paceline:1", "container_name": "ray"}}, ""),
    ],
)
def test_another_ray_is_found_however_it_comes(change: Manifest, key: str, tmp_path: Path) -> None:
    loaded = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    assert [issue.key for issue in checked(loaded | change, tmp_path)] == ([key] if key else [])


def test_no_more_workers_at_least_than_at_most(tmp_path: Path) -> None:
    loaded = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    node = next(name for name in loaded["available_node_types"] if name != loaded["head_node_type"])
    loaded["available_node_types"][node] |= {"min_workers": 3, "max_workers": 2}
    assert f"available_node_types.{node}.max_workers" in [issue.key for issue in checked(loaded, tmp_path)]
