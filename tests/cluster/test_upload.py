"""What `ray job submit --working-dir .` uploads, by Ray's own packaging: the source, not what was downloaded."""

import re
import shutil
import zipfile
from pathlib import Path

import pytest

from coordinator.admin.credentials import service_certificate, service_token
from coordinator.transport.security import write_keys

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/*.md")]
DOWNLOAD = re.compile(r"--local-dir (\S+)")


def uploaded(tree: Path, package: Path) -> set[str]:
    """Names of the files that Ray would send of `tree`."""
    from ray._private.runtime_env.packaging import create_package

    create_package(str(tree), package, include_gitignore=True)
    with zipfile.ZipFile(package) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def downloads() -> set[str]:
    """Every folder into which a page tells people to download."""
    return {match.rstrip("`") for page in PAGES for match in DOWNLOAD.findall(page.read_text(encoding="utf-8"))}


def test_what_the_pages_download_stays_behind_and_the_source_goes(tmp_path: Path) -> None:
    tree = tmp_path / "checkout"
    source = {"models/transformer.py", "actors/data/prompts.py", "drafter/protocol.py", "examples/own_task/config.yaml"}
    made = {f"{folder}/model.safetensors" for folder in downloads()} | {"runs/a/checkpoints/step/model.safetensors"}
    assert len(made) > 3
    for name in source | made:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x", encoding="utf-8")
    shutil.copy(ROOT / ".gitignore", tree / ".gitignore")
    assert uploaded(tree, tmp_path / "package.zip") == source | {".gitignore"}


def test_keys_and_tokens_stay_behind_wherever_they_lie(tmp_path: Path) -> None:
    """Names as the coordinator itself gives them; RUN is a run's folder that is not below runs/."""
    tree = tmp_path / "checkout"
    for folder in ("keys", "RUN/coordinator-keys"):
        write_keys(tree / folder)
    service_token(tree / "RUN")
    service_certificate(tree / "RUN")
    secret = {path.name for path in tree.rglob("*") if path.is_file() and not path.stat().st_mode & 0o077}
    assert len(secret) == 5
    shutil.copy(ROOT / ".gitignore", tree / ".gitignore")
    sent = uploaded(tree, tmp_path / "package.zip")
    assert sent == {".gitignore", "keys/allowed.json", "RUN/admin.crt"}


def test_no_page_downloads_into_a_source_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert "models" in packages
    assert [folder for folder in downloads() if Path(folder).parts[0] in packages] == []


@pytest.mark.parametrize("config", sorted((ROOT / "examples").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_no_example_looks_for_weights_in_a_source_package(config: Path) -> None:
    assert re.findall(r"path: models/\S+", config.read_text(encoding="utf-8")) == []


def test_the_page_names_rays_limit() -> None:
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE

    page = (ROOT / "docs/tutorials/cluster.md").read_text(encoding="utf-8")
    assert f"limited to {DASHBOARD_CLIENT_MAX_SIZE // 2**20} MiB" in page
