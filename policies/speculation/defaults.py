"""The arms that are tried where the configuration names none, per drafter, most promising first; a ladder."""

from collections.abc import Iterable

from config.catalogue import by_name
from config.strategy import Strategy


def default_arms(drafters: Iterable[str], *, trees: bool = True) -> tuple[Strategy, ...]:
    """Arms of the drafters at hand: every drafter's first before any drafter's second. Without `trees` only chains."""
    parsed = ([Strategy.parse(text) for text in entry.arms] for entry in by_name(drafters).values())
    lists = [[arm for arm in arms if trees or not arm.is_tree] for arms in parsed]
    longest = max((len(arms) for arms in lists), default=0)
    return tuple(arms[i] for i in range(longest) for arms in lists if i < len(arms))


def default_ladder(drafters: Iterable[str]) -> tuple[Strategy, ...]:
    """Chains of the one drafter that mode roofline takes: the copy of the target if it is at hand, else the first."""
    found = by_name(drafters)
    name = "self" if "self" in found else next(iter(found))
    return default_arms([name], trees=False)
