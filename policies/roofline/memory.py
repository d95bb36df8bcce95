"""The contents of a GPU's memory, phase by phase, in bytes. Arithmetic over shapes; no configuration, no allocator.

A colocated GPU goes through four phases: engines decode (rollout), an idle worker trains the drafter (spot training),
the learner computes (learning), weights are handed over tensor by tensor (hand-over). Memory that an actor keeps while
another works is resident. `engines_sleep`: while the learner works, engines keep weights and graphs but release the KV
cache. `optimizer_away`: while engines decode, the optimizer's moments are in host memory.

Exact by shape: weights, shards, gradients, moments, KV cache, saved activations (a test compares them with autograd's).
Estimates, marked as such: contexts, NCCL's buffers, one graph, and the slack of a caching allocator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from config.formats import LowBitFormat
from config.network import Network
from policies.roofline.graphs import NOTHING_CAPTURED, Footprint
from policies.roofline.ranks import gathered_bytes, part_of_network

MIB, GIB = 1 << 20, 1 << 30
CONTEXT_BYTES = 600 * MIB  # a process's CUDA context, cuBLAS included; an estimate
NCCL_BYTES = 800 * MIB  # channels of one communicator; an estimate
STAGING_BYTES = 2 * 64 * MIB  # of a hand-over, on each side
SLACK = 0.06  # of memory allocated and freed within a phase: fragmentation of a caching allocator; an estimate
LOGITS_SHARE = 64  # a chunk of the learner's head takes 1 / LOGITS_SHARE of the device, in float32 logits
_ACTIVATIONS = 0.05  # of a GPU, besides weights and cache, if an engine's steps are unknown; an estimate
_LOGITS_COPIES = 2.5  # logits, their log-softmax and gradient, of one chunk at its peak


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """An engine on one GPU."""

    max_running: int
    kv_tokens: int
    prefill_tokens: int
    most_rows: int  # of a verifying or decoding step
    gpus: int = 1  # number of GPUs that it is split over evenly
    own_ranks: bool = False  # our engine: embedding and head are whole on each rank, and sums are gathered
    copies: int = 1  # engines that share the GPU
    captured: Footprint = NOTHING_CAPTURED  # its graphs
    drafter: bool = False
    self_copy: LowBitFormat | None = None  # storage format of the copy of the target that drafts
    copy_apart: bool = False  # the copy has tables and K/V of its own
    recording_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerShape:
    """A rank of the learner."""

    ranks: int
    micro_batch_tokens: int
    checkpointing: bool
    master_bytes: int  # of a parameter: 4, or 2 if trained in bfloat16
    compute_bytes: int  # of a parameter in forward and backward
    moments: int = 2  # AdamW; Muon keeps one for matrices
    reference: bool = False  # a frozen copy for the KL term
    entropy_gradient: bool = False
    mirrored: bool = False  # forward with the engine's low-bit matrices
    adapters: int | None = None  # parameters of low-rank adapters in float32; None: everything is trained


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """The peak of a phase, in bytes by name."""

    name: str
    items: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.items.values())

    def text(self) -> str:
        """The sum, largest first: `learning 61.2 GiB = activations 30.1 + ...`."""
        largest = sorted(self.items.items(), key=itemgetter(1), reverse=True)
        parts = " + ".join(f"{name} {size / GIB:.1f}" for name, size in largest if size >= GIB / 20)
        return f"{self.name} {self.total_bytes / GIB:.1f} GiB = {parts}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The phases of one GPU of a kind."""

    place: str  # which GPUs: "colocated", "rollout" or "learner"
    phases: tuple[MemoryPhase, ...]

    @property
    def worst(self) -> MemoryPhase:
        return max(self.phases, key=attrgetter("total_bytes"))

    def fits(self, device_bytes: int) -> bool:
        return self.worst.total_bytes <= device_bytes


def saved_bytes(net: Network, *, mirrored: bool = False) -> int:
    """Return the bytes that autograd saves per token and layer in bfloat16: inputs of products, norms, SwiGLU and
    attention, each once. mirrored: products keep their inputs in eight bits, with a scale, if the format rounds tokens.
    """
    exact = 8 * net.hidden_size + 6 * net.intermediate_size + 6 * (net.query_size + net.kv_size)
    if not (mirrored and net.rounds_tokens):
        return exact
    # Attention also keeps its output: two bytes per value, besides the one-byte copy.
    return exact - 2 * net.hidden_size - net.intermediate_size + net.query_size + 4 * 4


def plan_colocated(
    net: Network,
    engine: EngineShape,
    learner: LearnerShape,
    trainer_tokens: int | None,
    device_bytes: int,
    *,
    engines_sleep: bool,
    optimizer_away: bool,
) -> MemoryPlan:
    """A GPU with engines and a learner rank. `trainer_tokens`: of a micro-step of the drafter's trainer on an idle
    worker; None: there is none."""
    kept = _engine_kept(net, engine)
    asleep = kept if engines_sleep else kept | _engine_awake(net, engine)
    resting = _learner_resting(net, learner, away=optimizer_away)
    phases = [
        MemoryPhase("rollout", kept | _engine_awake(net, engine) | _engine_steps(net, engine) | resting),
        MemoryPhase("learning", asleep | _learner_working(net, learner, device_bytes)),
        MemoryPhase("hand-over", asleep | _handing_over(net, learner)),
    ]
    if trainer_tokens is not None:
        phases.insert(1, MemoryPhase("spot training", kept | resting | _training(net, trainer_tokens)))
    return MemoryPlan("colocated", tuple(phases))


def plan_rollout(net: Network, engine: EngineShape, trainer_tokens: int | None) -> MemoryPlan:
    """A GPU with engines only. `trainer_tokens`: see `plan_colocated`."""
    kept = _engine_kept(net, engine)
    staging = {"hand-over's pieces": _largest(net) + STAGING_BYTES}
    phases = [
        MemoryPhase("rollout", kept | _engine_awake(net, engine) | _engine_steps(net, engine)),
        MemoryPhase("hand-over", kept | _engine_awake(net, engine) | staging),
    ]
    if trainer_tokens is not None:
        phases.insert(1, MemoryPhase("spot training", kept | _training(net, trainer_tokens)))
    return MemoryPlan("rollout", tuple(phases))


def plan_learner(net: Network, learner: LearnerShape, device_bytes: int) -> MemoryPlan:
    """Plan a GPU with a learner rank only."""
    phases = (
        MemoryPhase("learning", _learner_working(net, learner, device_bytes)),
        MemoryPhase("hand-over", _handing_over(net, learner)),
    )
    return MemoryPlan("learner", phases)


def cache_room(net: Network, device_bytes: int, gpus: int) -> float:
    """Return the bytes for the KV cache of an engine over `gpus` GPUs. 0 or less: the weights do not fit."""
    whole = gpus * device_bytes * (1 - _ACTIVATIONS)
    return whole - (net.weight_bytes + gpus * (CONTEXT_BYTES + (NCCL_BYTES if gpus > 1 else 0)))


# The engine.


def _engine_kept(net: Network, engine: EngineShape) -> dict[str, int]:
    """Return what a sleeping engine keeps."""
    weights = net.weight_bytes // engine.gpus
    if engine.own_ranks:
        weights = part_of_network(net, engine.gpus, tables=True).weight_bytes
    drafter = net.drafter_parameters * net.item_bytes if engine.drafter else 0
    kept = {"engine weights": weights, "drafter weights": drafter, "engine context": CONTEXT_BYTES}
    kept["graphs"] = engine.captured.total_bytes
    if engine.self_copy is not None:
        kept["self-drafter's copy"] = _copy_bytes(net, engine) // engine.gpus
    if engine.gpus > 1:
        kept["engine NCCL"] = NCCL_BYTES
    return _times(kept, engine.copies)


def _copy_bytes(net: Network, engine: EngineShape) -> int:
    copy = net.copied(engine.self_copy)
    return copy.weight_bytes if engine.copy_apart else copy.copy_bytes


def _engine_awake(net: Network, engine: EngineShape) -> dict[str, int]:
    """Return what an awake engine has in addition."""
    kv_bytes = net.kv_token_bytes + (2 * net.kv_size * net.item_bytes if engine.drafter else 0)
    if engine.copy_apart:
        kv_bytes += net.kv_token_bytes
    shares = min(engine.gpus, net.num_kv_heads)  # beyond that, several hold the same heads
    return _times({"KV cache": engine.kv_tokens * kv_bytes // shares}, engine.copies)


def _engine_steps(net: Network, engine: EngineShape) -> dict[str, int]:
    """Return an eager step: a chunk of prompts with all decoding requests, and logits of the drawn rows."""
    rows = engine.prefill_tokens + engine.max_running
    step = rows * _row_bytes(net) // engine.gpus + engine.most_rows * 4 * net.vocab_size
    if engine.own_ranks:
        part = part_of_network(net, engine.gpus, tables=True)
        step = rows * _row_bytes(part) + 2 * engine.most_rows * 4 * net.vocab_size
        step += gathered_bytes(net, engine.gpus, rows)
    if engine.self_copy is not None:  # one matrix in float32, three times, while it is rounded
        step = max(step, 3 * 4 * max(outputs * inputs for outputs, inputs in net.matrices))
    sizes = {"engine step": step, "hidden states recorded": engine.recording_bytes}
    return _times(sizes | {"engine slack": int(SLACK * step)}, engine.copies)


def _row_bytes(net: Network) -> int:
    """Return the activation bytes of a row at a layer's peak: residual, norm, gate and up, their product."""
    return net.item_bytes * (3 * net.hidden_size + 3 * net.intermediate_size + net.qkv_size)


# The learner.


def _shard(net: Network, learner: LearnerShape) -> int:
    """Return the parameters of one rank."""
    return -(-net.parameters // learner.ranks)


def _trained_bytes(net: Network, learner: LearnerShape) -> int:
    """Return the bytes that one rank trains. Gradients and each moment are as large."""
    if learner.adapters is not None:
        return -(-learner.adapters // learner.ranks) * 4
    return _shard(net, learner) * learner.master_bytes


def _learner_resting(net: Network, learner: LearnerShape, *, away: bool) -> dict[str, int]:
    trained = _trained_bytes(net, learner)
    kept = {
        "learner weights": _shard(net, learner) * learner.master_bytes,
        "learner context": CONTEXT_BYTES + (NCCL_BYTES if learner.ranks > 1 else 0),
    }
    if learner.adapters is not None:
        kept["adapters"] = trained
    if learner.reference:
        kept["reference weights"] = trained
    if not away:
        kept["optimizer"] = trained * learner.moments
    return kept


def _learner_working(net: Network, learner: LearnerShape, device_bytes: int) -> dict[str, int]:
    """Return the learner's peak: the backward pass, or the update, whose temporaries are as large as the shard."""
    trained = _trained_bytes(net, learner)
    backward = _backward(net, learner, device_bytes)
    update = {"update's temporaries": trained}
    largest = max(backward, update, key=lambda items: sum(items.values()))
    slack = {"learner slack": int(SLACK * sum(largest.values()))}
    gradients = {"gradients": trained}
    return _learner_resting(net, learner, away=False) | gradients | largest | slack


def _backward(net: Network, learner: LearnerShape, device_bytes: int) -> dict[str, int]:
    tokens = learner.micro_batch_tokens
    wide = learner.compute_bytes // 2  # saved_bytes counts bfloat16
    layer = tokens * saved_bytes(net, mirrored=learner.mirrored) * wide
    temporaries = tokens * (16 * net.intermediate_size + 8 * net.hidden_size)  # of the backward pass of one SwiGLU
    if learner.checkpointing:
        kept = net.num_layers * tokens * net.hidden_size * learner.compute_bytes
        activations = {"activations kept": kept, "layer computed again": layer + temporaries}
    else:
        activations = {"activations": net.num_layers * layer, "backward of a layer": temporaries}
    chunk = device_bytes // LOGITS_SHARE
    copies = _LOGITS_COPIES + learner.entropy_gradient
    head = int(copies * min(chunk, tokens * 4 * net.vocab_size)) + net.embedding_parameters * learner.compute_bytes
    working = activations | {"head": head} | _gathered(net, learner) | _mirror(net, learner)
    return working if learner.adapters is None else working | _merged(net)


def _gathered(net: Network, learner: LearnerShape) -> dict[str, int]:
    """Return the parameters that exist besides the shards while computing."""
    if learner.ranks == 1:
        copies = net.parameters * learner.compute_bytes if learner.compute_bytes != learner.master_bytes else 0
        return {"weights cast": copies}
    tables = net.embedding_parameters * (1 if net.tied else 2)
    # FSDP2: the root stays gathered, one block computes, the next is being fetched; gradients are reduced in float32.
    gathered = (tables + 2 * net.layer_parameters) * learner.compute_bytes
    reduced = max(tables, 2 * net.layer_parameters) if learner.adapters is None else learner.adapters
    return {"weights gathered": gathered, "gradients reduced": 4 * reduced}


def _merged(net: Network) -> dict[str, int]:
    """Return the matrix used for computing, merged in float32, besides the base's."""
    return {"a matrix merged": 2 * 4 * max(outputs * inputs for outputs, inputs in net.matrices)}


def _mirror(net: Network, learner: LearnerShape) -> dict[str, int]:
    """Return quantised matrices besides the masters. One rank keeps them between updates; several gather them whole,
    from a layer's forward to its backward. Plus one matrix in float32, three times, while it is rounded or restored."""
    if not learner.mirrored or net.low_bits is None:
        return {}
    layers = 1 if learner.ranks > 1 and learner.checkpointing else net.num_layers
    largest = max(outputs * inputs for outputs, inputs in net.matrices)
    return {"quantised matrices": layers * net.matrices_bytes, "a matrix quantised": 3 * 4 * largest}


def _handing_over(net: Network, learner: LearnerShape) -> dict[str, int]:
    piece = net.largest_parameter * learner.master_bytes + _largest(net)
    return _learner_resting(net, learner, away=False) | {"hand-over's pieces": piece + STAGING_BYTES}


def _largest(net: Network) -> int:
    return net.largest_parameter * net.item_bytes


# The drafter's trainer.


def _training(net: Network, tokens: int) -> dict[str, int]:
    """Weights, gradients and two moments in float32; the target's tables; one micro-step."""
    tables = net.embedding_parameters * (1 if net.tied else 2)
    step = tokens * (2 * saved_bytes(net) + 3 * 4 * net.vocab_size)
    return {
        "trainer's drafter": 16 * net.drafter_parameters,
        "target's tables": tables * net.item_bytes,
        "trainer's step": step,
        "trainer's context": CONTEXT_BYTES,
        "trainer slack": int(SLACK * step),
    }


def _times(items: Mapping[str, int], copies: int) -> dict[str, int]:
    return {name: size * copies for name, size in items.items()}
