"""Move the learner's weights to the workers: the choice of the way, and when to give it up. Owns no weights."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.engine.capabilities import capabilities_of, engine_name
from contracts.handoff import Way
from launch.config import Config
from launch.context import RunContext
from launch.dispatch import RolloutDispatcher
from launch.failover import FailoverLearner
from launch.run.deltas import DeltaChoice

_IN_VAIN = 2  # consecutive hand-overs that reached no engine, after which the run uses the store only

BY_WAY = {
    "ipc": "weights/by_ipc",
    "broadcast": "weights/by_broadcast",
    "store": "weights/by_store",
    "delta": "weights/by_delta",
}


@dataclass(frozen=True, slots=True)
class Published:
    """Seconds of both halves, `publish` (the learner writes or sends) and `sync` (until all workers have answered).
    Also the metrics: weights/bytes, and the number of workers by way."""

    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def way_of(config: Config) -> tuple[Way | None, str]:
    """Return how to send weights piece by piece (None: through the object store), by `cluster.weights`, and why, for
    people."""
    cluster, wanted = config.cluster, config.cluster.weights
    if not capabilities_of(config).pieces:
        return None, f"the {engine_name(config)} takes weights from the object store only"
    if wanted != "auto":
        return None if wanted == "store" else wanted, f"cluster.weights is {wanted}"
    devices = {"learner.device": config.learner.device, "rollout.engine.device": config.rollout.engine.device}
    if on_cpu := [key for key, device in devices.items() if device == "cpu"]:
        return None, f"{on_cpu[0]} is cpu, so they go through the machine's memory anyway"
    if cluster.layout == "embedded" or not cluster.gpus_per_worker or not cluster.gpus_per_learner:
        return None, "not both sides have GPUs (cluster.layout), so they go through the machine's memory anyway"
    return "auto", "CUDA IPC where an engine shares its GPU with a learner rank, NCCL to all others"


class Publisher:
    """The publisher, for the driver's thread."""

    def __init__(
        self,
        learner: FailoverLearner,
        dispatcher: RolloutDispatcher,
        context: RunContext,
        deltas: DeltaChoice,
    ) -> None:
        self._deltas = deltas
        self._learner, self._dispatcher, self._context = learner, dispatcher, context
        config = context.config
        self._way, self._why = way_of(config)
        self._told = False  # the way was reported
        self._limit_s = config.rollout.weight_sync_timeout_s
        self._to_trainers = config.drafter.train
        self._quantises = config.rollout.quantization != "none"
        self._in_vain = 0

    def publish(self, version: int, *, masters: bool = False) -> Published:
        """Returns when every worker that is up holds the learner's present weights; `masters`: in model.dtype, whatever
        rollout.quantization says. Raises PacelineError as RolloutDispatcher.set_weights,
        LearnerLostError."""
        if self._way is None:
            return self._by_store(version, masters)
        return self._by_pieces(version, self._way, masters)

    def _by_store(self, version: int, masters: bool) -> Published:
        """With what changed beside the whole buffer, where a delta may be worth it."""
        share = self._deltas.share(elsewhere=self._dispatcher.elsewhere(self._learner.home))
        start_s = time.monotonic()
        with self._context.learner_span("publish"):
            manifest, ref = self._learner.publish(version, masters=masters, delta_share=share)
        found, written_s = self._learner.delta, time.monotonic()
        deltas = self._deltas.deltas(manifest, found, self._learner.home)
        workers = self._dispatcher.set_weights(manifest, ref, deltas)
        by_delta = self._dispatcher.by_delta
        ways = {"store": workers - by_delta, "delta": by_delta}
        self._tell(ways, {})
        seconds = {"publish": written_s - start_s, "sync": time.monotonic() - written_s}
        self._deltas.took(sum(seconds.values()), by_delta=by_delta > 0)
        metrics = self._metrics(manifest.total_bytes, ways)
        if found is not None:
            metrics["weights/delta_s"] = found.seconds
            if found.ref is not None:
                metrics |= {"weights/delta_bytes": float(found.total_bytes), "weights/changed": found.changed}
        return Published(seconds, metrics)

    def _by_pieces(self, version: int, way: Way, masters: bool) -> Published:
        start_s = time.monotonic()
        changes = self._deltas.by_pieces
        with self._context.learner_span("publish"):
            handed = self._learner.call(
                lambda group: self._dispatcher.hand_over(
                    lambda receivers: group.send(
                        version,
                        receivers=receivers,
                        way=way,
                        limit_s=self._limit_s,
                        masters=masters,
                        changes=changes,
                    ),
                    to_trainers=self._to_trainers,
                )
            )
            self._learner.published(version, handed.sent.checksum, masters=masters)
        self._tell(handed.ways, handed.reasons)
        self._in_vain = self._in_vain + 1 if handed.ways.keys() == {"store"} else 0
        if self._in_vain == _IN_VAIN:
            self._way = None
            reasons = "; ".join(sorted(set(handed.reasons.values()))) or "no engine was up"
            self._context.observer.event(
                "weights_by_store",
                f"no engine got weights from the learner's device {_IN_VAIN} times in a row ({reasons}): from now on "
                "they go through the object store (cluster.weights)",
            )
        sent = handed.sent
        if sent.whole:
            self._context.observer.event(
                "weights_delta_refused", f"{sent.whole}: all of version {version} went to it, and to all of its sender"
            )
        seconds = {"publish": sent.seconds, "sync": max(0.0, time.monotonic() - start_s - sent.seconds)}
        metrics = self._metrics(sent.total_bytes, handed.ways)
        if sent.delta_bytes:
            metrics |= {"weights/delta_bytes": float(sent.delta_bytes), "weights/changed": sent.changed}
        return Published(seconds, metrics)

    def _tell(self, ways: Mapping[str, int], failures: Mapping[str, str]) -> None:
        """Report once, when the first weights have arrived. `failures`: by worker that did not get them as chosen."""
        if self._told:
            return
        self._told = True
        went = ", ".join(f"{way} for {count} worker{'s' * (count > 1)}" for way, count in sorted(ways.items()) if count)
        but = "".join(f"; {name} not: {reason}" for name, reason in sorted(failures.items()))
        self._context.observer.event("weights_way", f"{went or 'no worker is up yet'}: {self._why}{but}")

    def _metrics(self, total_bytes: int, workers: dict[str, int]) -> dict[str, float]:
        by_way = {name: float(workers.get(way, 0)) for way, name in BY_WAY.items()}
        rounded = {"weights/quantise_s": self._learner.quantise_s} if self._quantises else {}
        return {"weights/bytes": float(total_bytes)} | by_way | rounded
