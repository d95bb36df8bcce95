"""The numbering of a drafter's versions. Owns the one number that orders them.

A version is the number of micro-steps of its weights, within one lineage. A roll-back begins the next lineage: the
restored weights get a number above everything made from the bad ones, including what trainers still make before they
learn of it. So the larger number is always the newer version, and late weights of an abandoned lineage are recognised.
"""

LINEAGE = 10**9  # micro-steps, more than any run has


def micro_steps(version: int) -> int:
    """Return the micro-steps of the weights, for people."""
    return version % LINEAGE


def returning(good: int, newest: int) -> int:
    """Return the version under which `good` returns. `newest`: the largest number so far."""
    return (newest // LINEAGE + 1) * LINEAGE + micro_steps(good)
