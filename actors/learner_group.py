"""The driver's interface to the learner: one object, synchronous calls, a deadline on each. Importable without torch.

Manages the rank actors: their start, their rendezvous, and the detection of a lost one. A lost rank ends the group
(FSDP2 shards cannot be replaced in flight); the driver then makes a new one (launch.failover).
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from actors.context import Context
from actors.identity import unique_name
from actors.learner import LearnerRank, LearnerSpec, Place, PublishedDelta
from actors.loop import SLICE_S
from actors.training.errors import LearnerLostError, LossKind
from config.formats import Quantization
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.handoff import Offer, Sent, Terms, Way
from contracts.training import Demonstration, StepResult, TrainSequence
from models.manifest import TensorSpec, WeightsManifest
from policies.roofline.pace import Pace

GRACE_S = 10.0  # after a first failure, to find its cause: peers of a dead rank fail too, often earlier
CLOSE_S = 10.0
_LOOK_S = 1.0  # between two checks of starting ranks
_PING_S = 2.0  # between two pings of the ranks
STARTING = frozenset({"start", "rendezvous"})  # calls of the constructor: LearnerLostError.call


@dataclass(frozen=True, slots=True)
class WeightsSending:
    """A running hand-off of weights."""

    first: Offer  # for receiver 0; the others differ in the number only
    sent: Callable[[], Sent]
    keep: "Callable[[int], ray.ObjectRef[Any]]"

    def offer(self, receiver: int) -> Offer:
        return replace(self.first, receiver=receiver)

    def finish(self) -> "tuple[Sent, WeightsManifest, ray.ObjectRef[Any]]":
        """Wait for the ranks. Return the result, its manifest, and its buffer for workers that missed it or join later.

        The ranks start to make that buffer now; only its readers wait for it. Raises LearnerLostError."""
        sent = self.sent()
        manifest = WeightsManifest(sent.version, sent.checksum, self.first.tensors, sent.total_bytes)
        return sent, manifest, self.keep(sent.checksum)


@dataclass(frozen=True, slots=True)
class RanksAwaited:
    """Event: a group is starting, and not all of its ranks are up yet."""

    waited_s: float


class LearnerGroup:
    """`learner.ranks` rank actors. Construct (which waits until all are up), `begin` a phase, then step."""

    def __init__(
        self,
        model: ModelOptions,
        learner: LearnerOptions,
        objective: ObjectiveOptions,
        *,
        temperature: float,
        init: Literal["checkpoint", "random"] = "checkpoint",
        seed: int = 0,
        quantization: Quantization = "none",
        adapters_only: bool = False,
        actor_options: Sequence[Mapping[str, Any]] = (),
        start_timeout_s: float = 600.0,
        context: Context | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`actor_options`: by rank, Ray's (placement group, num_cpus, num_gpus, resources); default: one CPU each.
        `context`: by default a learner's without a driver, as for a warm start. Its loop receives RanksAwaited about
        every second until all ranks are up; an exception of the reaction ends the start. `pace`: for experiments.

        Raises LearnerLostError if a rank does not come up, and the rank's own error if it cannot build the model.
        """
        spec = LearnerSpec(
            model=model,
            learner=learner,
            objective=objective,
            temperature=temperature,
            init=init,
            seed=seed,
            quantization=quantization,
            adapters_only=adapters_only,
            pace=pace,
        )
        self._timeout_s, self._context = learner.timeout_s, context or Context()
        self._pings: list[Any] = []  # unanswered
        self._ping_s, self._lost_one = 0.0, False
        self._weights_store: str | None = None
        self._layouts: dict[bool, tuple[tuple[TensorSpec, ...], int]] = {}  # by `masters`
        self._sendings = 0
        self.quantise_s = 0.0  # rank 0's time for quantisation in the last publish or send
        self.delta: PublishedDelta | None = None  # of the last published weights
        self._rests: bool | None = None  # whether to free the optimizer's state too; None: no rest requested yet
        self._rested = False
        self.records = True  # whether RL steps record hidden states, where `record_into` was called
        self._step, self._step_s = "", 0.0  # the step that was started last: its name for messages, and when
        self._step_refs: list[Any] = []  # answers of the ranks to it
        size = learner.ranks
        self._places = [Place("?", "?", 0)] * size
        remote = ray.remote(LearnerRank)
        self._ranks: list[Any] = []
        try:
            for index in range(size):
                name = f"learner-{index}"
                options = {"num_cpus": 1, **(actor_options[index] if actor_options else {}), "name": unique_name(name)}
                self._ranks.append(remote.options(**options).remote(spec, index, size, self._context.log(name)))
            deadline_s = time.monotonic() + start_timeout_s
            self._places = self._call("start", deadline_s - time.monotonic(), "place")
            on_node = Counter(place.node_id for place in self._places)
            host = "127.0.0.1" if len(on_node) == 1 else self._places[0].node_ip
            port = 0
            if size > 1:
                port = self._wait(
                    "rendezvous", start_timeout_s, [self._ranks[0].open_rendezvous.remote(host, start_timeout_s)]
                )[0]
            self.computes_with = self._wait(  # of one rank; all are alike
                "start",
                deadline_s - time.monotonic(),
                [
                    rank.join.remote(host, port, on_node[place.node_id], start_timeout_s)
                    for rank, place in zip(self._ranks, self._places, strict=True)
                ],
            )[0]
        except BaseException:
            self.close(grace_s=0)
            raise

    @property
    def places(self) -> list[Place]:
        """Node and process of each rank."""
        return list(self._places)

    def record_into(
        self,
        buffers: Mapping[str, Any],
        *,
        max_bytes: int,
        eagle3: bool = False,
        layers: tuple[int, int, int] | None = None,
        seed: int = 0,
    ) -> None:
        """Send hidden states of every later `train_step` to data buffers (handles by node id), at most `max_bytes` per
        rank, unless `records` is set to False. `eagle3`: with the outputs of `layers`, by default the usual three."""
        self._call(
            "record_into",
            self._timeout_s,
            "record_into",
            buffers,
            max_bytes,
            layers,
            eagle3,
            seed,
        )

    def begin(self, optimizer: OptimizerOptions, total_steps: int) -> None:
        """Start a phase (warm start, RL) of `total_steps` optimizer steps: fresh optimizer and schedule. The current
        weights become the reference of the KL term."""
        self._ask("begin", optimizer, total_steps)

    def rest(self, *, optimizer: bool) -> None:
        """Free the devices for engines until the next step: ranks release torch's cached memory, and the optimizer's
        state too if `optimizer`.

        After the first call, they also do so at the end of every `send`, before they make the store's copy."""
        self._rests = optimizer
        if not self._rested:
            self._ask("rest", optimizer)
            self._rested = True

    def train_step(self, sequences: Sequence[TrainSequence], step: int = 0, *, asked: int | None = None) -> StepResult:
        """Run one RL step on these sequences, in this order. `step` is for error messages only. `asked`: number of
        responses requested in it, trained on or not; required by aggregation fixed_mean_token_sum_norm."""
        self.begin_step(sequences, step, asked=asked)
        return self.step_result()

    def begin_step(self, sequences: Sequence[TrainSequence], step: int = 0, *, asked: int | None = None) -> None:
        """Start `train_step` without waiting. Call no other method of the learner before `step_result`."""
        shared, self._step, self._step_s = ray.put(list(sequences)), f"train_step {step}", time.monotonic()
        self._step_refs = self._begin(self._step, "train_step", shared, asked, self.records)

    def step_result(self) -> StepResult:
        """Wait for the step that `begin_step` has started. Raises the errors of `train_step`."""
        first: StepResult = self._wait(self._step, self._timeout_s, self._step_refs, self._step_s)[0]
        return first

    @property
    def step_ended(self) -> bool:
        """Whether a rank has answered the started step, or is lost."""
        return bool(ray.wait(self._step_refs, num_returns=1, timeout=0, fetch_local=False)[0])

    def reference_kl(self, sequences: Sequence[TrainSequence], step: int = 0) -> list[NDArray[np.float32]]:
        """Return the KL to the reference of every response token under the current weights, by the estimator
        `objective.kl`.

        [T] for each sequence, in their order; advantages are ignored. For KL in the reward."""
        shared = ray.put(list(sequences))
        parts = self._call(f"reference_kl {step}", self._timeout_s, "reference_kl", shared)
        found = {index: values for part in parts for index, values in part.items()}
        return [found[index] for index in range(len(sequences))]

    def sft_step(self, demonstrations: Sequence[Demonstration]) -> StepResult:
        """Run one supervised optimizer step on these demonstrations."""
        shared = ray.put(list(demonstrations))
        result: StepResult = self._ask("sft_step", shared)[0]
        return result

    def publish(
        self, version: int, *, masters: bool = False, delta_share: float = 0.0
    ) -> "tuple[WeightsManifest, ray.ObjectRef[Any]]":
        """Return the current weights as (manifest, reference to a uint8 numpy buffer).

        They are in the rollouts' form, or only the adapters that engines merge (`adapters_only`); `masters`: all
        weights, in model.dtype. Rank 0's actor owns the buffer and keeps the newest; older ones live as long as a
        reference exists.

        `delta_share`: also set `delta`, the changes since the last publish, if its size is at most this share of the
        buffer; 0: compute none. There is no earlier version after the loss of a rank."""
        self.delta = None
        published = self._ask("publish", version, masters, delta_share)[0]
        assert published is not None
        manifest: WeightsManifest = published[0]
        self.quantise_s, self.delta = published[2], published[3]
        return manifest, published[1]

    def send(
        self,
        version: int,
        *,
        receivers: int,
        way: Way,
        limit_s: float,
        masters: bool = False,
        changes: bool = False,
    ) -> "WeightsSending":
        """Start to send the current weights to this many engines, piece by piece; does not wait for them.

        `limit_s`: for all of it. `masters`: see `publish`. `changes`: see Terms. Call no other method of the learner
        before `finish`."""
        if self._weights_store is None:
            opened = self._ranks[0].open_weights_store.remote(self._places[0].node_ip, self._timeout_s)
            self._weights_store = self._wait("send", self._timeout_s, [opened])[0]
        if masters not in self._layouts:
            asked = self._ranks[0].weights_layout.remote(masters)
            self._layouts[masters] = self._wait("send", self._timeout_s, [asked])[0]
        self._sendings += 1
        terms = Terms(
            name=f"weights/{version}/{self._sendings}",
            version=version,
            receivers=receivers,
            way=way,
            limit_s=limit_s,
            changes=changes,
        )
        store, (tensors, total_bytes) = self._weights_store, self._layouts[masters]
        refs = [rank.send_weights.remote(terms, store, masters) for rank in self._ranks]
        rests = [] if self._rests is None else [rank.rest.remote(self._rests) for rank in self._ranks]
        self._rested = self._rests is not None
        offer = Offer(
            store=store,
            name=terms.name,
            version=version,
            tensors=tensors,
            total_bytes=total_bytes,
            receiver=0,
            limit_s=limit_s,
        )

        def sent() -> Sent:
            result: Sent = self._wait("send", self._timeout_s, refs)[0]
            self.quantise_s = result.quantise_s
            self._wait("rest", self._timeout_s, rests)
            return result

        def keep(checksum: int) -> "ray.ObjectRef[Any]":
            # All ranks gather; rank 0 holds the result.
            kept = [rank.keep_weights.remote(version, checksum, masters) for rank in self._ranks]
            first: ray.ObjectRef[Any] = kept[0]
            return first

        return WeightsSending(offer, sent, keep)

    def lost(self) -> bool:
        """Return whether a rank is known to have ended, for frequent polling. It is cheap and never waits; the next
        call raises the error with rank and reason."""
        if self._ranks and (now_s := time.monotonic()) >= self._ping_s:
            self._pings = self._pings or [rank.place.remote() for rank in self._ranks]
            there, self._pings = ray.wait(self._pings, num_returns=len(self._pings), timeout=0, fetch_local=False)
            self._ping_s = now_s + (SLICE_S if self._pings else _PING_S)
            for ref in there:
                try:
                    ray.get(ref, timeout=GRACE_S)
                except RayError as error:
                    self._lost_one = self._lost_one or isinstance(error, ActorDiedError)
        return self._lost_one

    def check(self) -> None:
        """Check that all ranks answer. Raises LearnerLostError."""
        self._call("check", self._timeout_s, "place")

    def save(self, directory: str | Path) -> None:
        """Save weights, optimizer, schedule and RNG into a directory that all ranks see. For `write_checkpoint`."""
        self._ask("save", str(directory))

    def load(self, directory: str | Path) -> None:
        """Continue where `save` was called; `begin` the same phase first."""
        self._ask("load", str(directory))

    def export(self, directory: str | Path) -> None:
        """Write a Hugging Face model directory, atomically."""
        self._ask("export", str(directory))

    def close(self, grace_s: float = CLOSE_S) -> None:
        """End all ranks; never raises, never waits longer than grace_s. Idempotent."""
        ranks, self._ranks = self._ranks, []
        if grace_s > 0 and ranks:
            with contextlib.suppress(RayError):
                ray.wait([rank.leave.remote() for rank in ranks], num_returns=len(ranks), timeout=grace_s)
        for rank in ranks:
            with contextlib.suppress(RayError):
                ray.kill(rank)

    def __enter__(self) -> "LearnerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on every rank; results in rank order."""
        return self._call(method, self._timeout_s, method, *arguments)

    def _call(self, name: str, timeout_s: float, method: str, *arguments: object) -> list[Any]:
        """Same as `_ask`, with a time limit and a name of the call for messages."""
        return self._wait(name, timeout_s, self._begin(name, method, *arguments))

    def _begin(self, name: str, method: str, *arguments: object) -> list[Any]:
        if not self._ranks:
            raise RuntimeError(f"learner.{name}: the learner group is closed")
        self._rested = False  # any call may need the optimizer
        return [getattr(rank, method).remote(*arguments) for rank in self._ranks]

    def _wait(self, name: str, timeout_s: float, refs: list[Any], begun_s: float | None = None) -> list[Any]:
        """Return the results of refs (rank i's is refs[i]), or raise the failure that explains the others. `begun_s`:
        start of the time limit; default: now."""
        begin_s = time.monotonic() if begun_s is None else begun_s
        deadline_s, starting = begin_s + timeout_s, name in STARTING
        pending, failures = list(refs), dict[int, RayError]()
        loop = self._context.loop
        loop.wake_for(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=0, fetch_local=False)
            if not done and (left_s := deadline_s - time.monotonic()) > 0:
                loop.turn(min(left_s, _LOOK_S if starting else SLICE_S))
                if starting:
                    loop.tell(RanksAwaited(time.monotonic() - begin_s))
                    loop.turn()
                continue
            if not done:
                break
            index = refs.index(done[0])
            try:
                ray.get(done[0], timeout=GRACE_S)
            except RayError as error:
                if not failures:
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                failures[index] = error
                if isinstance(error, RayActorError):
                    break
        if not failures and not pending:
            return list(ray.get(refs, timeout=GRACE_S))
        raise self._explain(name, timeout_s, failures, [refs.index(ref) for ref in pending])

    def _explain(self, name: str, timeout_s: float, failures: dict[int, RayError], silent: list[int]) -> Exception:
        """Return the cause: a dead rank; else an error raised by a rank; else a rank without an answer."""
        for index, error in sorted(failures.items()):
            if isinstance(error, RayActorError | GetTimeoutError):
                return self._lost(index, name, *self._why(index, error))
        raised = [e.cause for _, e in sorted(failures.items()) if isinstance(e, RayTaskError)]
        # A rank whose peer fails sees a broken connection (RuntimeError of torch.distributed): a consequence, not the
        # cause.
        raised.sort(key=lambda cause: type(cause).__name__ in ("DistBackendError", "DistNetworkError", "RuntimeError"))
        if raised and isinstance(raised[0], Exception):
            return raised[0]
        if failures:
            index, error = min(failures.items())
            return self._lost(index, name, *self._why(index, error))
        key = "cluster.start_timeout_s" if name in STARTING else "learner.timeout_s"
        return self._lost(silent[0], name, f"no answer in {timeout_s:g} s ({key})", "silent")

    def _why(self, index: int, error: RayError) -> tuple[str, LossKind]:
        """Describe the loss briefly: Ray's text is a paragraph with class and ids, and is in the logs."""
        pid, text = self._places[index].pid, str(error)
        if isinstance(error, OutOfMemoryError) or "OutOfMemory" in text or "memory pressure" in text:
            return f"its process {pid} was ended because its node ran out of memory", "memory"
        if getattr(error, "preempted", False):
            return "its node was preempted", "ended"
        if "node has died" in text or "node is dead" in text or "NODE_DIED" in text:
            return "its node is gone", "ended"
        if isinstance(error, RayActorError):
            reason = f"its process {pid} has ended: killed (SIGTERM, SIGKILL, or its system lacked memory), or crashed"
            return reason, "ended"
        if isinstance(error, GetTimeoutError):
            return f"its answer did not arrive within {GRACE_S:g} s", "silent"
        return next(iter(text.strip().splitlines()), type(error).__name__), "ended"

    def _lost(self, index: int, name: str, reason: str, kind: LossKind) -> LearnerLostError:
        place = self._places[index]
        return LearnerLostError(index, f"{place.node_ip} ({place.node_id[:8]})", name, reason, kind)
