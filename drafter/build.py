"""Which drafters an engine gets. Owns their names and the conditions under which each exists; never drafts.

Imports are lazy: an engine without EAGLE never loads its code.
"""

import logging
from collections.abc import Iterable
from typing import Protocol

from drafter.protocol import Drafter
from models.ops.native import kernels
from models.transformer import Transformer
from policies.speculation.options import SpeculationOptions
from policies.speculation.strategy import Strategy

_LOG = logging.getLogger(__name__)
MODEL_FREE = {"ngram": "Ngrams", "suffix": "Suffixes"}  # and their native classes
NAMES = (*MODEL_FREE, "eagle")


class EngineShape(Protocol):
    """What a drafter must know of `actors.engine.options.EngineOptions`."""

    @property
    def max_running(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def max_model_tokens(self) -> int | None: ...


def build_drafters(options: SpeculationOptions, model: Transformer, engine: EngineShape) -> dict[str, Drafter]:
    """The drafters by name: n-gram and suffix wherever the native extension is installed, EAGLE if it has a path.

    With `options.strategies` only those that it names; with mode off none. Drafters are made for engines whose history
    is [max_running, max_tokens] as `history_tokens` says.

    Raises ValueError for a strategy whose drafter is unknown or not configured; naming the key.
    """
    if options.mode == "off":
        return {}
    wanted = _wanted(options)
    slots, max_tokens = engine.max_running, history_tokens(model, engine)
    drafters: dict[str, Drafter] = {}
    missing = [name for name in sorted(wanted) if name in MODEL_FREE and not hasattr(kernels, MODEL_FREE[name])]
    if missing:
        _LOG.warning(
            "no model-free drafters (%s): the native extension is missing or older than this checkout; "
            "`pip install -e .` builds it",
            ", ".join(missing),
        )
        wanted -= set(missing)
    if "ngram" in wanted:
        from drafter.ngram import NgramDrafter

        drafters["ngram"] = NgramDrafter(slots, max_tokens)
    if "suffix" in wanted:
        from drafter.suffix import SuffixDrafter

        drafters["suffix"] = SuffixDrafter(options.suffix, slots, max_tokens)
    if "eagle" in wanted:
        from drafter.eagle import EagleDrafter

        blocks = engine.kv_tokens // engine.block_tokens
        sampled = options.verification == "rejection"
        drafters["eagle"] = EagleDrafter(model, options.eagle, slots, blocks, engine.block_tokens, sampled=sampled)
    return drafters


def history_tokens(model: Transformer, engine: EngineShape) -> int:
    """The longest sequence an engine can hold: the model's or the configured limit, or the cache and one token more
    (the last token's K/V are never stored)."""
    model_tokens = engine.max_model_tokens or model.config.max_position_embeddings
    return min(model_tokens, engine.kv_tokens // engine.block_tokens * engine.block_tokens + 1)


def _wanted(options: SpeculationOptions) -> set[str]:
    if options.strategies is None:
        return {*MODEL_FREE, *(["eagle"] if options.eagle.path is not None else [])}
    return {_known(name, options) for name in _named(options.strategies)}


def _named(strategies: Iterable[str]) -> set[str]:
    return {Strategy.parse(text).drafter for text in strategies} - {"none"}


def _known(name: str, options: SpeculationOptions) -> str:
    if name not in NAMES:
        raise ValueError(
            f"rollout.speculation.strategies names the drafter {name!r}; there are {', '.join(NAMES)}, and 'plain'"
        )
    if name == "eagle" and options.eagle.path is None:
        raise ValueError(
            "rollout.speculation.strategies names the drafter 'eagle', which has no weights: set "
            "rollout.speculation.eagle.path to their directory (or to 'random'), or leave it out"
        )
    return name
