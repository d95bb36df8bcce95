"""Systems that do not go together, beyond what one section says of itself: the rest of `launch.config.check`.

Owns pairs of which one would do nothing, or fail where engines start. docs/systems/README.md has a table of all that
is refused, wherever it is checked.
"""

from collections.abc import Iterator

from actors.engine.capabilities import BACKENDS
from config.catalogue import CATALOGUE, TRAINED, at_hand
from config.formats import FORMATS
from config.strategy import Strategy
from config.tree import Config
from launch.config.issues import Issue
from policies.roofline.devices import device_named
from policies.speculation.defaults import default_ladder

_SPECULATION = "rollout.speculation"


def system_issues(c: Config) -> Iterator[Issue]:
    """Faults of combinations; pure."""
    strategies = [Strategy.parse(text) for text in c.rollout.speculation.strategies or ()]
    if c.rollout.speculation.mode != "off":
        yield from _ladder(c)
        yield from _lengths(c, strategies)
        yield from _networks(c, strategies)
    yield from _device(c)


def _ladder(c: Config) -> Iterator[Issue]:
    """Mode roofline drafts with one drafter: which, where strategies name none, policies.speculation.defaults says."""
    s = c.rollout.speculation
    if s.mode != "roofline" or s.strategies is not None:
        return
    lent = c.rollout.engine.backend == "native" and c.rollout.quantization == "none"
    name = default_ladder(at_hand(c.speculation, cache_lent=lent))[0].drafter
    if name == TRAINED:
        return
    if c.drafter.train:
        yield Issue(
            f"{_SPECULATION}.mode",
            f"roofline drafts with one drafter, here {name}, so nothing would draft with what drafter.train trains",
            remedy=f"set {_SPECULATION}.strategies=[{TRAINED}:2,{TRAINED}:4,{TRAINED}:8], mode=adaptive, or "
            "drafter.train=false",
        )
    elif s.eagle.path is not None:
        yield Issue(
            f"{_SPECULATION}.eagle.path",
            f"is set, but mode roofline drafts with one drafter, here {name}",
            remedy=f"name eagle in {_SPECULATION}.strategies, or unset it",
        )


def _lengths(c: Config, strategies: list[Strategy]) -> Iterator[Issue]:
    """Draft budgets cut chains."""
    budget = c.rollout.speculation.budget
    drafting = [strategy for strategy in strategies if strategy.depth]
    if budget != "none" and drafting and all(strategy.is_tree for strategy in drafting):
        yield Issue(
            f"{_SPECULATION}.budget",
            f"{budget} shortens chains, and all strategies are trees, which are verified whole",
            remedy=f"name a chain too, such as {drafting[0].drafter}:8, or leave it out",
        )


def _networks(c: Config, strategies: list[Strategy]) -> Iterator[Issue]:
    """An engine that is not ours runs one network beside its target."""
    named = {strategy.drafter for strategy in strategies}
    networks = [name for name, entry in CATALOGUE.items() if name in named and entry.is_network]
    if len(networks) > 1 and not BACKENDS[c.rollout.engine.backend].learner_network:
        yield Issue(
            f"{_SPECULATION}.strategies",
            f"{' and '.join(networks)} are networks, and the {c.rollout.engine.backend} engine drafts with one at most",
            remedy=f"leave {' or '.join(networks)} out; suffix and ngram go beside either",
        )


def _device(c: Config) -> Iterator[Issue]:
    """What a GPU's tensor cores have no product for."""
    form = FORMATS.get(c.rollout.quantization)
    device = device_named(c.cluster.gpu) if c.cluster.gpu is not None else None
    if form is not None and form.activations.startswith("float8") and device is not None and not device.float8:
        yield Issue(
            "rollout.quantization",
            f"{form.name} needs tensor cores for it (Ada, Hopper), and cluster.gpu={device.name} has none",
            remedy="set it to w8a8, which any of these GPUs has",
        )
