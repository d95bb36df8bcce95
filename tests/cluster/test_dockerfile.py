"""The image: rules of its Dockerfile, and what stays out of it; where Docker answers, that it builds and runs."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECRET = re.compile(r"(?i)token|password|secret|credential|\.pem\b|\.key\b|id_rsa|PRIVATE")


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    rest: str


def instructions(text: str) -> Iterator[Instruction]:
    """Of a Dockerfile without heredocs: comments gone, continued lines joined."""
    joined = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or not (line.strip() or joined):
            continue
        joined += line.rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        name, _, rest = joined.strip().partition(" ")
        yield Instruction(name, " ".join(rest.split()))
        joined = ""
    assert not joined, "the last line is continued"


def faults(text: str) -> list[str]:
    """What Docker's and hadolint's rules of this kind would say."""
    found = []
    listed = list(instructions(text))
    names = [each.name for each in listed]
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "VOLUME"}
    found += [f"{name} is no instruction that is used here" for name in names if name not in known]
    for each in listed:
        if each.name == "FROM" and (":" not in each.rest or ":latest" in each.rest):
            found.append(f"{each.rest}: the base image has no fixed tag")
        if each.name in ("ENV", "ARG", "COPY", "LABEL") and SECRET.search(each.rest):
            found.append(f"{each.name} {each.rest}: a secret would stay in the image")
        if each.name == "WORKDIR" and not each.rest.startswith("/"):
            found.append(f"WORKDIR {each.rest} is not absolute")
        if each.name in ("CMD", "ENTRYPOINT"):
            try:
                json.loads(each.rest)
            except ValueError:
                found.append(f"{each.name} is not in JSON form: a shell would take its signals")
        if each.name == "RUN":
            if "sudo " in each.rest or re.search(r"(curl|wget)[^|&]*\|\s*(ba)?sh", each.rest):
                found.append("RUN uses sudo, or runs what it downloads")
            if "apt-get install" in each.rest:
                for needed in ("apt-get update &&", "--no-install-recommends", "--yes", "rm -rf /var/lib/apt/lists/*"):
                    if needed not in each.rest:
                        found.append(f"RUN apt-get install without {needed}")
            if "pip install" in each.rest:
                for needed in ("--no-cache-dir", "--constraint"):
                    if needed not in each.rest:
                        found.append(f"RUN pip install without {needed}")
    if names.count("CMD") != 1:
        found.append("not one CMD")
    users = [(number, each.rest) for number, each in enumerate(listed) if each.name == "USER"]
    if not users or users[-1][1].split(":")[0] in ("root", "0"):
        found.append("it runs as root")
    elif users[-1][0] < max(number for number, name in enumerate(names) if name == "RUN"):
        found.append("something is installed as the user that it runs as: that user could change it")
    return found


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_dockerfile_has_no_fault(text: str) -> None:
    assert faults(text) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("python:3.12-slim-bookworm", "python", "no fixed tag"),
        ("USER ray\n", "", "it runs as root"),
        ("USER ray\n", "USER root\n", "it runs as root"),
        ("--constraint constraints/tested.txt ", "", "--constraint"),
        ("--no-cache-dir ", "", "--no-cache-dir"),
        ("    && rm -rf /var/lib/apt/lists/* \\\n", "", "rm -rf"),
        ('CMD ["paceline", "--help"]', "CMD paceline --help", "JSON form"),
        ("COPY . .", "COPY . .\nENV RAY_AUTH_TOKEN=abc", "a secret"),
        ("WORKDIR /opt/paceline", "WORKDIR paceline", "not absolute"),
        ("COPY . .", "ADD . .", "ADD is no instruction"),
        ("g++ wget", "g++ wget && wget -O- http://x | sh", "downloads"),
    ],
)
def test_every_rule_can_fail(text: str, old: str, new: str, fault: str) -> None:
    assert old in text
    assert [each for each in faults(text.replace(old, new)) if fault in each]


def test_it_has_a_python_that_the_package_takes(text: str) -> None:
    base = re.search(r"^FROM python:3\.(\d+)", text, re.MULTILINE)
    assert base is not None
    assert 11 <= int(base[1]) <= 13


def ignored(path: str, patterns: list[str]) -> bool:
    """As .dockerignore has it, for patterns without exceptions: a pattern takes what it names and all below."""
    parts = path.split("/")
    for pattern in patterns:
        anywhere, bare = pattern.startswith("**/"), pattern.removeprefix("**/").rstrip("/")
        starts = range(len(parts)) if anywhere else range(1)
        depth = bare.count("/") + 1
        if any(fnmatch("/".join(parts[start : start + depth]), bare) for start in starts):
            return True
    return False


def test_keys_builds_and_downloads_stay_out_of_the_image_and_the_source_does_not() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    out = (
        *(".git/config", ".venv/bin/python", "runs/demo/run.log", "hub/model.safetensors", "native/x.so"),
        *("auth_token", "certs/tls.key", "certs/ca.pem", ".env", "home/.aws/credentials", ".ray/auth_token"),
        *("keys/coordinator-key.json", "keys/worker-key.json", "my/keys/driver-key.json", "out/a/admin-token"),
        *("out/a/coordinator-keys/allowed.json", "admin-token", "driver-key.json"),
        *("models/__pycache__/a.pyc", "tests/conftest.py"),
    )
    assert [path for path in out if not ignored(path, patterns)] == []
    needed = (
        "pyproject.toml",
        "constraints/tested.txt",
        "CMakeLists.txt",
        "native/module.cpp",
        "actors/data/prompts.py",
        "LICENSE",
    )
    others = ("README.md", "examples/cluster/qwen2.5-7b-gsm8k.yaml", "launch/observe/grafana.json")
    assert [path for path in needed + others if ignored(path, patterns)] == []
    assert [path for path in needed + others if not (ROOT / path).is_file()] == []


def docker(*arguments: str, timeout_s: float = 20) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_builds_and_what_it_holds_runs() -> None:
    """Minutes and a download: only where a Docker daemon answers."""
    if shutil.which("docker") is None or docker("version").returncode != 0:
        pytest.skip("no Docker daemon answers here")
    index = "TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    done = docker("build", "--tag", "paceline:test", "--build-arg", index, ".", timeout_s=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    script = (
        "import os, paceline_native; from launch.cluster.installed import installed; print(os.getuid(), installed())"
    )
    ran = docker("run", "--rm", "paceline:test", "python", "-c", script, timeout_s=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("1000 ")
