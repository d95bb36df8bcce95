"""The vLLM that is installed has what the adapter stands on; what another one has not is named."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

from tests.vllm.newest import lacks
from tests.vllm.support import VLLM
from tests.vllm.surface import SURFACE, missing


@VLLM[0]
@VLLM[1]
def test_the_installed_vllm_has_all_of_it() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    assert missing(Path(spec.origin).parent) == []


def test_what_a_vllm_has_not_is_named(tmp_path: Path) -> None:
    assert len(missing(tmp_path)) == sum(map(len, SURFACE.values()))
    (tmp_path / "config").mkdir()
    file = tmp_path / "config/vllm.py"
    v1 = "class VllmConfig:\n    def use_v2_model_runner(self): ...\n"
    file.write_text(v1 + "def set_current_vllm_config(config): ...\n")
    assert "config/vllm.py: set_current_vllm_config(vllm_config)" in missing(tmp_path)
    file.write_text(v1 + "def set_current_vllm_config(vllm_config, check=False): ...\n")
    (tmp_path / "v1/core").mkdir(parents=True)
    (tmp_path / "v1/core/block_pool.py").write_text(
        "class BlockPool:\n    def __init__(self):\n        self.blocks = []\n"
    )
    left = [fault for fault in missing(tmp_path) if fault.startswith(("config/vllm", "v1/core/block_pool"))]
    assert left == ["v1/core/block_pool.py: BlockPool.evict_blocks"]


def test_what_keeps_the_adapter_from_a_release_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a wheel that has none of it, is not in the table, and lets nobody choose V1."""
    wheel = tmp_path / "vllm-0.99.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm-0.99.0.dist-info/METADATA", "Version: 0.99.0\nRequires-Dist: torch==2.99.0\n")
        file.writestr("vllm/config/vllm.py", "def set_current_vllm_config(vllm_config): ...\n")
    found = list(lacks(wheel))
    assert found[0] == "vLLM 0.99 is not in the table (actors/engine/vllm/versions.py)"
    assert "it has no config/vllm.py: VllmConfig.use_v2_model_runner" in found
    assert "VLLM_USE_V2_MODEL_RUNNER no longer decides" in found[-1]
    assert len(found) == 2 + sum(map(len, SURFACE.values())) - 1
    assert "compiled against torch 2.99.0" in capsys.readouterr().out
