"""What a run reads: tokenizer, prompts, held-out prompts. Loaded before Ray and before a warm start, so that a bad line
costs seconds.
"""

from dataclasses import dataclass

from actors.data import PromptSet, check_stop_tokens, check_vocabulary, end_tokens, load_prompts, load_tokenizer
from actors.data.tokenizers import Tokenizer
from actors.engine.types import StopRule
from launch.batch import stop_rule
from launch.config import Config
from launch.config.paths import tokenizer_dir
from models.config import read_config


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that is read from files and never changes."""

    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    stop: StopRule | None
    prompts: PromptSet
    held_out: PromptSet | None


def load_inputs(config: Config) -> Inputs:
    """Raises DataError, which names the key, or the file and line."""
    tokenizer = tokenizer_of(config)
    return Inputs(
        tokenizer,
        stop_tokens_of(config, tokenizer),
        stop_rule(config.rollout.sampling, tokenizer),
        load_prompts(config.data, "train", tokenizer),
        load_prompts(config.data, "eval", tokenizer) if config.data.eval else None,
    )


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer, which fits the model. Raises DataError."""
    tokenizer = load_tokenizer(tokenizer_dir(config))
    check_vocabulary(tokenizer, read_config(config.model.path)["vocab_size"])
    return tokenizer


def stop_tokens_of(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What ends a response: rollout.sampling.stop_token_ids, else what the model's files say. Raises DataError."""
    vocab_size = read_config(config.model.path)["vocab_size"]
    given = config.rollout.sampling.stop_token_ids
    if given is None:
        return end_tokens(config.data, tokenizer, config.model.path, vocab_size)
    check_stop_tokens(given, vocab_size, "rollout.sampling.stop_token_ids")
    return given
