"""One round of sampling and grading: requests out, graded rollouts back, whatever order they arrive in.

Serves RL steps and evaluations alike. Owns the overlap of grading with sampling; never decides what is sampled.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.data.tokenizers import Tokenizer
from actors.engine.types import Request, Rollout
from actors.reward_worker import RewardPool
from actors.rewards import Grade, GradeItem
from launch.dispatch import DispatchStats, RolloutDispatcher
from launch.interrupt import Interrupt
from launch.observe import Observer, Sample
from launch.run.requests import Pick


@dataclass(frozen=True, slots=True)
class Graded:
    """One response with its grade. `text` is decoded without special tokens."""

    rollout: Rollout
    grade: Grade
    text: str

    def sample(self, pick: Pick) -> Sample:
        return Sample(
            prompt=pick.prompt.text,
            response=self.text,
            reward=self.grade.value,
            tokens=int(self.rollout.tokens.size),
            finish_reason=self.rollout.finish_reason,
            answer=str(pick.prompt.record.get("answer", "")),
            parts=self.grade.parts,
            error=self.grade.error,
        )


@dataclass(frozen=True, slots=True)
class Group:
    """All responses to one prompt that arrived, in the order of their samples."""

    pick: Pick
    members: list[Graded]

    @property
    def graded(self) -> list[Graded]:
        """Without those whose grading failed; none if the record says nothing about any of them."""
        return [] if self.bad_record else [member for member in self.members if member.grade.error is None]

    @property
    def bad_record(self) -> bool:
        """Whether the record cannot grade anything (reward events: bad_record)."""
        return any(member.grade.bad_record for member in self.members)


@dataclass(frozen=True, slots=True)
class Round:
    """Everything one round brought back."""

    groups: list[Group]
    stats: DispatchStats
    rollout_s: float
    reward_wait_s: float  # after the last rollout, until the last grade

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
    ) -> None:
        """share: show every worker's drafters what the others sampled."""
        self._dispatcher, self._rewards, self._tokenizer = dispatcher, rewards, tokenizer
        self._observer, self._interrupt = observer, interrupt
        self._share = share

    def run(
        self,
        picks: Sequence[Pick],
        samples: int,
        requests: Sequence[Request],
        phase: str,
        *,
        decoding: Callable[[], None] = lambda: None,
        sampled: Callable[[], None] = lambda: None,
    ) -> Round:
        """Sample and grade; `requests` are `samples` per pick in canonical order (launch.run.requests).

        `decoding` is called once, when the first response has come: by then every worker that gets work has it;
        `sampled` once, when nothing is left to sample, whatever happened.
        Raises Interrupted if asked to stop meanwhile; what the dispatcher and the reward pool raise.
        """
        arrived: dict[int, tuple[Rollout, str]] = {}

        def finished(rollout: Rollout) -> None:
            if not arrived:
                decoding()
            text = self._tokenizer.decode(rollout.tokens, skip_special_tokens=True)
            arrived[rollout.request_id] = rollout, text
            prompt = picks[rollout.request_id // samples].prompt
            length = int(rollout.tokens.size)
            item = GradeItem(prompt.text, text, prompt.record, rollout.finish_reason, prompt.where, length)
            self._rewards.submit(rollout.request_id, item)
            self._observer.progress(phase, len(arrived), len(requests))

        self._rewards.begin()
        start_s = time.monotonic()
        try:
            stats = self._dispatcher.run(
                requests, finished, tick=self._rewards.poll, should_stop=lambda: bool(self._interrupt)
            )
        finally:
            sampled()
        sampled_s = time.monotonic()
        if stats.interrupted:
            self._interrupt.check()
        if self._share:  # while the grades come in: nobody waits for it
            made_by = stats.sampled_by
            self._dispatcher.share(
                [(picks[i // samples].prompt.tokens, arrived[i][0].tokens, made_by[i]) for i in sorted(arrived)]
            )
        grades = self._rewards.drain()
        groups = [
            Group(pick, [Graded(arrived[i][0], grades[i], arrived[i][1]) for i in ids if i in arrived])
            for pick, ids in zip(picks, _ids(len(picks), samples), strict=True)
        ]
        return Round(groups, stats, sampled_s - start_s, time.monotonic() - sampled_s)


def _ids(picks: int, samples: int) -> list[range]:
    return [range(i * samples, (i + 1) * samples) for i in range(picks)]
