"""The drafters there are: what configuration, plans, policies and reports must know of each. Plain data, no torch.

The one place that lists them; a user adds others by import path (rollout.speculation.drafters). The code of drafter
NAME is the module `drafter.NAME`, whose `build` makes one; an engine of another kind may make its own where strategies
name it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from config.speculation import SpeculationOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterEntry:
    """One drafter, as strategies name it."""

    name: str
    arms: tuple[str, ...]  # strategies that are tried where the configuration names none, most promising first
    accepts: float = 0.5  # share of its tokens that is expected to stand before any was verified
    needs_weights: bool = False  # it exists only where rollout.speculation.NAME.path is set
    is_network: bool = False  # it computes passes of its own: graphs are captured for them
    trained: bool = False  # drafter.train trains it
    shares_cache: bool = False  # it computes over the KV cache that an engine of a full-precision target lends it
    level: float = 0.0  # before it was measured: a drafted token of all requests, in plain steps of the target
    prepares: float = 0.0  # and, after new weights of the target, until it can draft, in passes over one row
    native: str | None = None  # class of the native extension that it cannot do without


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
        # A copy of the target in few bits. It follows the target without being trained.
        DrafterEntry(
            name="self",
            arms=("self:5", "self:3", "self:7", "self:10", "self:15"),
            accepts=0.99,
            is_network=True,
            shares_cache=True,
            level=0.5,
            prepares=7.0,
        ),
    )
}
FRESH_WEIGHTS = "random"  # instead of a directory of weights: rollout.speculation.NAME.path takes it
TRAINED = next(entry.name for entry in CATALOGUE.values() if entry.trained)


def fresh_path(kind: str, layers: Iterable[int] | None = None) -> str:
    """The path that means fresh weights of an EAGLE drafter of that kind: `random`, `random:eagle3`, or
    `random:eagle3:1,3,4` with the layers of the target that it reads."""
    if kind == "eagle":
        return FRESH_WEIGHTS
    return f"{FRESH_WEIGHTS}:{kind}" + (f":{','.join(map(str, layers))}" if layers else "")


def weights_path(name: str, options: SpeculationOptions) -> str | None:
    """What rollout.speculation.NAME.path says."""
    path: str | None = getattr(getattr(options, name, None), "path", None)
    return path


def own_entry(name: str) -> DrafterEntry:
    """A drafter of the user's own (rollout.speculation.drafters): what is assumed of it before anything is measured."""
    return DrafterEntry(name=name, arms=(f"{name}:4", f"{name}:2", f"{name}:8"))


def at_hand(options: SpeculationOptions, *, cache_lent: bool = False) -> tuple[str, ...]:
    """What an engine of this configuration drafts with unless strategies name others, where the native extension is
    installed. cache_lent: it lends its KV cache to those that share it."""
    built_in = tuple(
        name
        for name, entry in CATALOGUE.items()
        if (not entry.shares_cache or (cache_lent and options.self.format != "none"))
        and (not entry.needs_weights or weights_path(name, options) is not None)
    )
    return (*built_in, *(own.name for own in options.drafters))


def by_name(names: Iterable[str]) -> Mapping[str, DrafterEntry]:
    """The entries of those names, in the catalogue's order; behind them those that it has not: the user's own."""
    wanted = dict.fromkeys(names)
    found = {name: entry for name, entry in CATALOGUE.items() if name in wanted}
    return found | {name: own_entry(name) for name in wanted if name not in CATALOGUE}
