"""Inputs of a run: tokenizer, prompts, held-out prompts.

Loaded before Ray and before a warm start, so that a bad line costs only seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.data import (
    DataError,
    LoadReport,
    PromptSet,
    check_stop_tokens,
    check_vocabulary,
    end_tokens,
    load_prompts,
    load_set,
    load_tokenizer,
)
from actors.data.markers import MIXED, answer_marker
from actors.data.templates import Template, make_template
from actors.data.tokenizers import Tokenizer
from actors.environments.formats import format_fault
from actors.environments.host import EnvironmentStartError, tool_schemas
from actors.rewards.boxed import thinks
from contracts.rollout import Marker, SamplingParams, StopRule
from launch.batch import sampling_params, stop_rule
from launch.config import Config
from launch.config.paths import tokenizer_dir
from models.config import read_config

DRAWN = ("temperature", "top_k", "top_p", "max_new_tokens")  # a held-out set's own sampling options


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All inputs that are read from files and never change."""

    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    stop: StopRule | None
    answer: Marker | None  # of rollout.abort, if enabled; only for responses to `prompts`
    prompts: PromptSet
    held_out: "tuple[HeldOut, ...]"
    template: Template


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One held-out set, and how its responses are sampled."""

    name: str
    prompts: PromptSet
    samples: int  # responses per prompt
    sampling: SamplingParams


def load_inputs(config: Config, *, training: bool = True) -> Inputs:
    """Load the inputs. Raises DataError, which names the key, or the file and line. `training`: false leaves the
    training prompts out."""
    tokenizer = tokenizer_of(config)
    stop_tokens, stop = stop_tokens_of(config, tokenizer), stop_rule(config.rollout.sampling, tokenizer)
    tools = tools_of(config, tokenizer)
    prompts = load_prompts(config.data, "train", tokenizer, tools) if training else PromptSet([], LoadReport())
    return Inputs(
        tokenizer=tokenizer,
        stop_tokens=stop_tokens,
        stop=stop,
        answer=answer_of(config, tokenizer, prompts),
        prompts=prompts,
        held_out=load_held_out(config, tokenizer, stop_tokens, tools),
        template=make_template(config.data, tokenizer, tools),
    )


def load_held_out(
    config: Config, tokenizer: Tokenizer, stop_tokens: Sequence[int], tools: Sequence[dict[str, Any]] = ()
) -> tuple[HeldOut, ...]:
    """Load Config.eval_sets with their prompts. Raises DataError."""
    usual = config.rollout.sampling
    return tuple(
        HeldOut(
            name=one.name,
            prompts=load_set(config.data, one, key, "eval", tokenizer, tools),
            samples=one.samples or config.eval.samples,
            sampling=sampling_params(
                usual.model_copy(update={name: getattr(one, name) for name in DRAWN}), stop_tokens
            ),
        )
        for key, one in config.eval_sets.items()
    )


def tools_of(config: Config, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the schemas of environment.tools; empty without. Starts the environment's process and ends it. Raises
    DataError, also if it does not start."""
    options = config.environment
    if options is None:
        return []
    if options.tools and options.tool_format == "auto":
        plain = config.data.template == "plain"
        template = None if plain else config.data.chat_template or getattr(tokenizer, "chat_template", None) or ""
        if fault := format_fault(template):
            raise DataError(
                f"environment.tool_format: auto: {fault}; use a model whose template does, give one with "
                "data.chat_template, or say with environment.tool_format=hermes that it writes so all the same"
            )
    try:
        return tool_schemas(options)
    except EnvironmentStartError as error:
        raise DataError(f"environment.{'tools' if options.tools else 'factory'}: {error}") from error


def answer_of(config: Config, tokenizer: Tokenizer, prompts: PromptSet) -> Marker | None:
    """Return the marker that ends responses to `prompts` by rollout.abort; None if it is off. Raises DataError."""
    abort = config.rollout.abort
    if not len(prompts) or not abort.enabled or abort.marker is None:
        return None
    thinking = {thinks(prompt.text) for prompt in prompts}
    if len(thinking) > 1:
        raise DataError(MIXED)
    return answer_marker(abort.marker, tokenizer, thinking=True in thinking)


def tokenizer_of(config: Config) -> Tokenizer:
    """Return the tokenizer, checked against the model. Raises DataError."""
    tokenizer = load_tokenizer(tokenizer_dir(config))
    check_vocabulary(tokenizer, read_config(config.model.path)["vocab_size"])
    return tokenizer


def stop_tokens_of(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a response: rollout.sampling.stop_token_ids, else those of the model's files. Raises
    DataError."""
    vocab_size = read_config(config.model.path)["vocab_size"]
    given = config.rollout.sampling.stop_token_ids
    if given is None:
        return end_tokens(config.data, tokenizer, config.model.path, vocab_size)
    check_stop_tokens(given, vocab_size, "rollout.sampling.stop_token_ids")
    return given
