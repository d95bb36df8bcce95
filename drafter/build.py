"""Build the drafters of an engine from those in the catalogue. Owns the conditions under which each exists.

Never drafts. Imports are lazy: an engine without EAGLE never loads its code.
"""

import logging
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType

from config.catalogue import CATALOGUE, at_hand, weights_path
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from config.strategy import Strategy
from drafter.own import build_own
from drafter.protocol import Drafter
from models.ops.chain import DraftChain
from models.ops.native import kernels
from models.transformer import Transformer

_LOG = logging.getLogger(__name__)


def build_drafters(options: SpeculationOptions, model: Transformer, engine: EngineOptions) -> dict[str, Drafter]:
    """Return the drafters by name: n-gram and suffix if the native extension is installed, EAGLE if it has a path, the
    low-bit copy of the model if the engine can lend its cache, and the user's own (options.drafters).

    With `options.strategies` only those that it names; with mode off none. The drafters fit engines whose history is
    [max_running, max_tokens] as `history_tokens` says.

    Raises ValueError, naming the key, for a strategy whose drafter is unknown or not configured.
    """
    if options.mode == "off":
        return {}
    retrieval = build_retrieval(options, engine.max_running, history_tokens(model, engine))
    networks = {
        name: _network(name).build(options, model, engine)
        for name in wanted_drafters(options, cache_lent=lends_cache(model))
        if name in CATALOGUE and CATALOGUE[name].is_network
    }
    built: dict[str, Drafter] = retrieval | networks
    ordered = {name: built[name] for name in CATALOGUE if name in built}
    own = build_own(options.drafters, wanted_drafters(options), engine.max_running, history_tokens(model, engine))
    return ordered | own


def build_retrieval(options: SpeculationOptions, slots: int, max_tokens: int) -> dict[str, Drafter]:
    """Return the drafters that need no network, for a history of [slots, max_tokens]."""
    wanted = {name for name in wanted_drafters(options) if name in CATALOGUE and not CATALOGUE[name].is_network}
    needs = {name: CATALOGUE[name].native for name in wanted}
    missing = [name for name, native in sorted(needs.items()) if native is not None and not hasattr(kernels, native)]
    if missing:
        _LOG.warning(
            "no model-free drafters (%s): the native extension is missing or older than this checkout; "
            "`pip install -e .` builds it",
            ", ".join(missing),
        )
    return {
        name: import_module(f"{__package__}.{name}").build(options, slots, max_tokens)
        for name in CATALOGUE
        if name in wanted and name not in missing
    }


def history_tokens(model: Transformer, engine: EngineOptions) -> int:
    """Return the longest sequence that an engine can hold: the model's or the configured limit, or the cache plus one
    token (the last token's K/V are never stored)."""
    model_tokens = engine.max_model_tokens or model.config.max_position_embeddings
    return min(model_tokens, engine.kv_tokens // engine.block_tokens * engine.block_tokens + 1)


def lends_cache(model: Transformer) -> bool:
    """Whether the native engine can draft chains with a copy of this model over its own KV cache."""
    if type(model) is not Transformer or model.low_bit is not None:
        return False
    weight = model.embed_tokens.weight
    return not weight.is_cpu or (kernels is not None and DraftChain.supports(weight, model.config.head_dim))


def wanted_drafters(options: SpeculationOptions, *, cache_lent: bool = False) -> set[str]:
    """Return the names. cache_lent as in `at_hand`. Raises ValueError, naming the key, for a strategy whose drafter is
    unknown or not configured."""
    if options.mode == "off":
        return set()
    if options.strategies is None:
        return set(at_hand(options, cache_lent=cache_lent))
    return {_known(name, options) for name in _named(options.strategies)}


def _named(strategies: Iterable[str]) -> set[str]:
    return {Strategy.parse(text).drafter for text in strategies} - {"none"}


def _network(name: str) -> ModuleType:
    """Return the module of a network drafter."""
    return import_module(f"{__package__}.{name}")


def _known(name: str, options: SpeculationOptions) -> str:
    own = [one.name for one in options.drafters]
    if name in own:
        return name
    if name not in CATALOGUE:
        there = ", ".join([*CATALOGUE, *own])
        raise ValueError(f"rollout.speculation.strategies names the drafter {name!r}; there are {there}, and 'plain'")
    if CATALOGUE[name].needs_weights and weights_path(name, options) is None:
        raise ValueError(
            f"rollout.speculation.strategies names the drafter {name!r}, which has no weights: set "
            f"rollout.speculation.{name}.path to their directory (or to 'random'), or leave it out"
        )
    return name
