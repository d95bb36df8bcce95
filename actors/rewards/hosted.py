"""A user's class or async function in its own actor's process: created once, called there. Sets no deadline for
computation: the actor's owner ends it.
"""

from collections.abc import Sequence

from actors.rewards.callables import member, scored_of
from actors.rewards.calling import UserFunction, told
from actors.rewards.lanes import described, unusable
from config.rewards import RewardTerm
from contracts.rewards import GradeItem, GradingError, Scored


class HostedTerm:
    """See module. An awaited call is cancelled after the term's timeout_s."""

    def __init__(self, options: RewardTerm, key: str) -> None:
        """Raises RewardConfigError, with the frames, if the function cannot be imported, created or called."""
        self._timeout_s = options.timeout_s
        try:
            self._function = UserFunction(**described(options))
            self._function.make()
        except Exception as error:
            _, text, trace = told(error)
            raise unusable(options, key, GradingError(str(text), trace)) from error

    async def scores(self, items: Sequence[GradeItem]) -> list[Scored]:
        outcomes = await self._function.awaited([member(item) for item in items], self._timeout_s)
        return [scored_of(*outcome) for outcome in outcomes]

    async def close(self) -> None:
        """Do nothing: all that it holds ends with the process."""
