"""A short round's race (policies.rounds) in terms of requests: which ones to abort. Owns only that translation."""

from collections.abc import Sequence
from dataclasses import dataclass

from contracts.rollout import Rollout
from launch.batch import Batch
from policies.rounds import Race


@dataclass(slots=True, kw_only=True)
class RaceUnderWay:
    """The race of a batch, by its requests."""

    race: Race
    batch: Batch

    def reached(self, request_id: int, tokens: int) -> list[int]:
        """Return the requests to abort, since one's response has this many tokens."""
        return self._of(self.race.reached(self.batch.place(request_id)[0], tokens))

    def ended(self, rollout: Rollout) -> list[int]:
        """Return the requests to abort, since one has ended by itself."""
        group, _ = self.batch.place(rollout.request_id)
        return self._of(self.race.ended(group, len(rollout.tokens)))

    def _of(self, groups: Sequence[int]) -> list[int]:
        return [request_id for group in groups for request_id in self.batch.ids(group)]
