"""The default arms per drafter, most promising first, and the default ladder."""

from collections.abc import Iterable

from config.catalogue import by_name
from config.strategy import Strategy


def default_arms(drafters: Iterable[str], *, trees: bool = True) -> tuple[Strategy, ...]:
    """Return the arms of these drafters: every drafter's first before any drafter's second. Without `trees` only
    chains."""
    parsed = ([Strategy.parse(text) for text in entry.arms] for entry in by_name(drafters).values())
    lists = [[arm for arm in arms if trees or not arm.is_tree] for arms in parsed]
    longest = max((len(arms) for arms in lists), default=0)
    return tuple(arms[i] for i in range(longest) for arms in lists if i < len(arms))


def default_ladder(drafters: Iterable[str]) -> tuple[Strategy, ...]:
    """Return chains of the one drafter of mode roofline: the copy of the target if available, else the first."""
    found = by_name(drafters)
    name = "self" if "self" in found else next(iter(found))
    return default_arms([name], trees=False)
