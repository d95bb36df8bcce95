"""Capabilities of each engine backend, independent of the machine.

Planning reads them before anything starts (`launch.config.check`), and the contract suite tests each engine against
them (tests/engine/contract.py). Every field has a reader. No torch, no backend is imported.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from config.catalogue import CATALOGUE
from config.formats import FORMATS
from config.tree import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """An engine's capabilities. The defaults describe one that decodes plainly on one device."""

    drafters: Collection[str] = ()  # its drafters, as named in rollout.speculation.strategies
    own_drafters: bool = False  # also those of a user (rollout.speculation.drafters)
    trees: bool = False  # drafts may branch
    hidden_states: bool = False  # it records drafter training data while it decodes
    # It supports model.batch_invariant: no token depends on the worker that samples it, and drafts are verified by the
    # exact draws of plain decoding (rollout.speculation.verification: coupled)
    batch_invariant: bool = False
    early_text: bool = False  # it verifies text sampled with older weights (Request.early), and changes no token
    logprobs_t1: bool = False  # log-probs of softmax(logits) are returned too
    # It runs the learner's own network: log-probs agree up to rounding, for every dtype
    learner_network: bool = False
    most_ranks: int = 1  # most ranks of one engine (rollout.engine.tensor_parallel)
    ranks_on_cpu: bool = False  # ranks may be processes without GPUs
    lends_cache: bool = False  # a copy of its full-precision model can draft over its KV cache
    formats: Collection[str] = ()  # supported formats of low-bit weights (rollout.quantization)
    # New weights determine its precision: a low-bit engine that receives full precision computes in that
    follows_weights: bool = False
    adapters: bool = False  # it merges adapters itself (learner.lora); other engines receive merged weights
    pieces: bool = False  # it receives new weights piece by piece from the learner's devices
    max_temperature: float = math.inf


NATIVE = Capabilities(
    drafters=frozenset(name for name, entry in CATALOGUE.items() if not entry.foreign),
    own_drafters=True,
    trees=True,
    hidden_states=True,
    batch_invariant=True,
    early_text=True,
    logprobs_t1=True,
    learner_network=True,
    most_ranks=8,
    ranks_on_cpu=True,
    lends_cache=True,
    formats=frozenset(FORMATS),
    follows_weights=True,
    adapters=True,
    pieces=True,
)
VLLM = Capabilities(
    drafters=frozenset(CATALOGUE),
    most_ranks=64,
    formats=frozenset({"w8a8", "fp8"}),
    max_temperature=2.0,
)

BACKENDS: Mapping[str, Capabilities] = {"native": NATIVE, "vllm": VLLM}  # by rollout.engine.backend


def capabilities_of(config: Config) -> Capabilities:
    """Return the capabilities of this configuration's engines.

    A native engine over several ranks holds no whole matrix and no whole key head: it neither rounds nor merges
    weights, and lends no cache."""
    backend = config.rollout.engine.backend
    can = BACKENDS[backend]
    if backend != "native" or config.engine_ranks == 1:
        return can
    drafters = frozenset(name for name in can.drafters if name not in CATALOGUE or not CATALOGUE[name].shares_cache)
    return replace(can, drafters=drafters, formats=(), adapters=False, lends_cache=False)


def engine_name(config: Config) -> str:
    """Return the engine's name for messages: `native engine`, `native engine over 2 ranks`."""
    ranks = config.engine_ranks
    return f"{config.rollout.engine.backend} engine" + (f" over {ranks} ranks" if ranks > 1 else "")
