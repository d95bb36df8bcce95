"""Find the faults of a file that describes a cluster: all at once, each with its key and remedy."""

import copy
import difflib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from launch.config import Issue
from launch.errors import UsageError

# Of Ray's launcher; those whose spot notices Paceline receives come first.
PROVIDERS = ("aws", "gcp", "azure", "aliyun", "external", "local", "vsphere")
_KINDS = ("RayCluster", "RayJob")
_PINNED = re.compile(r"\bray(?:\[[^\]]*\])?\s*((?:[=~!<>]=|[<>])\s*[0-9][0-9a-z.*,=~!<> ]*)")
_IMAGE = re.compile(r"(?:^|/)ray(?:-ml|-llm)?:([0-9]+(?:\.[0-9]+)+)")  # of Ray's own images


def check_manifest(path: Path) -> list[Issue]:
    """Check a file for `ray up`, or with KubeRay manifests (RayJob, RayCluster; several in one file are all checked).

    Raises UsageError for a file that is neither."""
    try:
        documents = [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    if not documents or not all(isinstance(each, dict) for each in documents):
        raise UsageError(f"{path} holds no description of a cluster")
    found: list[Issue] = []
    for document in documents:
        if "apiVersion" in document:
            found += _kuberay(document)
        elif "provider" in document or "cluster_name" in document:
            found += _launcher(document)
        else:
            raise UsageError(
                f"{path} describes no cluster: no `provider` (Ray's cluster launcher), no `apiVersion` (KubeRay)",
                remedy="see cluster.yaml, examples/cluster/gcp.yaml and examples/cluster/",
            )
    return found


def _kuberay(document: Mapping[str, Any]) -> Iterator[Issue]:
    if not str(document["apiVersion"]).startswith("ray.io/"):
        return  # a claim or a secret: its consumer checks it
    kind = document.get("kind")
    if kind not in _KINDS:
        yield Issue("kind", f"{kind} is not checked here", remedy=f"one of: {', '.join(_KINDS)}")
        return
    faults = list(dict.fromkeys(_of_schema({**_schema(), "$ref": f"#/$defs/{kind}"}, document)))
    if faults:
        yield from faults
        return
    spec, key = document["spec"], "spec"
    if kind == "RayJob":
        spec, key = spec.get("rayClusterSpec"), "spec.rayClusterSpec"
    if spec is not None:
        yield from _ray_cluster(spec, key)


@cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("kuberay.yaml").read_text(encoding="utf-8"))
    return schema


def _ray_cluster(cluster: Mapping[str, Any], key: str) -> Iterator[Issue]:
    installed, given = version("ray"), cluster.get("rayVersion")
    if given != installed:
        yield Issue(
            f"{key}.rayVersion",
            f"{given or 'missing'}, but the Ray that is installed here is {installed}",
            remedy=f"set rayVersion: {installed} and build the image from this checkout, or install that Ray here",
        )
    if cluster.get("authOptions") is None or cluster["authOptions"].get("mode", "token") != "token":
        yield Issue(
            f"{key}.authOptions",
            "without a token whoever reaches the head's ports can run code in the pods",
            remedy="set authOptions: {mode: token} (KubeRay 1.5.1 or later)",
        )
    groups = cluster.get("workerGroupSpecs", [])
    for number, group in enumerate(groups):
        where, least, most = f"{key}.workerGroupSpecs.{number}", group["minReplicas"], group["maxReplicas"]
        replicas = group.get("replicas")
        if most < least:
            yield Issue(f"{where}.maxReplicas", f"{most} is less than minReplicas = {least}")
        elif replicas is not None and not least <= replicas <= most:
            message = f"{replicas} is not between minReplicas = {least} and maxReplicas = {most}"
            yield Issue(f"{where}.replicas", message)
        if least < most and not cluster.get("enableInTreeAutoscaling"):
            yield Issue(
                f"{where}.maxReplicas",
                f"{least} to {most} pods of group {group['groupName']}, but nobody scales it",
                remedy=f"set {key}.enableInTreeAutoscaling: true, or equal numbers",
            )
    for group in (cluster["headGroupSpec"], *groups):
        for container in group["template"]["spec"]["containers"]:
            yield from _image(f"{key} ({container['name']}).image", container["image"])
    names = [group["groupName"] for group in groups]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Issue(f"{key}.workerGroupSpecs", f"there are {names.count(name)} groups of the name {name}")


def _image(key: str, image: object) -> Iterator[Issue]:
    """Check an image of Ray, whose tag names the version. Other images cannot be checked."""
    installed = version("ray")
    if (found := _IMAGE.search(str(image))) is not None and found[1] != installed:
        yield Issue(
            key,
            f"{image} holds Ray {found[1]}, but the Ray that is installed here is {installed}",
            remedy="build the image from this checkout (Dockerfile)",
        )


def _of_schema(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[Issue]:
    """Yield what JSON schema draft 2020-12 refuses: unknown and missing fields by their own keys, some repeatedly."""
    import jsonschema

    of_draft = jsonschema.Draft202012Validator
    integers = of_draft.TYPE_CHECKER.redefine("integer", _is_integer)  # the draft's own accepts 1.0
    validator = jsonschema.validators.extend(of_draft, type_checker=integers)  # type: ignore[no-untyped-call]
    for fault in validator(schema).iter_errors(document):
        key = ".".join(map(str, fault.absolute_path))
        match fault.validator:
            case "additionalProperties":
                for name in sorted(fault.instance.keys() - fault.schema["properties"].keys(), key=str):
                    yield Issue(
                        f"{key}.{name}".lstrip("."),
                        "KubeRay has no such field here (of its API up to 1.6)",
                        remedy="an API server drops it silently",
                    )
            case "required":
                for name in fault.validator_value:
                    if name not in fault.instance:
                        yield Issue(f"{key}.{name}".lstrip("."), "is required")
            case _:
                yield Issue(key, fault.message)


def _is_integer(checker: object, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _launcher(document: Mapping[str, Any]) -> Iterator[Issue]:
    provider = document.get("provider")
    cloud = provider.get("type") if isinstance(provider, dict) else None
    if cloud not in PROVIDERS:
        close = difflib.get_close_matches(str(cloud), PROVIDERS, n=1)
        yield Issue(
            "provider.type",
            f"{cloud} is no cloud that Ray's launcher knows" + (f"; did you mean {close[0]}?" if close else ""),
            remedy=f"one of: {', '.join(PROVIDERS)}; on Kubernetes use KubeRay (examples/cluster/kuberay-cluster.yaml)",
        )
        return
    faults = list(_of_rays_schema(document))
    yield from faults or _of_rays_preparation(document)
    yield from _commands(document)
    docker = document.get("docker")
    for name in ("image", "head_image", "worker_image"):
        if isinstance(docker, dict) and name in docker:
            yield from _image(f"docker.{name}", docker[name])
    types = document.get("available_node_types")
    for name, node in (types if isinstance(types, dict) else {}).items():
        least, most = (node.get(f"{end}_workers") if isinstance(node, dict) else None for end in ("min", "max"))
        if isinstance(least, int) and isinstance(most, int) and least > most:
            yield Issue(f"available_node_types.{name}.max_workers", f"{most} is less than min_workers = {least}")


def _of_rays_schema(document: Mapping[str, Any]) -> Iterator[Issue]:
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text(encoding="utf-8"))
    for fault in jsonschema.Draft7Validator(schema).iter_errors(document):
        yield Issue(".".join(map(str, fault.absolute_path)), fault.message)


def _of_rays_preparation(document: Mapping[str, Any]) -> Iterator[Issue]:
    """Run what `ray up` does before it contacts the cloud."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    logging.getLogger("ray.autoscaler._private.util").setLevel(logging.WARNING)  # it logs what it fills in
    try:
        validate_config(prepare_config(copy.deepcopy(dict(document))))
    except Exception as error:  # Ray raises any exception
        yield Issue("", f"Ray would not take it: {next(iter(str(error).splitlines()), type(error).__name__)}")


def _commands(document: Mapping[str, Any]) -> Iterator[Issue]:
    installed = version("ray")
    for key, commands in document.items():
        if not key.endswith("_commands") or not isinstance(commands, Sequence):
            continue
        for command in map(str, commands):
            if re.search(r"\bray start\b", command) and "RAY_AUTH_MODE=token" not in command:
                yield Issue(
                    key,
                    "starts Ray without its token: whoever reaches the head's ports can run code on the cluster",
                    remedy="begin the command with RAY_AUTH_MODE=token (docs/tutorials/cluster.md, The token)",
                )
            for pinned in _PINNED.findall(command):
                if not _allows(pinned, installed):
                    yield Issue(
                        key,
                        f"installs Ray {pinned.strip().removeprefix('==')}, but the Ray that is installed here is "
                        f"{installed}",
                        remedy=f"pin ray=={installed}, or install that Ray here: they must be the same",
                    )


def _allows(pinned: str, installed: str) -> bool:
    """Whether a requirement allows the installed Ray and excludes the next release, which a node would get some day.
    True for text that is no requirement, which another check reports."""
    major, minor = (int(part) for part in installed.split(".")[:2])
    try:
        wanted = SpecifierSet(pinned.strip(" ,"))
        return installed in wanted and f"{major}.{minor + 1}.0" not in wanted
    except InvalidSpecifier:
        return True
