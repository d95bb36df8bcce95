"""One round of sampling and grading: requests out, graded rollouts back, whatever order they arrive in.

Serves RL steps and evaluations alike. Owns the overlap of grading with sampling; never decides what is sampled.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.data.tokenizers import Tokenizer
from actors.engine.types import Rollout
from actors.reward_worker import RewardPool
from actors.rewards import GradeItem
from launch.batch import Batch
from launch.dispatch import DispatchStats, RolloutDispatcher
from launch.fleet import Fleet
from launch.interrupt import Interrupt
from launch.observe import Observer
from launch.run.groups import Graded, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Everything one round brought back."""

    groups: list[Group]
    stats: DispatchStats
    rollout_s: float
    reward_wait_s: float  # after the last rollout, until the last grade
    metrics: dict[str, float] = field(default_factory=dict)  # of what was planned, and of what became of it
    counts: list[int] = field(default_factory=list)  # responses asked for, by group

    @property
    def members(self) -> list[Graded]:
        return [member for group in self.groups for member in group.members]

    @property
    def failed(self) -> int:
        """Responses that did not arrive, or could not be graded."""
        ungraded = [m for m in self.members if m.grade.error is not None and not m.grade.bad_record]
        return len(self.stats.failed) + len(ungraded)


class Collector:
    """Runs rounds on the dispatcher's workers and the reward pool."""

    def __init__(
        self,
        dispatcher: RolloutDispatcher,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        observer: Observer,
        interrupt: Interrupt,
        *,
        share: bool = False,
        fleet: Fleet | None = None,
    ) -> None:
        """share: show every worker's drafters what the others sampled. fleet: is told of begins and ends."""
        self._dispatcher, self._rewards, self._tokenizer = dispatcher, rewards, tokenizer
        self._observer, self._interrupt = observer, interrupt
        self._share, self._fleet = share, fleet

    def run(
        self,
        batch: Batch,
        phase: str,
        *,
        same_step: bool = False,
        to_the_end: bool = False,
        decoding: Callable[[], None] = lambda: None,
        sampled: Callable[[], None] = lambda: None,
    ) -> Round:
        """Sample and grade; one group per pick, in their order.

        `same_step`: a further round of the RL step before, whose failures count on. `to_the_end`: it is not given up
        when the run is asked to stop. `decoding` is called once, when the
        first response has come: by then every worker that gets work has it; `sampled` once, when nothing is left to
        sample, whatever happened.
        Raises Interrupted if asked to stop meanwhile; what the dispatcher and the reward pool raise.
        """
        arrived: dict[int, tuple[Rollout, str]] = {}

        def finished(rollout: Rollout) -> None:
            if not arrived:
                decoding()
            text = self._tokenizer.decode(rollout.tokens, skip_special_tokens=True)
            arrived[rollout.request_id] = rollout, text
            prompt = batch.prompt(rollout.request_id)
            length = int(rollout.tokens.size)
            item = GradeItem(
                prompt=prompt.text,
                response=text,
                record=prompt.record,
                finish_reason=rollout.finish_reason,
                where=prompt.where,
                tokens=length,
            )
            self._rewards.submit(rollout.request_id, item)
            self._observer.progress(phase, len(arrived), len(batch))

        self._rewards.begin(same_step=same_step)
        start_s = time.monotonic()
        if self._fleet is not None:
            self._fleet.begins(phase)
        try:
            stats = self._dispatcher.run(
                batch.requests,
                finished,
                tick=self._rewards.poll,
                should_stop=lambda: not to_the_end and bool(self._interrupt),
            )
        finally:
            sampled()
        sampled_s = time.monotonic()
        if self._fleet is not None:
            self._fleet.ends(stats.tokens)
        if stats.interrupted:
            self._interrupt.check()
        if self._share:  # while the grades come in: nobody waits for it
            made_by = stats.sampled_by
            self._dispatcher.drafters.share(
                [(batch.prompt(i).tokens, arrived[i][0].tokens, made_by[i]) for i in sorted(arrived)]
            )
        grades = self._rewards.drain()

        def graded(i: int) -> Graded:
            rollout, text = arrived[i]
            return Graded(rollout, grades[i], text, stats.sampled_by[i], i in stats.reissued_ids)

        groups = [
            Group(pick, [graded(i) for i in batch.ids(index) if i in arrived]) for index, pick in enumerate(batch.picks)
        ]
        counts = [len(batch.ids(index)) for index in range(len(batch.picks))]
        return Round(
            groups=groups,
            stats=stats,
            rollout_s=sampled_s - start_s,
            reward_wait_s=time.monotonic() - sampled_s,
            counts=counts,
        )
