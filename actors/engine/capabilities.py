"""What each engine backend can do. Owns facts that hold for a backend on every machine.

Whoever plans reads them before anything is started (`launch.config.check`), and the contract suite holds each engine to
them (tests/engine/contract.py).

A field is here because someone reads it. No torch, no backend is imported.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from config.catalogue import CATALOGUE
from config.formats import FORMATS
from config.tree import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Without any of the fields: an engine that decodes plainly on one device."""

    drafters: Collection[str] = ()  # that it can draft with, as named in rollout.speculation.strategies
    own_drafters: bool = False  # and with those of a user (rollout.speculation.drafters)
    trees: bool = False  # drafts may branch
    hidden_states: bool = False  # it records what drafters are trained on while it decodes
    # It can keep model.batch_invariant: no token depends on who samples or finishes it, and drafts are verified by the
    # very draws of plain decoding (rollout.speculation.verification: coupled)
    batch_invariant: bool = False
    early_text: bool = False  # it checks text that was sampled with older weights (Request.early), and changes no token
    logprobs_t1: bool = False  # log-probs of softmax(logits) come with those of the sampling distribution
    # It computes with the learner's own network: their log-probs agree up to rounding at most, whatever the dtype
    learner_network: bool = False
    most_ranks: int = 1  # that one engine's model can be spread over (rollout.engine.tensor_parallel)
    ranks_on_cpu: bool = False  # those may be processes without GPUs
    lends_cache: bool = False  # a copy of its full-precision model can draft over its KV cache
    formats: Collection[str] = ()  # of low-bit weights that it computes with (rollout.quantization)
    # New weights decide what it computes with: a low-bit engine that is handed full precision computes in that
    follows_weights: bool = False
    adapters: bool = False  # it merges adapters by itself (learner.lora); others get what they make of the weights
    pieces: bool = False  # it takes new weights piece by piece from the learner's devices
    max_temperature: float = math.inf


NATIVE = Capabilities(
    drafters=frozenset(CATALOGUE),
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
    drafters=frozenset({"ngram", "suffix", "eagle", "self"}),
    most_ranks=64,
    formats=frozenset({"w8a8", "fp8"}),
    max_temperature=2.0,
)

BACKENDS: Mapping[str, Capabilities] = {"native": NATIVE, "vllm": VLLM}  # by rollout.engine.backend


def capabilities_of(config: Config) -> Capabilities:
    """What the engines of this configuration can do. Ours over several ranks holds no matrix and no head of keys whole:
    it neither rounds nor merges weights, and lends no cache."""
    backend = config.rollout.engine.backend
    can = BACKENDS[backend]
    if backend != "native" or config.engine_ranks == 1:
        return can
    drafters = frozenset(name for name in can.drafters if name not in CATALOGUE or not CATALOGUE[name].shares_cache)
    return replace(can, drafters=drafters, formats=(), adapters=False, lends_cache=False)


def engine_name(config: Config) -> str:
    """For messages: `native engine`, `native engine over 2 ranks`."""
    ranks = config.engine_ranks
    return f"{config.rollout.engine.backend} engine" + (f" over {ranks} ranks" if ranks > 1 else "")
