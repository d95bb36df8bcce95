"""Find what this machine lacks for a configuration: packages, GPUs, files, a runnable model, a writable run folder.

Reads files; writes nothing, imports neither torch nor ray, and takes milliseconds. launch.commands.preflight checks the
contents of the inputs.
"""

import importlib.util
import json
import netrc
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from actors.engine.capabilities import capabilities_of
from actors.engine.vllm.versions import UnsupportedVllmError, check_version
from config.catalogue import FRESH_WEIGHTS
from config.formats import FORMATS, LowBitFormat
from config.installed import install_extra
from config.tree import Config
from drafter.foreign import foreign_paths, read_speculator
from drafter.published import EagleWeightsError, form_of, is_published, read_published
from launch.config import gym
from launch.config.check_lora import lora_fit
from launch.config.hub import download_line
from launch.config.issues import Issue
from launch.config.memory import device_of, fitting, misfit
from models.config import (
    ModelConfig,
    ModelConfigError,
    UnsupportedModelError,
    attention_heads,
    longest_sequence,
    ranks_fault,
    ranks_of,
    require_low_bit,
)

WRONG_SPECULATOR = "give one that was made for this model and that vLLM can compute, or unset it"
WRONG_HEAD = "give a whole EAGLE-3 head of this model, or make a drafter with `paceline warmup-drafter`"
_KERNEL_FOLDERS = ("/proc", "/sys", "/dev")


def check_environment(config: Config, *, engine: bool = True, weights: bool = True) -> list[Issue]:
    """Return what this machine lacks for this configuration. engine: false for a command that samples nothing. weights:
    false for one that can use random weights."""
    return [
        *_packages(config),
        *_gpus(config),
        *validate_paths(config, weights=weights),
        *(_model(config) if engine else ()),
        *_drafter_files(config),
        *(_reward(config) if engine else ()),
        *lora_fit(config),
        *_memory(config),
    ]


def _memory(c: Config) -> Iterator[Issue]:
    """Check that everything fits the GPU's memory at once, if the GPU is known."""
    device = device_of(c)
    if device is not None and (issue := misfit(fitting(c, device)[0], device)) is not None:
        yield issue


def _model(c: Config) -> Iterator[Issue]:
    """Check that the engine can run the model. The native engine runs the architectures of models.config, vLLM its own.
    No sequence is longer than the model's positions."""
    file = Path(c.model.path) / "config.json"
    if not file.is_file():
        return  # validate_paths reports it
    try:
        config = _object(file)
        form = FORMATS.get(c.rollout.quantization)
        if capabilities_of(c).learner_network or form is not None or config.get("quantization_config"):
            model = ModelConfig.from_hf(config)
            if form is not None:
                yield from _dimensions(model, form)
            own = FORMATS.get(c.speculation.self.format)  # auto and none fit any
            if own is not None and c.speculation.mode != "off":
                yield from _dimensions(model, own, "rollout.speculation.self.format")
        heads, limit = attention_heads(config), longest_sequence(config)
    except ModelConfigError as error:
        others = "rollout.engine.backend=vllm runs others" if isinstance(error, UnsupportedModelError) else ""
        if others and c.rollout.quantization != "none":
            others += ", with rollout.quantization=none"
        yield Issue("model.path", f"{file}: {error}", remedy=others)
        return
    if c.drafter.train or c.model.implementation == "native":
        yield from _of_ours(c, config)
    yield from _ranks(c, config, heads)
    asked = c.rollout.engine.max_model_tokens
    if asked is not None and limit is not None and asked > limit:
        yield Issue(
            "rollout.engine.max_model_tokens",
            f"{asked} is more than the model's own limit of {limit} (max_position_embeddings in {file})",
            remedy=f"set it to {limit} at most, or leave it out",
        )


def _ranks(c: Config, config: dict[str, Any], heads: int | None) -> Iterator[Issue]:
    """Check that the ranks of an engine can share the model."""
    ranks, given = c.engine_ranks, c.rollout.engine.tensor_parallel
    key = "cluster.gpus_per_worker" if given is None else "rollout.engine.tensor_parallel"
    if ranks == 1:
        return
    if capabilities_of(c).learner_network:
        model = ModelConfig.from_hf(config)
        if ranks not in (fitting := ranks_of(model)):
            yield Issue(key, ranks_fault(model, ranks), remedy=f"set it to one of {', '.join(map(str, fitting))}")
    elif heads is not None and heads % ranks:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        message = f"{ranks} GPUs cannot share the {heads} attention heads of {c.model.path} evenly"
        yield Issue(key, message, remedy=f"set it to one of {fits}")


def _dimensions(model: ModelConfig, form: LowBitFormat, key: str = "rollout.quantization") -> Iterator[Issue]:
    try:
        require_low_bit(model, form)
    except ModelConfigError as error:
        yield Issue(key, str(error).removeprefix(f"rollout.quantization={form.name} "))


def _of_ours(c: Config, config: dict[str, Any]) -> Iterator[Issue]:
    """Check what only works for the architectures of models.config, whichever engine samples."""
    try:
        ModelConfig.from_hf(config)
    except ModelConfigError as error:
        if c.model.implementation == "native":
            yield Issue("model.implementation", f"native: {error}", remedy="leave it out")
        if c.drafter.train:
            yield Issue(
                "drafter.train", f"drafters are trained for our own architectures: {error}", remedy="leave it out"
            )


def _object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelConfigError if it holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"not readable as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelConfigError(f"holds {type(found).__name__}, not an object")
    return found


def _packages(c: Config) -> Iterator[Issue]:
    if c.rollout.engine.backend == "vllm" and not _remote(c):
        try:
            check_version()
        except UnsupportedVllmError as error:
            yield Issue("rollout.engine.backend", str(error))
    for index, term in enumerate(c.reward.terms):
        if term.kind == "reasoning_gym" and not _remote(c) and (fault := gym.unusable()):
            yield Issue(f"reward.terms.{index}.kind", fault, remedy=install_extra(gym.PACKAGE))
    if c.observe.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        yield Issue("observe.wandb_project", "wandb is not installed", remedy=install_extra("wandb"))
    elif c.observe.wandb_project is not None and not _wandb_login():
        yield Issue(
            "observe.wandb_project",
            "nobody is logged in to W&B on this machine",
            remedy="wandb login, or set WANDB_API_KEY; WANDB_MODE=offline keeps the run on this machine",
        )


def _wandb_login() -> bool:
    """Whether wandb finds an API key, or its mode needs none."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE", "online") != "online":
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [Path(os.environ.get("NETRC", "~/.netrc")), Path("~/_netrc")]
    try:
        return any(netrc.netrc(str(f.expanduser())).authenticators(host) for f in files if f.expanduser().is_file())
    except (OSError, netrc.NetrcParseError):
        return True  # wandb may still read it; if not, it reports that itself


def _gpus(c: Config) -> Iterator[Issue]:
    if c.cluster.layout != "embedded" and not _remote(c) and not _gpu_here():
        yield Issue(
            "cluster.layout",
            f"{c.cluster.layout} needs GPUs and this machine shows none",
            remedy="set cluster.layout=embedded for a CPU, or cluster.address to a cluster that has them",
        )


def _reward(c: Config) -> Iterator[Issue]:
    for index, term in enumerate(c.reward.terms):
        if term.key_env and not os.environ.get(term.key_env):
            yield Issue(
                f"reward.terms.{index}.key_env",
                f"the environment has no {term.key_env}",
                remedy=f"export {term.key_env}=..., or leave key_env out for an endpoint that wants no key",
            )
        if term.gpus > 0 and not _remote(c) and not _gpu_here():
            said = f"{term.gpus:g}, and this machine shows none"
            yield Issue(f"reward.terms.{index}.gpus", said, remedy="set it to 0")


def _remote(c: Config) -> bool:
    """Whether engines may run on other machines. Those report what they lack themselves."""
    return c.cluster.address is not None or "RAY_ADDRESS" in os.environ


def _gpu_here() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def validate_paths(config: Config, *, weights: bool = True) -> list[Issue]:
    """Check that inputs exist and that the run folder is writable, on the driver's machine. weights: also
    the model's."""
    issues = []
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        issues.append(_missing("model.path", config.model.path, "no Hugging Face model directory (config.json)"))
    elif (
        weights
        and (config.warmup is None or config.warmup.init == "checkpoint")
        and not any(model.glob("*.safetensors"))
    ):
        remedy = "warmup.init=random starts from fresh weights"
        issues.append(Issue("model.path", f"no weights (*.safetensors) in {model}", remedy=remedy))
    if config.model.tokenizer is not None and not Path(config.model.tokenizer).is_dir():
        issues.append(_missing("model.tokenizer", config.model.tokenizer, "no such directory"))
    eagle = config.rollout.speculation.eagle.path
    used = config.rollout.speculation.mode != "off" and eagle != FRESH_WEIGHTS
    if eagle is not None and used:
        if not Path(eagle).is_dir():
            issues.append(_missing("rollout.speculation.eagle.path", eagle, "no directory of drafter weights"))
        elif is_published(found := _json(Path(eagle) / "config.json")):
            issues += _published(Path(eagle), model)
        elif "drafter" not in found or not (Path(eagle) / "model.safetensors").is_file():
            issues.append(
                Issue(
                    "rollout.speculation.eagle.path",
                    f"{eagle} holds no drafter (config.json and model.safetensors of ours, or of an EAGLE-3 head of "
                    "speculators, SpecForge or the EAGLE authors)",
                    remedy="make one with `paceline warmup-drafter`, or set it to random",
                )
            )
    for name, speculator in foreign_paths(config.rollout.speculation):
        issues += _foreign(name, speculator, model)
    named = {"model.path": model, "rollout.speculation.eagle.path": Path(eagle) if eagle is not None and used else None}
    issues += [issue for key, folder in named.items() if folder is not None for issue in _unreadable(key, folder)]
    keys = config.coordinator.curve.directory
    if keys is not None and config.drafter.train and not Path(keys).is_dir():
        issues.append(_missing("coordinator.curve.directory", keys, "no directory of key files"))
    admin = config.coordinator.admin
    for key, value in (("certificate", admin.certificate), ("key", admin.key)):
        if value is not None and config.drafter.train and not Path(value).is_file():
            issues.append(_missing(f"coordinator.admin.{key}", value, "no such file"))
    inputs = [(key, one.path) for sets in (config.train_sets, config.eval_sets) for key, one in sets.items()]
    if config.data.success.file is not None:
        inputs.append(("data.success.file", config.data.success.file))
    if config.warmup is not None:
        inputs.append(("warmup.data", config.warmup.data))
    for key, value in inputs:
        if not Path(value).exists():
            issues.append(_missing(key, value, "no such file or directory"))
    folder = _first_existing(Path(config.run.dir))
    kernel = [top for top in _KERNEL_FOLDERS if Path(config.run.dir).resolve().is_relative_to(top)]
    if kernel and not Path(config.run.dir).resolve().is_relative_to("/dev/shm"):
        issues.append(Issue("run.dir", f"{kernel[0]} belongs to the kernel", remedy="choose another run.dir"))
    elif not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        issues.append(Issue("run.dir", f"cannot write below {folder}", remedy="choose another run.dir"))
    elif _in_rays_cache(Path(config.run.dir)):
        issues.append(
            Issue(
                "run.dir",
                f"{config.run.dir} is inside Ray's copy of the submitted checkout: Ray may delete it, and a job "
                "submitted after a change gets another copy, where --resume finds no checkpoint",
                remedy="add run.dir=/an/absolute/path that every node sees, for example run.dir=/shared/runs",
            )
        )
    return issues


def _published(head: Path, model: Path) -> Iterator[Issue]:
    """Check the config.json of a published head. launch.commands.preflight checks its tensors."""
    try:
        form_of(head / "config.json", _json(head / "config.json"))  # independent of the model
        read_published(head, ModelConfig.from_hf(_json(model / "config.json")))
    except EagleWeightsError as error:
        yield Issue("rollout.speculation.eagle.path", str(error), remedy=WRONG_HEAD)
    except ModelConfigError:
        return  # reported for model.path, or not an architecture of the native networks


def _foreign(name: str, path: str, model: Path) -> Iterator[Issue]:
    """Check the config.json of a speculator that vLLM computes. launch.commands.preflight checks its tensors."""
    key = f"rollout.speculation.{name}.path"
    if not Path(path).is_dir():
        yield _missing(key, path, "no directory of a speculator")
    elif (model / "config.json").is_file():
        try:
            read_speculator(name, path, model)
        except EagleWeightsError as error:
            yield Issue(key, str(error), remedy=WRONG_SPECULATOR)


def _in_rays_cache(path: Path) -> bool:
    """Whether `path` is below the files that Ray unpacks for `ray job submit --working-dir`, a job's
    current directory."""
    pairs = pairwise(path.parts)
    return any(folder == "working_dir_files" and package.startswith("_ray_pkg_") for folder, package in pairs)


def _drafter_files(c: Config) -> Iterator[Issue]:
    """Check what drafter training requires of the model and of its initial weights."""
    d, path = c.drafter, c.rollout.speculation.eagle.path
    if not d.train:
        return
    layers = _json(Path(c.model.path) / "config.json").get("num_hidden_layers")
    if d.layers is not None and isinstance(layers, int) and max(d.layers) >= layers:
        yield Issue("drafter.layers", f"{max(d.layers)} is no layer of {c.model.path}, which has 0 to {layers - 1}")
    found = _json(Path(path) / "config.json") if path not in (None, FRESH_WEIGHTS) else {}
    held = "eagle3" if is_published(found) else found.get("drafter")
    wanted = "eagle3" if d.algorithm == "eagle3" else "eagle"
    if held is not None and held != wanted:
        yield Issue(
            "drafter.algorithm",
            f"{d.algorithm} trains a drafter of kind {wanted}, and {path} holds one of kind {held}",
            remedy="change it, or set rollout.speculation.eagle.path=random",
        )


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a file; {} if there is none, which another check reports."""
    try:
        return _object(path)
    except ModelConfigError:
        return {}


def _missing(key: str, value: str, what: str) -> Issue:
    tried = "" if Path(value).is_absolute() else f" (looked in {Path.cwd()} and in the configuration's folder)"
    remedy = ""
    if line := download_line(key, value):
        remedy = f"if it is a Hugging Face Hub id, runs fetch it where the network allows; where it does not: {line}"
    elif key == "model.path" and value.startswith("hub/"):
        remedy = f"download it first: hf download ORGANISATION/{value.partition('/')[2]} --local-dir {value}"
    return Issue(key, f"{what}: {value}{tried}", remedy=remedy)


def _unreadable(key: str, folder: Path) -> list[Issue]:
    """Return an issue for the folder of a model or drafter, or its first file, that this user may not read."""
    files = sorted(file for file in folder.glob("*") if file.suffix in (".json", ".safetensors"))
    unreadable = [path for path in (folder, *files) if path.exists() and not os.access(path, os.R_OK)]
    denied = "cannot be read by this user: permission denied"
    return [Issue(key, f"{path} {denied}", remedy=f"its owner can: chmod a+r {path}") for path in unreadable[:1]]


def _first_existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
