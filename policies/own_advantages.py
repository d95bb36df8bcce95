"""Advantages by a user's own function, named by `objective.advantages: package.module:function`.

Owns the call and the checks of its result. It runs on the driver, once per RL step, over all groups of the batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from config.import_path import OwnCodeError, described, imported
from policies.advantages import GroupAdvantages, batch_advantages

KEY = "objective.advantages"


def own_advantages(
    groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]], *, path: str, arguments: dict[str, Any]
) -> list[GroupAdvantages]:
    """Do what `policies.advantages.batch_advantages` does, with advantages from function(rewards, lengths,
    **arguments).

    The function gets lists with one array per group, as copies: rewards float64 [n] and lengths int64 [n] (response
    tokens; 0: the response is not trained on). It returns a list of as many arrays [n]. Mean, std and zero_variance
    stay those of the rewards. Raises OwnCodeError that names the fault, and ValueError for rewards that are not finite.
    """
    made = batch_advantages(groups, baseline="none", normalize="none")
    function = imported(path, KEY)
    rewards = [np.array(group, dtype=np.float64) for group in groups]
    tokens = [np.array(group, dtype=np.int64) for group in lengths]
    try:
        returned: object = function(rewards, tokens, **arguments)
    except Exception as error:  # the user's code may raise anything
        raise OwnCodeError(f"{KEY}: {path} raised {described(error)}") from error
    if not isinstance(returned, list | tuple) or len(returned) != len(groups):
        got = f"{len(returned)} entries" if isinstance(returned, list | tuple) else type(returned).__name__
        raise OwnCodeError(f"{KEY}: {path} returned {got}, not a list with an array for each of {len(groups)} groups")
    return [
        replace(group, advantages=_checked(index, values, len(own), path))
        for index, (group, values, own) in enumerate(zip(made, returned, groups, strict=True))
    ]


def _checked(index: int, values: object, size: int, path: str) -> NDArray[np.float64]:
    try:
        advantages = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OwnCodeError(f"{KEY}: {path} returned no numbers for group {index}: {error}") from error
    if advantages.shape != (size,):
        shape = list(advantages.shape)
        raise OwnCodeError(f"{KEY}: {path} returned shape {shape} for group {index} of {size} responses, not [{size}]")
    if not np.isfinite(advantages).all():
        which = int(np.flatnonzero(~np.isfinite(advantages))[0])
        raise OwnCodeError(f"{KEY}: {path} returned {advantages[which]} for response {which} of group {index}")
    return advantages


def try_advantages(path: str, arguments: dict[str, Any]) -> None:
    """Call it once on three groups, one of them with equal rewards. Raises OwnCodeError."""
    groups, lengths = [[0.0, 1.0, 1.0], [0.5, 0.5], [0.0, 0.25, 1.0, 0.5]], [[9, 4, 7], [3, 0], [5, 5, 8, 2]]
    own_advantages(groups, lengths, path=path, arguments=arguments)
