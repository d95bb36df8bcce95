"""A user's class or async function in the process of its own actor: made once, called there. Owns no deadline of what
computes: whoever has the actor ends it.
"""

from collections.abc import Sequence

from actors.rewards.callables import member, scored_of
from actors.rewards.calling import UserFunction, told
from actors.rewards.lanes import described, unusable
from config.rewards import RewardTerm
from contracts.rewards import GradeItem, GradingError, Scored


class HostedTerm:
    """See module. A call that is awaited is cancelled after the term's timeout_s."""

    def __init__(self, options: RewardTerm, key: str) -> None:
        """Raises RewardConfigError, with the frames, if it cannot be imported, made or called."""
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
        """Nothing of it is ours but the process."""
