"""The vLLM that is installed has what the adapter stands on; what another one has not is named."""

import importlib.util
from pathlib import Path

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
    file.write_text("def set_current_vllm_config(config): ...\n")
    assert "config/vllm.py: set_current_vllm_config(vllm_config)" in missing(tmp_path)
    file.write_text("def set_current_vllm_config(vllm_config, check=False): ...\n")
    (tmp_path / "v1/core").mkdir(parents=True)
    (tmp_path / "v1/core/block_pool.py").write_text(
        "class BlockPool:\n    def __init__(self):\n        self.blocks = []\n"
    )
    left = [fault for fault in missing(tmp_path) if fault.startswith(("config/vllm", "v1/core/block_pool"))]
    assert left == ["v1/core/block_pool.py: BlockPool.evict_blocks"]
