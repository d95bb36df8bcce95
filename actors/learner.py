"""One learner rank as a Ray actor: a Trainer, and its way into the process group. LearnerGroup makes the decisions.

torch is imported when the rank joins, so the driver can import this module without it.
"""

import ctypes
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import ray

from actors.identity import log_to
from actors.pacing import Pacer
from actors.termination import on_sigterm
from config.formats import Quantization
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.handoff import Sent, Terms
from contracts.training import Demonstration, StepResult, TrainSequence
from models.manifest import TensorSpec, WeightsManifest
from policies.roofline.pace import Pace

_log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h
_KEPT_BYTES = 2**31 - 1  # `mallopt` takes an int

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from actors.handoff.send import Sender
    from actors.training.recording import RecordingPlan, StepRecording
    from actors.training.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSpec:
    """The configuration of every rank."""

    model: ModelOptions
    learner: LearnerOptions
    objective: ObjectiveOptions
    temperature: float  # rollout.sampling.temperature
    init: Literal["checkpoint", "random"]
    seed: int
    quantization: Quantization  # rollout.quantization
    adapters_only: bool  # see Trainer
    pace: Pace | None = None  # for experiments


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's node and process."""

    node_id: str
    node_ip: str
    pid: int


@dataclass(frozen=True, slots=True)
class PublishedDelta:
    """The changes from the version published before, beside a whole buffer."""

    base_version: int
    ref: "ray.ObjectRef[Any] | None"  # None: it would exceed the requested limit
    total_bytes: int
    changed: float  # share of the elements
    seconds: float  # time to compute it


def fix_threads(threads: int) -> None:
    """Fix the number of OpenMP and MKL threads, before torch is imported and whatever the environment says.

    They may otherwise use fewer when the machine is busy. A weight gradient over more than about 750 tokens is then
    summed in another order, and every later loss differs."""
    os.environ.update(OMP_NUM_THREADS=str(threads), OMP_DYNAMIC="FALSE", MKL_DYNAMIC="FALSE")


def keep_freed_memory() -> None:
    """Have glibc keep freed memory of this process for the next allocation.

    By default it maps large blocks anew and returns them when they are freed. Linux then clears each page of an
    operation's result at its first use. Afterwards only what is free above the last used block is returned, beyond
    2 GiB: not for a process that holds large host copies for a moment, as a GPU's learner does for its weights. No
    effect with another C library."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_TOP_PAD, 1 << 26)):
            mallopt(parameter, value)


class LearnerRank:
    """LearnerGroup calls every method on all ranks at once; see Trainer for details."""

    def __init__(self, spec: LearnerSpec, index: int, size: int, log: str | None = None) -> None:
        """log: see log_to."""
        log_to(log, f"learner-{index}")
        self._own_process = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
        if self._own_process:
            # Ray's handler raises SystemExit anywhere in the rank, and a checkpoint would report it as a failed write.
            # The rank has nothing to hand over, so it just ends.
            on_sigterm(partial(os._exit, 1))
        self._spec, self._index, self._size = spec, index, size
        self._trainer: Trainer | None = None
        self._store: Any = None
        self._published: ray.ObjectRef[Any] | None = None
        self._manifest: WeightsManifest | None = None  # of `_published`
        self._delta: ray.ObjectRef[Any] | None = None
        self._version = 0  # of the last published weights
        self._weights_store: Any = None
        self._sender: Sender | None = None
        self._recording_plan: RecordingPlan | None = None
        self._buffer: Any = None
        self._recorded: ray.ObjectRef[Any] | None = None
        self._pacer = None if spec.pace is None else Pacer(spec.pace, "learner")
        # Before torch is imported. OpenMP threads spin while they wait. Long spins cost 2x and more on shared cores (a
        # supervised step on 2 cores with 3 others busy: 0.31 s, with this 0.14 s). No spins cost 25 % on free cores
        # (0.041 s, with this 0.043 s, passive 0.052 s).
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")

    def __repr__(self) -> str:
        return f"learner-{self._index}"

    @ray.method
    def place(self) -> Place:
        """Return node and process, once the actor runs."""
        return Place(ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address()), os.getpid())  # type: ignore[no-untyped-call]

    @ray.method
    def open_rendezvous(self, host: str, timeout_s: float) -> int:
        """Open the rendezvous store (rank 0) and return its port."""
        from actors.training.parallel import open_store

        self._store = open_store(host, self._size, timeout_s)
        return int(self._store.port)

    @ray.method
    def join(self, host: str, port: int, ranks_on_node: int, start_timeout_s: float) -> str:
        """Form the group (if there are others) and build the model. Return a description of what computes; on a CPU the
        numbers depend on it."""
        options = self._spec.learner
        threads = options.threads_of(ranks_on_node)
        fix_threads(threads)
        if ranks_on_node == self._size and sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host name may resolve to an address without a listener
        import torch

        from actors.training.parallel import Rank, join_group, join_store
        from actors.training.trainer import Trainer
        from models.device import choose_device

        torch.set_num_threads(threads)
        kind = choose_device(options.device, "learner.device")
        if kind == "cpu" and self._own_process:
            keep_freed_memory()
        rank = Rank(self._index, self._size, torch.device(kind, 0) if kind == "cuda" else torch.device("cpu"))
        if self._size > 1:
            store = self._store or join_store(host, port, self._size, start_timeout_s)
            join_group(store, rank, timeout_s=options.timeout_s)
        spec = self._spec
        self._trainer = Trainer(
            spec.model,
            options,
            spec.objective,
            rank=rank,
            init=spec.init,
            seed=spec.seed,
            quantization=spec.quantization,
            adapters_only=spec.adapters_only,
        )
        if kind == "cuda":
            return torch.cuda.get_device_name(0)
        from models.ops.native import kernels

        what = "cpu" if kernels is not None else "cpu without the native kernels"
        return f"{what}, threads: {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}"

    @ray.method
    def record_into(
        self, buffers: Mapping[str, Any], max_bytes: int, fused: tuple[int, int, int] | None, eagle3: bool, seed: int
    ) -> None:
        """Send hidden states of every later `train_step` to this node's data buffer (handles of DataBufferActor by node
        id). `eagle3`: with the outputs of the layers `fused`, by default the usual ones."""
        from actors.training.recording import RecordingPlan
        from drafter.eagle.model import fused_layers

        layers: tuple[int, ...] = ()
        if eagle3:
            layers = fused_layers(len(self._ready.network.blocks), fused)
        self._recording_plan = RecordingPlan(max_bytes, layers, seed)
        here = ray.get_runtime_context().get_node_id()
        self._buffer = buffers[here]

    @ray.method
    def begin(self, optimizer: OptimizerOptions, total_steps: int) -> None:
        """Start a phase with a fresh optimizer."""
        self._ready.begin(optimizer, total_steps)

    @ray.method
    def rest(self, optimizer: bool) -> None:
        """Free this rank's device memory for others until the next step."""
        self._ready.rest(optimizer=optimizer)

    @ray.method
    def train_step(
        self, sequences: Sequence[TrainSequence], asked: int | None = None, records: bool = True
    ) -> StepResult:
        """Run one RL step on all of these (each rank takes its share). `records`: see LearnerGroup."""
        recording = self._step_recording() if records else None
        begin_s = 0.0 if self._pacer is None else self._pacer.clock()
        temperature = self._spec.temperature
        result = self._ready.rl_step(sequences, temperature=temperature, asked=asked, recording=recording)
        if self._pacer is not None:
            tokens = sum(len(sequence.response_tokens) for sequence in sequences)
            self._pacer.hold("learner", begin_s, self._pacer.pace.learner_s(tokens))
            self._pacer.write()
        spent = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in result.seconds.items())
        _log.info("learned from %d sequences: %s", len(sequences), spent or "nothing to do")
        if recording is not None and recording.records:
            # The buffer copies it before the next step; nothing waits for that.
            self._recorded = ray.put(recording.records)
            self._buffer.add.remote([self._recorded], source=f"learner-{self._index} of version {self._version}")
        return result

    @ray.method
    def reference_kl(self, sequences: Sequence[TrainSequence]) -> "dict[int, NDArray[np.float32]]":
        """Return each token's KL to the reference for this rank's share, by sequence index."""
        return self._ready.reference_kl(sequences, temperature=self._spec.temperature)

    @ray.method
    def sft_step(self, demonstrations: Sequence[Demonstration]) -> StepResult:
        """Run one supervised optimizer step on all of these."""
        return self._ready.sft_step(demonstrations)

    @ray.method
    def publish(
        self, version: int, masters: bool = False, delta_share: float = 0.0
    ) -> "tuple[WeightsManifest, ray.ObjectRef[Any], float, PublishedDelta | None] | None":
        """Publish the weights (rank 0; the others return None). `masters`: see OutgoingWeights.publish.

        Returns the manifest, the buffer in the object store (owned by this actor), the seconds of quantisation, and a
        delta from the weights published before (see LearnerGroup.publish)."""
        published = self._ready.weights.publish(version, masters=masters)
        self._version = version
        if published is None:
            return None
        manifest, buffer = published
        delta = self._delta_to(manifest, buffer, delta_share) if delta_share > 0 else None
        self._published = ray.put(buffer)  # releases the previous version, unless somebody still reads it
        self._manifest = manifest
        return manifest, self._published, self._ready.weights.quantise_s, delta

    def _delta_to(self, manifest: WeightsManifest, buffer: "NDArray[np.uint8]", share: float) -> PublishedDelta | None:
        from models.delta import Held, changed_elements, encode

        if self._published is None or self._manifest is None or self._manifest.tensors != manifest.tensors:
            return None
        start_s = time.monotonic()
        old = Held(self._manifest, ray.get(self._published))  # in this node's store: a view
        found = encode(old, Held(manifest, buffer), limit_bytes=int(share * manifest.total_bytes))
        base, seconds = self._manifest.version, time.monotonic() - start_s
        if found is None:
            return PublishedDelta(base, None, 0, 1.0, seconds)
        self._delta = ray.put(found)  # kept as long as the buffer is
        changed = changed_elements(found) / sum(math.prod(spec.shape) for spec in manifest.tensors)
        return PublishedDelta(base, self._delta, found.size, changed, seconds)

    @ray.method
    def open_weights_store(self, host: str, timeout_s: float) -> str:
        """Open the store for weight hand-offs (rank 0) and return its address."""
        from actors.training.parallel import open_store

        self._weights_store = open_store(host, 1, timeout_s)
        return f"{host}:{self._weights_store.port}"

    @ray.method
    def weights_layout(self, masters: bool) -> tuple[tuple[TensorSpec, ...], int]:
        """Return the layout of published weights in their buffer, and its size in bytes."""
        return self._ready.weights.layout(masters=masters)

    @ray.method
    def send_weights(self, terms: Terms, store: str, masters: bool) -> Sent | None:
        """Send the weights piece by piece, in step with the other ranks; rank 0 returns the result. `store`: the
        address that rank 0 opened."""
        from actors.handoff.send import Sender

        trainer = self._ready
        if self._sender is None:
            self._sender = Sender(self._index, self._size, trainer.rank.device, store)
        self._version = terms.version
        layout = trainer.weights.layout(masters=masters)
        sent = self._sender.send(terms, layout, trainer.weights.tensors(masters=masters))
        return None if sent is None else replace(sent, quantise_s=trainer.weights.quantise_s)

    @ray.method
    def keep_weights(self, version: int, checksum: int, masters: bool) -> "NDArray[np.uint8] | None":
        """Return the buffer of the weights sent under this version, for late workers (rank 0; the others return None).

        Called on all ranks, before the next step."""
        published = self._ready.weights.publish(version, masters=masters)
        if published is None:
            return None
        manifest, buffer = published
        if manifest.checksum != checksum:
            raise RuntimeError(f"weights of version {version} are {manifest.checksum:#x}, sent were {checksum:#x}")
        return buffer

    @ray.method
    def save(self, directory: str) -> None:
        """Save this rank's part of the checkpoint."""
        self._ready.save(directory)
        _log.info("saved to %s", directory)

    @ray.method
    def load(self, directory: str) -> None:
        """Continue from a checkpoint."""
        self._ready.load(directory)
        _log.info("goes on from %s", directory)

    @ray.method
    def export(self, directory: str) -> None:
        """Write the model as a Hugging Face directory (rank 0)."""
        self._ready.weights.export(directory)

    @ray.method
    def leave(self) -> None:
        """Dissolve the group; the actor is killed after this."""
        if self._trainer is not None:
            from actors.training.parallel import leave_group

            leave_group()

    def _step_recording(self) -> "StepRecording | None":
        if self._recording_plan is None:
            return None
        from actors.training.recording import StepRecording

        return StepRecording(self._recording_plan, self._version, self._ready.publish_dtype)

    @property
    def _ready(self) -> "Trainer":
        if self._trainer is None:
            raise RuntimeError("this learner rank has not joined its group")
        return self._trainer
