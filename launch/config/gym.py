"""Make files of reasoning-gym tasks: `data.reasoning_gym` becomes entries of data.sets and eval.sets.

Owns where the files are and how a request is refused. A separate process makes them (actors/rewards/gym.py): importing
the package is expensive, and some of its data sets depend on Python's hash order, which that process fixes.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from actors.rewards import gym
from config.data import DataOptions, ReasoningGymOptions, TrainSetOptions
from config.installed import install_extra
from config.tree import Config, EvalSetOptions
from launch import cache
from launch.config.issues import ConfigError, Issue

KEY = "data.reasoning_gym"
FOLDER = "reasoning_gym"  # below run.dir
PACKAGE, VERSION = "reasoning-gym", "0.1.25"  # the extra has the package's name


def unusable() -> str:
    """Return why the installed package cannot be used; empty if it can. Other versions make other questions from a
    seed, and their scorers may execute what a model writes."""
    try:
        installed = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"the package {PACKAGE} is not installed"
    return "" if installed == VERSION else f"{PACKAGE} {installed} is installed, and {VERSION} is what is supported"


def generated(config: Config, out: TextIO | None = None) -> Config:
    """`config` with the files of its data.reasoning_gym as data.sets and eval.sets. Each is made once for its content:
    `run.dir`/reasoning_gym/NAME-HASH. Long work reports to `out`. Raises ConfigError for what the
    package lacks or refuses."""
    asked = config.data.reasoning_gym
    if not asked:
        return config
    if fault := unusable():
        raise ConfigError([Issue(KEY, fault, remedy=install_extra(PACKAGE))])
    train, held_out, issues = list[TrainSetOptions](), list[EvalSetOptions](), list[Issue]()
    for index, one in enumerate(asked):
        folder = _folder(config, one)
        cache.say(out, cache.damaged(folder))
        if not cache.is_kept(folder):
            issue = _make(folder, one, f"{KEY}.{index}", out)
            if issue is not None:
                issues.append(issue)
                continue
        fields = {"name": one.name, **_fields(config.data)}
        train.append(TrainSetOptions(path=str(folder / "train.jsonl"), weight=one.weight, **fields))
        if one.eval:
            held_out.append(EvalSetOptions(path=str(folder / "eval.jsonl"), **fields))
    if issues:
        raise ConfigError(issues)
    data = config.data.model_copy(update={"reasoning_gym": (), "sets": tuple(train)})
    held = config.eval.model_copy(update={"sets": (*config.eval.sets, *held_out)})
    return config.model_copy(update={"data": data, "eval": held})


def _fields(data: DataOptions) -> dict[str, Any]:
    """Return the field names of these records, where the section `data` sets others."""
    own = {"prompt_field": "prompt", "answer_field": "answer"}
    if data.id_field is not None:
        own["id_field"] = "id"
    if data.source_field is not None:
        own["source_field"] = "reasoning_gym"
    return own


def _request(one: ReasoningGymOptions) -> dict[str, Any]:
    return {"dataset": one.source, "size": one.size, "eval": one.eval, "seed": one.seed, "config": one.config}


def _folder(config: Config, one: ReasoningGymOptions) -> Path:
    said = json.dumps([VERSION, _request(one)], sort_keys=True)
    digest = hashlib.sha256(said.encode()).hexdigest()
    return Path(config.run.dir) / FOLDER / f"{one.source}-{digest[:16]}"


def _make(folder: Path, one: ReasoningGymOptions, key: str, out: TextIO | None) -> Issue | None:
    """Makes the files of one entry, or says why not."""
    made = folder.with_name(f".{folder.name}.{os.getpid()}")
    held_out = f"{one.size} + {one.eval} held-out questions of {one.source}"
    cache.say(out, f"{key}: making {held_out} in {folder}, once")
    try:
        made.mkdir(parents=True)
        refused = _ask({**_request(one), "folder": str(made)}, f"{key}: {one.source}", out)
        if refused is not None:
            below = "name" if refused["key"] == "dataset" and one.dataset is None else refused["key"]
            return Issue(f"{key}.{below}", refused["message"], remedy=refused["remedy"])
        described = {PACKAGE: VERSION, **_request(one)}
        (made / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        cache.keep(made, folder, "the questions")
    except OSError as error:
        return Issue(key, f"cannot write {folder}: {error}", remedy="free space, or set run.dir")
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return None


def _ask(request: dict[str, Any], what: str, out: TextIO | None) -> dict[str, str] | None:
    """Has the files made; what is refused of the request. Raises ConfigError where the process fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-P", gym.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        refused: dict[str, str] | None = None
        try:
            with process.stdin as asked:
                asked.write(json.dumps(request))
            for line in process.stdout:
                told = json.loads(line)
                refused = told.get("refused", refused)
                if "text" in told:
                    cache.say(out, f"{what}: {told['text']}")
        except BaseException:  # Ctrl-C, a message that cannot be shown
            process.kill()
            raise
        finally:
            code = process.wait()
            process.stdout.close()
        if refused is None and code != 0:
            printed.seek(0)
            last = (printed.read().strip() or f"exit status {code}").splitlines()[-1]
            raise ConfigError(
                [Issue(KEY, f"the process that makes the questions failed: {last}", remedy=install_extra(PACKAGE))]
            )
    return refused
