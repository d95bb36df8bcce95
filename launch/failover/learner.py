"""The learner as a run sees it: a LearnerGroup that is made again when one of its ranks is lost.

Owns what restores a new group to the lost one's state: the phase, the last checkpoint, the updates since (`KeptSteps`),
the recording of hidden states, and the last published weights, whose buffer was lost with its rank. Nothing is sampled
again. Every call of the learner goes through `call`, which repeats what a loss has interrupted. An error that a rank
itself raises (bad input, a loss that is not finite, too little device memory) would recur, so it is passed on.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from actors.learner import PublishedDelta
from actors.learner_group import STARTING, LearnerGroup
from actors.training.checkpoint import CheckpointError
from actors.training.errors import LearnerLostError
from config.learner import OptimizerOptions
from contracts.training import StepResult, TrainSequence
from launch.context import RunContext
from launch.failover.kept import KeptSteps
from launch.failover.starter import LearnerStarter
from launch.node_buffers import NodeBuffers
from models.durable import faults
from models.manifest import WeightsManifest

T = TypeVar("T")
_Method = Literal["begin", "load", "rest", "reference_kl", "publish", "export"]  # of LearnerGroup
SAY_AFTER_S = 10.0  # seconds that a group may wait for its places before that is reported
STOP_AFTER_S = 20.0  # an interrupted run waits no longer; a group that comes up before can still be saved
ANSWER_S = 60.0  # a restart waits no longer for nodes that joined just now to say what they run


@dataclass(frozen=True, slots=True)
class _Published:
    version: int
    masters: bool
    checksum: int
    updates: int  # number of updates done before


class LearnerNews(Enum):
    """The outcome for the group of ranks."""

    STARTS = auto()  # it needs its places: nobody else asks for any until STARTED
    STARTED = auto()  # or not
    WAITS = auto()  # there is no room for it: somebody else gives up a place
    REPEATS = auto()  # updates are done again: engines are to be off the devices that they are repeated on


@dataclass(frozen=True, slots=True)
class WeightsRenewed:
    """The last published weights are in another buffer."""

    manifest: WeightsManifest
    ref: "ray.ObjectRef[Any]"


LearnerEvent = LearnerNews | WeightsRenewed


class _Step:
    """A step that the learner works on, with whichever group exists."""

    def __init__(self, sequences: Sequence[TrainSequence], step: int, asked: int | None, records: bool) -> None:
        self.sequences, self.step, self.asked, self.records = sequences, step, asked, records
        self._group: LearnerGroup | None = None  # which works on it

    def begin(self, group: LearnerGroup) -> None:
        """Begin it, unless `group` works on it already."""
        if self._group is not group:
            group.records = self.records
            group.begin_step(self.sequences, self.step, asked=self.asked)
            self._group = group

    def result(self, group: LearnerGroup) -> StepResult:
        self.begin(group)
        return group.step_result()


class FailoverLearner:
    """A learner with restarts, for the driver's thread. Construct it, `start` the group, then use it like a
    LearnerGroup."""

    def __init__(self, starter: LearnerStarter, kept: KeptSteps, context: RunContext) -> None:
        """The loop is told the LearnerNews and WeightsRenewed."""
        self._starter, self._kept, self._context, self._observer = starter, kept, context, context.observer
        self._max_restarts = context.config.learner.max_restarts
        self._told = ""  # the last report of missing places
        self._restarts = self._repeated = self._calling = 0
        self._recover_s = 0.0  # since `take`
        self._restarts_told = 0
        self._phase: tuple[OptimizerOptions, int] | None = None
        self._base: Path | None = None  # the checkpoint that `kept` continues; None: the initial weights
        self._recording: Callable[[LearnerGroup], None] | None = None
        self.records = True  # see LearnerGroup
        self._rests: bool | None = None  # see `rest`; None: only the learner uses the devices
        self._updates = 0  # of this object's RL steps
        self._published: _Published | None = None
        self._step: _Step | None = None  # the step in progress
        self._unkept = ""  # why the updates since the last checkpoint cannot be repeated
        self._memory_call = ""  # the last call in which a rank ran out of memory
        self._group: LearnerGroup | None = None

    def start(self) -> None:
        """Start the group. Raises as LearnerGroup does, and Interrupted."""
        self._group = self._start()

    @property
    def lost(self) -> bool:
        """Whether there is no group any more."""
        return self._group is None

    @property
    def busy(self) -> bool:
        """Whether a call or a step is in progress. Code that runs meanwhile must not begin another."""
        return self._calling > 0 or self._step is not None

    @property
    def computes_with(self) -> str:
        return str(self._ready.computes_with)

    @property
    def quantise_s(self) -> float:
        return self._ready.quantise_s

    @property
    def delta(self) -> PublishedDelta | None:
        """See LearnerGroup."""
        return self._ready.delta

    @property
    def home(self) -> str:
        """The id of the node that holds the published weights."""
        return self._ready.places[0].node_id

    @property
    def nodes(self) -> set[str]:
        """The ids of the nodes that the ranks run on."""
        return set() if self._group is None else {place.node_id for place in self._group.places}

    def call(self, do: Callable[[LearnerGroup], T]) -> T:
        """Call `do` with the group, and again with a new group after each loss of a rank. `do` leaves the learner's
        state unchanged, or keeps the step that changed it. Raises LearnerLostError when no restart is left, and what
        `do` raises.
        """
        self._calling += 1
        try:
            while True:
                group = self._ready
                try:
                    return do(group)
                except LearnerLostError as error:
                    if group is self._group:  # otherwise a nested call has already made another group
                        self._recover(error)
        finally:
            self._calling -= 1

    def _ask(self, method: _Method, *arguments: Any, **options: Any) -> Any:
        """Call one method of the group whose result is the same when repeated."""

        def ask(group: LearnerGroup) -> Any:
            return getattr(group, method)(*arguments, **options)

        return self.call(ask)

    # What a run calls on the group.

    def record_into(self, buffers: NodeBuffers, **options: Any) -> None:
        """See LearnerGroup. `buffers`: of all nodes, since a new group may have others. Repeated updates record
        nothing, since they were recorded the first time."""

        def record(group: LearnerGroup) -> None:
            group.record_into({place.node_id: buffers.of(place.node_id) for place in group.places}, **options)

        self.call(record)
        self._recording = record

    def begin(self, optimizer: OptimizerOptions, total_steps: int) -> None:
        self._ask("begin", optimizer, total_steps)
        self._phase = optimizer, total_steps
        self._goes_on_from(None)

    def load(self, directory: Path) -> None:
        self._ask("load", directory)
        self._goes_on_from(directory)
        self._published = None  # anything published before was something else

    def rest(self, *, optimizer: bool) -> None:
        self._ask("rest", optimizer=optimizer)
        self._rests = optimizer

    def reference_kl(self, sequences: Sequence[TrainSequence], step: int = 0) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32]] = self._ask("reference_kl", sequences, step)
        return found

    def train_step(self, sequences: Sequence[TrainSequence], step: int = 0, *, asked: int | None = None) -> StepResult:
        self.begin_step(sequences, step, asked=asked)
        return self.step_result()

    def begin_step(self, sequences: Sequence[TrainSequence], step: int = 0, *, asked: int | None = None) -> None:
        """See LearnerGroup. If the group is lost, it is made again and the step begun again when `step_result`, `renew`
        or `mend` is called."""
        self._step = _Step(sequences, step, asked, self.records)
        try:
            self.call(self._step.begin)
        except BaseException:
            self._step = None
            raise

    def step_result(self) -> StepResult:
        step = self._step
        assert step is not None, "begin_step comes first"
        try:
            found = self.call(step.result)
        finally:
            self._step = None
        self._updates += 1
        self._keep(step, found)
        return found

    def _keep(self, step: _Step, result: StepResult) -> None:
        if not self._max_restarts or self._unkept:
            return
        try:
            self._kept.add(step.step, step.sequences, step.asked, result)
        except OSError as error:
            self._kept.clear()
            self._unkept = f"what it was given since the last checkpoint was not kept: {error}"
            self._observer.event(
                "steps_not_kept", f"{error}; a learner lost before the next checkpoint cannot be recovered"
            )

    def publish(
        self, version: int, *, masters: bool = False, delta_share: float = 0.0
    ) -> "tuple[WeightsManifest, ray.ObjectRef[Any]]":
        manifest, ref = self._ask("publish", version, masters=masters, delta_share=delta_share)
        self.published(version, manifest.checksum, masters=masters)
        return manifest, ref

    def published(self, version: int, checksum: int, *, masters: bool = False) -> None:
        """Record what was handed over within `call`."""
        self._published = _Published(version, masters, checksum, self._updates)

    def renew(self) -> bool:
        """Replace the last published buffer after its loss. WeightsRenewed brings another, from a new group if this one
        has lost the rank that kept it. It does nothing within `call`, where weights may be changing, nor while all
        ranks work on a step. Returns true if it has replaced it, or if newer weights will be published."""
        if self._calling:
            return True
        restarts = self._restarts
        if (under_way := self._step) is not None:  # its ranks hold other weights than workers do
            working = True

            def look(group: LearnerGroup) -> None:
                nonlocal working
                under_way.begin(group)
                if working := restarts != self._restarts or not group.step_ended:
                    return
                group.step_result()

            self.call(look)
            return working

        def publish(group: LearnerGroup) -> None:
            group.check()
            if restarts == self._restarts:  # otherwise a new group has done it
                self._publish_again(group)

        self.call(publish)
        return True

    @property
    def to_mend(self) -> bool:
        """Whether a rank was lost while nothing waited for it. Cheap; `mend` then makes another group at once."""
        return not self._calling and self._group is not None and self._group.lost()

    def mend(self) -> None:
        """Make another group if a rank is lost, and begin its interrupted step again."""
        under_way = self._step

        def look(group: LearnerGroup) -> None:
            if group.lost():
                group.check()
            if under_way is not None:
                under_way.begin(group)

        self.call(look)

    def save(self, directory: Path) -> None:
        """Save into an empty directory; call `saved_as` once it has its name."""

        def write(group: LearnerGroup) -> None:
            if any(directory.iterdir()):  # of ranks that were lost
                shutil.rmtree(directory)
                directory.mkdir()
            group.save(directory)

        self.call(write)

    def saved_as(self, directory: Path) -> None:
        """Set the checkpoint from which a new group continues."""
        self._goes_on_from(directory)

    def export(self, directory: Path) -> None:
        self._ask("export", directory)

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return metrics and seconds since the last call, for the record of an RL step."""
        restarts, self._restarts_told = self._restarts - self._restarts_told, self._restarts
        repeated, self._repeated = self._repeated, 0
        recover_s, self._recover_s = self._recover_s, 0.0
        metrics = {
            "learner/restarts": float(restarts),
            "learner/repeated_steps": float(repeated),
            "learner/kept_bytes": float(self._kept.bytes),
        }
        return metrics, {"recover": recover_s} if restarts else {}

    def close(self) -> None:
        group, self._group = self._group, None
        self._kept.clear()
        if group is not None:
            group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # After a loss.

    def rewind(self) -> bool:
        """Return to the end of the last step, for a checkpoint, after a rank's own error has interrupted an update.
        Returns false if the last checkpoint has that step, or if it fails, which is reported."""
        self._step = None
        if self._group is None or not len(self._kept) or self._unkept:
            return False
        group, self._group = self._group, None
        group.close(grace_s=0)
        self._calling += 1
        try:
            self._group = self._made_again()
        except Exception as error:
            self._observer.event("not_rewound", f"the last complete step is not saved: {error}")
            return False
        finally:
            self._calling -= 1
        return True

    def _recover(self, error: LearnerLostError) -> None:
        """Make a new group in the state of the lost one. Raises LearnerLostError, and what `start` and the updates
        raise."""
        begin_s, lost, self._group = self._context.clock(), self._group, None
        if lost is not None:
            lost.close(grace_s=0)
        while (why := self._why_not(error)) is None:
            self._restarts += 1
            self._observer.event(
                "learner_lost", f"{error}; the learner group restarts ({self._restarts} of {self._max_restarts})"
            )
            try:
                group = self._group = self._made_again()
            except LearnerLostError as again:
                error = again
                continue
            spent_s = self._context.clock() - begin_s
            self._recover_s += spent_s
            nodes = ", ".join(sorted({place.node_ip for place in group.places}))
            base = "the initial weights" if self._base is None else self._base.parent.name
            self._observer.event(
                "learner_restarted",
                f"on {nodes}, after {spent_s:.1f} s: from {base}, repeating the updates of {len(self._kept)} RL steps",
            )
            return
        raise error.with_remedy(why)

    def _why_not(self, error: LearnerLostError) -> str | None:
        """Return why the group is not made again; None if it is, "" if the run did not ask for restarts."""
        if self._max_restarts == 0:
            return ""
        if self._unkept:
            return self._unkept
        if self._restarts >= self._max_restarts:
            return f"all {self._max_restarts} restarts of the learner are used up (learner.max_restarts)"
        if error.kind == "silent" and error.call in STARTING:
            missing = self._starter.missing() or "its place is reserved, and nothing came up there"
            return f"it was not made again: {missing}"
        if error.kind == "memory":
            if error.call == self._memory_call:
                return (
                    "its node lacked memory in this call twice: lower learner.micro_batch_tokens or raise learner.ranks"
                )
            self._memory_call = error.call
        return None

    def _made_again(self) -> LearnerGroup:
        self._observer.progress("learner restart", 0, 0)
        group = self._start()
        try:
            self._restore(group)
        except BaseException:
            group.close(grace_s=0)
            raise
        return group

    def _start(self) -> LearnerGroup:
        self._told = ""
        loop = self._context.loop
        loop.tell(LearnerNews.STARTS)
        loop.turn()
        try:
            if self._starter.undecided():
                loop.wait(self._decided, loop.clock() + ANSWER_S)
            return self._starter.start()
        finally:
            loop.tell(LearnerNews.STARTED)

    def _decided(self) -> bool:
        """Return whether the ranks' places wait for no node's answer. Raises Interrupted."""
        self._context.interrupt.check()
        return not self._starter.undecided()

    def awaited(self, waited_s: float) -> None:
        """Called while ranks start. Raises Interrupted."""
        if waited_s >= STOP_AFTER_S:
            self._context.interrupt.check()
        if waited_s >= SAY_AFTER_S and (missing := self._starter.missing()):
            if missing != self._told:
                self._told = missing
                self._observer.event("learner_waits", f"for room: {missing}")
            self._context.loop.tell(LearnerNews.WAITS)

    def _restore(self, group: LearnerGroup) -> None:
        if self._phase is not None:
            group.begin(*self._phase)
        if self._base is not None:
            _require_undamaged(self._base)
            group.load(self._base)
        if len(self._kept):
            self._context.loop.tell(LearnerNews.REPEATS)
            self._context.loop.turn()
        differs = ""
        for number, kept in enumerate(self._kept):
            self._observer.progress("learner catches up", number, len(self._kept))
            result = group.train_step(kept.sequences, kept.step, asked=kept.asked)
            self._repeated += 1
            if not differs and (result.losses, result.grad_norms) != (kept.losses, kept.grad_norms):
                differs = f"losses of step {kept.step} were {kept.losses}, now they are {result.losses}"
        if self._recording is not None:
            self._recording(group)
        others = self._publish_again(group)
        if self._rests is not None:
            group.rest(optimizer=self._rests)
        if differs := differs or others:
            self._observer.event(
                "learner_differs", f"{differs}: the run continues with different last bits (docs/concepts/fleet.md)"
            )

    def _publish_again(self, group: LearnerGroup) -> str:
        """Publish again the weights that workers hold, if the group still has them. Returns how they differ
        from those."""
        last = self._published
        if last is None or last.updates != self._updates:  # the caller of the interrupted hand-over repeats it
            return ""
        manifest, ref = group.publish(last.version, masters=last.masters)
        self._context.loop.tell(WeightsRenewed(manifest, ref))
        same = manifest.checksum == last.checksum
        return "" if same else f"weights of version {last.version} have another checksum"

    def _goes_on_from(self, checkpoint: Path | None) -> None:
        self._base, self._unkept = checkpoint, ""
        self._kept.clear()

    @property
    def _ready(self) -> LearnerGroup:
        if self._group is None:
            raise RuntimeError("the learner is lost, and was not made again")
        return self._group


def _require_undamaged(learner: Path) -> None:
    """Raise CheckpointError if a file of the learner has changed since its checkpoint was written: a new group would
    get other weights than the run's."""
    damaged = [fault for fault in faults(learner.parent) or () if fault.file.startswith(f"{learner.name}/")]
    if damaged:
        raise CheckpointError(f"{damaged[0].file} of {learner.parent.name} {damaged[0].what}")
