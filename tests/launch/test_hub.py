"""Hub ids: what is one, what is fetched, and what is said where nothing can be."""

from pathlib import Path
from typing import Any

import pytest

from launch.config import ConfigError, load_config
from launch.config.hub import download_line, fetched, hub_id
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
    said: list[str] = []
    found = fetched(config, said.append)
    assert (found.model.path, found.data.train) == (str(tmp_path / "Qwen--Q"), str(tmp_path / "openai--gsm8k/main"))
    assert found.data.eval == config.data.eval
    assert [(repository, kind) for repository, kind, _ in asked] == [("Qwen/Q", "model"), ("openai/gsm8k", "dataset")]
    assert "*.safetensors" in asked[0][2]
    assert "main/*.parquet" in asked[1][2]
    assert len(said) == 2
    assert fetched(found, said.append) == found, "nothing is asked for twice"


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
    assert download_line("data.train", "data/none.jsonl") == ""
