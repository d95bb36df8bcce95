"""Catalogue of drafters: the facts that configuration, plans, policies and reports use. Plain data, no torch.

The only list of built-in drafters; a user adds others by import path (rollout.speculation.drafters). The module
`drafter.NAME` implements drafter NAME, and its `build` makes one, unless vLLM does (`foreign`). Another kind of engine
may use its own implementation of a name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from config.speculation import SpeculationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterEntry:
    """One drafter, by its name in strategies."""

    name: str
    arms: tuple[str, ...]  # strategies to try if the configuration names none, most promising first
    accepts: float = 0.5  # expected share of its tokens that is accepted, before any verification
    needs_weights: bool = False  # requires rollout.speculation.NAME.path
    is_network: bool = False  # runs forward passes of its own: graphs are captured for them
    trained: bool = False  # drafter.train trains it
    shares_cache: bool = False  # uses the KV cache of its engine, whose target must be in full precision
    level: float = 0.0  # initial estimate: cost of one drafted token for all requests, in plain steps of the target
    prepares: float = 0.0  # initial estimate: time to prepare after new target weights, in passes over one row
    native: str | None = None  # the class of the native extension that it requires
    foreign: bool = False  # vLLM's own code computes it (rollout.engine.backend=vllm): nothing here implements it


CATALOGUE: dict[str, DrafterEntry] = {
    entry.name: entry
    for entry in (
        DrafterEntry(
            name="suffix",
            arms=("suffix:8", "suffix:4", "suffix:2", "suffix:1", "suffix:16", "suffix:12x2/16"),
            native="Suffixes",
        ),
        DrafterEntry(
            name="eagle",
            arms=("eagle:4", "eagle:2", "eagle:8", "eagle:4x3/12"),
            needs_weights=True,
            is_network=True,
            trained=True,
            level=0.15,
        ),
        DrafterEntry(name="ngram", arms=("ngram:12", "ngram:6", "ngram:3"), native="Ngrams"),
        # A copy of the target in few bits. It follows the target without training.
        DrafterEntry(
            name="self",
            arms=("self:5", "self:3", "self:7", "self:10", "self:15"),
            accepts=0.99,
            is_network=True,
            shares_cache=True,
            level=0.5,
            prepares=7.0,
        ),
        # Speculators of vLLM, by path only. The parallel ones draft any depth in one pass.
        DrafterEntry(
            name="mtp", arms=("mtp:2", "mtp:1", "mtp:4"), needs_weights=True, is_network=True, level=0.15, foreign=True
        ),
        DrafterEntry(
            name="dflash",
            arms=("dflash:7", "dflash:3", "dflash:15"),
            needs_weights=True,
            is_network=True,
            level=0.05,
            foreign=True,
        ),
        DrafterEntry(
            name="peagle",
            arms=("peagle:4", "peagle:2", "peagle:7"),
            needs_weights=True,
            is_network=True,
            level=0.05,
            foreign=True,
        ),
    )
}
FRESH_WEIGHTS = "random"  # instead of a directory of weights: rollout.speculation.NAME.path takes it
TRAINED = next(entry.name for entry in CATALOGUE.values() if entry.trained)


def fresh_path(kind: str, layers: Iterable[int] | None = None) -> str:
    """Return the path that stands for fresh weights of an EAGLE drafter of that kind.

    `random`, `random:eagle3`, or `random:eagle3:1,3,4` with the target layers that it reads."""
    if kind == "eagle":
        return FRESH_WEIGHTS
    return f"{FRESH_WEIGHTS}:{kind}" + (f":{','.join(map(str, layers))}" if layers else "")


def weights_path(name: str, options: SpeculationOptions) -> str | None:
    """Return the value of rollout.speculation.NAME.path."""
    path: str | None = getattr(getattr(options, name, None), "path", None)
    return path


def own_entry(name: str) -> DrafterEntry:
    """Return the entry of a user's drafter (rollout.speculation.drafters): initial estimates before any measurement."""
    return DrafterEntry(name=name, arms=(f"{name}:4", f"{name}:2", f"{name}:8"))


def at_hand(options: SpeculationOptions, *, cache_lent: bool = False) -> tuple[str, ...]:
    """Return the drafters of an engine with this configuration, unless strategies name others; assumes the native
    extension. cache_lent: the engine lends its KV cache to drafters that share it."""
    built_in = tuple(
        name
        for name, entry in CATALOGUE.items()
        if (not entry.shares_cache or (cache_lent and options.self.format != "none"))
        and (not entry.needs_weights or weights_path(name, options) is not None)
    )
    return (*built_in, *(own.name for own in options.drafters))


def by_name(names: Iterable[str]) -> Mapping[str, DrafterEntry]:
    """Return the entries of those names, in the catalogue's order, then the user's own."""
    wanted = dict.fromkeys(names)
    found = {name: entry for name, entry in CATALOGUE.items() if name in wanted}
    return found | {name: own_entry(name) for name in wanted if name not in CATALOGUE}
