"""Hugging Face Hub ids in the place of paths. Owns which values are ids, and their way to a local folder; the files are
`huggingface_hub`'s, in its cache (HF_HOME), where a run finds them again without the network.
"""

import re
from collections.abc import Callable
from pathlib import Path

from launch.config.issues import ConfigError, Issue
from launch.config.paths import replaced, written
from launch.config.tree import Config

MODELS = ("model.path", "model.tokenizer")
DATA = ("data.train", "data.sets.*.path", "data.eval", "eval.sets.*.path", "warmup.data")
_LOCAL_FOLDERS = ("hub", "data", "models", "runs", "checkpoints", "examples")  # no owners of Hub repositories
_SUFFIXES = (".gz", ".json", ".csv")  # of files, which only data inside a repository can be
_ID = re.compile(r"(?P<repository>[\w][\w.-]*/[\w.-]+)(?P<inside>/[\w./-]+)?")
_MODEL_FILES: tuple[str, ...] = ("*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja")
_DATA_FILES: tuple[str, ...] = ("*.parquet", "*.jsonl", "*.jsonl.gz")


def hub_id(value: str) -> tuple[str, str] | None:
    """(OWNER/NAME, folder or file inside it) of what may be a Hub id; None: it is a path."""
    found = _ID.fullmatch(value)
    if found is None or value.partition("/")[0] in _LOCAL_FOLDERS:
        return None
    repository, inside = found["repository"], (found["inside"] or "")[1:].rstrip("/")
    if repository.endswith((*_SUFFIXES, ".jsonl", ".parquet")) or inside.endswith(_SUFFIXES[1:]):
        return None
    return repository, inside


def download_line(key: str, value: str) -> str:
    """The command that brings it here, and what to set then; empty if it is no Hub id."""
    found = hub_id(value)
    if found is None:
        return ""
    repository, inside = found
    kind, top = ("", "hub") if key in MODELS else ("--repo-type dataset ", "data")
    folder = f"{top}/{repository.partition('/')[2]}"
    return f"hf download {repository} {kind}--local-dir {folder}, then {key}={'/'.join(filter(None, (folder, inside)))}"


def fetched(config: Config, say: Callable[[str], None] = lambda text: None) -> Config:
    """`config` with Hub ids that are no paths here replaced by their folders, fetched where they are not in the cache.
    Raises ConfigError, with the command that does it elsewhere, if one cannot be."""
    issues: list[Issue] = []
    for pattern in (*MODELS, *DATA):
        for key, value in list(written(config, pattern)):
            found = None if value is None or Path(value).exists() else hub_id(value)
            if found is None or value is None or (key in MODELS and found[1]):
                continue
            say(f"{key}: fetching {value} from the Hugging Face Hub")
            try:
                config = replaced(config, key, _fetch(*found, model=key in MODELS))
            except Exception as error:  # its own classes, the network's, the disk's
                reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                message = f"no such path: {value}; nor can it be fetched from the Hugging Face Hub: {reason}"
                issues.append(Issue(key, message, remedy=f"where there is a network: {download_line(key, value)}"))
    if issues:
        raise ConfigError(issues)
    return config


def _fetch(repository: str, inside: str, *, model: bool) -> str:
    from huggingface_hub import snapshot_download

    wanted = (
        [*_MODEL_FILES] if model else [inside, *(f"{inside}/{f}" for f in _DATA_FILES)] if inside else [*_DATA_FILES]
    )
    folder = snapshot_download(
        repository, repo_type="model" if model else "dataset", allow_patterns=[*wanted], etag_timeout=10
    )
    path = Path(folder) / inside
    if not path.exists():
        raise FileNotFoundError(f"{repository} holds no {inside}")
    return str(path)
