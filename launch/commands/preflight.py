"""All checks of a configuration that are possible before Ray starts. `paceline config` prints the faults
and the commands that run refuse them: exit code 2 in both.

Owns the order of the checks; each is made by the code that the run itself uses.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from actors.data import DataError, PromptSet, load_demonstrations, load_set
from actors.data.tokenizers import Tokenizer
from actors.rewards.check import check_reward
from config.data import DataOptions, PromptsOptions
from drafter.foreign import foreign_paths, read_speculator
from drafter.published import EagleWeightsError, is_published
from launch.batch import stop_rule
from launch.calibrations import calibration_issues
from launch.config import Config, ConfigError, Issue, check_environment
from launch.config.environment import WRONG_HEAD, WRONG_SPECULATOR
from launch.own_code import own_code_issues
from launch.reward_functions import code_paths
from launch.run.inputs import answer_of, stop_tokens_of, tokenizer_of, tools_of
from models.config import ModelConfig, UnsupportedModelError, longest_sequence, read_config

_ENGINE = ("model.path", "rollout.", "cluster.gpu")  # keys of engines
RECORDS = 64  # of each file; all are read when the run starts, still before Ray
_KEYED = re.compile(
    r"(?P<key>(?:(?:data|eval)(?:\.sets\.\d+)?|model|warmup|environment|rollout(?:\.sampling|\.abort)?)\.\w+): "
    r"(?P<message>.*)",
    re.DOTALL,
)
Command = Literal["train", "warmup", "eval", "calibrate"]


def preflight(config: Config, command: Command = "train") -> list[Issue]:
    """Return what would stop `command`. Reads files and imports the user's functions (in child processes). Writes
    nothing."""
    if command == "calibrate":  # an engine alone: no data, no rewards
        return [issue for issue in check_environment(config, weights=False) if issue.key.startswith(_ENGINE)]
    samples = command != "warmup"
    issues = check_environment(config, engine=samples)
    broken = {issue.key for issue in issues}
    if samples:
        code_paths(config)
        early = config.rollout.abort.enabled
        issues += [Issue(f"reward.{key}", message) for key, message in check_reward(config.reward, early_ends=early)]
        issues += calibration_issues(config)
        issues += own_code_issues(config)
    if command == "train" and config.drafter.train and "coordinator.curve.directory" not in broken:
        issues += _coordinator(config)
    if samples and not broken & {"model.path", "rollout.speculation.eagle.path"}:
        issues += _published_head(config)
        issues += _foreign_tensors(config, broken)
    if not broken & {"model.path", "model.tokenizer"}:
        issues += _inputs(config, command, broken)
    return issues


def require(config: Config, command: Command) -> None:
    """Raise ConfigError with everything that would stop `command`."""
    if issues := preflight(config, command):
        raise ConfigError(issues)


def _coordinator(config: Config) -> Iterator[Issue]:
    """Its key files, and its hosts where it will run on this machine."""
    # Half a second of imports (ZeroMQ, gRPC, Ray) that other configurations are spared.
    from coordinator.errors import SetupError
    from coordinator.service import host_faults
    from coordinator.transport.security import WORKER, client_keys, server_keys
    from coordinator.wire import DRIVER
    from launch.cluster.address import attaches

    options = config.coordinator
    if options.curve.directory is not None:
        directory = Path(options.curve.directory)
        try:
            server_keys(directory)
            for role in (WORKER, DRIVER):
                client_keys(directory, role)
        except SetupError as error:
            yield Issue("coordinator.curve.directory", str(error))
    if not attaches(config.cluster.address):
        for key, fault in host_faults(options):
            yield Issue(f"coordinator.{key}", fault, remedy="leave it out, or name one of this machine's addresses")


def _published_head(config: Config) -> Iterator[Issue]:
    """Check the tensors of a published EAGLE-3 head, read as engines and trainers read them."""
    path, off = config.rollout.speculation.eagle.path, config.rollout.speculation.mode == "off"
    if path is None or off or not (Path(path) / "config.json").is_file() or not is_published(read_config(path)):
        return
    from drafter.eagle.files import check_eagle

    try:
        model = ModelConfig.from_hf(read_config(config.model.path))
        check_eagle(path, model)
    except EagleWeightsError as error:
        yield Issue("rollout.speculation.eagle.path", str(error), remedy=WRONG_HEAD)
    except UnsupportedModelError:
        return  # only vLLM runs it


def _foreign_tensors(config: Config, broken: set[str]) -> Iterator[Issue]:
    """Check that the weights of speculators that vLLM computes are all there."""
    from models.directory import SafetensorsDirectory, WeightsMismatchError

    for name, path in foreign_paths(config.rollout.speculation):
        key = f"rollout.speculation.{name}.path"
        if key in broken:
            continue
        try:
            with SafetensorsDirectory(Path(path)) as tensors:
                read_speculator(name, path, config.model.path, set(tensors))
        except (EagleWeightsError, WeightsMismatchError) as error:
            yield Issue(key, str(error), remedy=WRONG_SPECULATOR)


def _inputs(config: Config, command: Command, broken: set[str]) -> Iterator[Issue]:
    """Check tokenizer, template, and the first records of every file that the command reads, if it exists."""
    try:
        tokenizer = tokenizer_of(config)
    except DataError as error:
        yield _issue("model.tokenizer", error)
        return
    tools: list[dict[str, Any]] = []
    try:
        tools = tools_of(config, tokenizer)
    except DataError as error:
        yield _issue("environment", error)
    if command != "warmup":
        try:
            stop_tokens_of(config, tokenizer)
        except DataError as error:
            if _KEYED.fullmatch(str(error)):  # faults of the template are reported with the prompts
                yield _issue("rollout.sampling.stop_token_ids", error)
        try:
            stop_rule(config.rollout.sampling, tokenizer)
        except DataError as error:
            yield _issue("rollout.sampling.stop_strings", error)
    if command == "train":
        for key, of_set in config.train_sets.items():
            if key not in broken:
                yield from _prompts(config, key, of_set, "train", tokenizer, tools)
    for key, one in config.eval_sets.items() if command != "warmup" else ():
        if key not in broken:
            yield from _prompts(config, key, one, "eval", tokenizer, tools)
    if config.warmup is not None and command != "eval" and "warmup.data" not in broken:
        try:
            load_demonstrations(config.warmup, config.data, tokenizer, tools=tools, limit=RECORDS)
        except DataError as error:
            yield _issue("warmup.data", error)


def _prompts(
    config: Config,
    key: str,
    one: PromptsOptions,
    split: Literal["train", "eval"],
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]],
) -> Iterator[Issue]:
    try:
        prompts = _first(config.data, key, one, split, tokenizer, tools)
    except DataError as error:
        yield _issue(key, error)
        return
    if split == "train":
        try:
            answer_of(config, tokenizer, prompts)
        except DataError as error:
            yield _issue("rollout.abort", error)
    most = longest_sequence(read_config(config.model.path))
    limit = config.rollout.engine.max_model_tokens or most
    if limit is None:
        return
    if crowded := [prompt for prompt in prompts if len(prompt.tokens) >= limit]:
        longest = max(len(prompt.tokens) for prompt in crowded)
        yield Issue(
            key,
            f"{len(crowded)} of the first {len(prompts)} prompts have up to {longest} tokens and leave no room for a "
            f"response: prompt and response together may have {limit}",
            remedy=f"set data.max_prompt_tokens={limit - 1} or less, which drops them"
            + (", or raise rollout.engine.max_model_tokens" if most is None or limit < most else ""),
        )


def _first(
    data: DataOptions,
    key: str,
    one: PromptsOptions,
    split: Literal["train", "eval"],
    tokenizer: Tokenizer,
    tools: Sequence[dict[str, Any]],
) -> PromptSet:
    """Return the prompts of the first records; if all of those are too long or bad, of all records. Raises
    DataError."""
    few = one.model_copy(update={"limit": min(one.limit or data.limit or RECORDS, RECORDS)})
    try:
        return load_set(data, few, key, split, tokenizer, tools)
    except DataError:
        return load_set(data, one, key, split, tokenizer, tools)


def _issue(key: str, error: DataError) -> Issue:
    """Return the issue under the key that the message names, if it names one."""
    if (named := _KEYED.fullmatch(str(error))) is not None:
        return Issue(named["key"], named["message"])
    return Issue(key, str(error))
