"""Seconds of the parts besides decoding: the learner's step and the hand-over of weights. Estimates, marked as such.

No learner of ours was measured on a GPU; MFU is what FSDP trainers of this size report. Owns these assumptions.
"""

from config.network import Network
from policies.roofline.devices import Device
from policies.roofline.memory import LearnerShape

MFU = 0.40  # of the bfloat16 peak, for required flops (not recomputation); an estimate
NETWORK_BYTES_S = 25e9  # between nodes: 200 Gbit/s, an assumption
HOST_COPY_BYTES_S = 5e9  # one pass over a buffer in host memory by one thread; an estimate
QUANTISING_BYTES = 40  # read and written per weight, five passes over float32; an estimate
NODE_GPUS = 8  # GPUs that share NVLink
_HOST_PASSES = 4  # object store: off the device, checked and stored, read and checked, onto the device


def token_flops(net: Network, length: float) -> float:
    """Return the flops of forward and backward of one token of a sequence of that length: 6 per weight, plus causal
    attention."""
    attention = 12.0 * net.num_layers * net.query_size * length / 2
    return 6.0 * net.read_parameters + attention


def learner_tokens_s(net: Network, learner: LearnerShape, device: Device, length: float) -> float:
    """Return the tokens per second of all ranks. Recomputed activations add a third of the step's flops."""
    again = 4 / 3 if learner.checkpointing else 1.0
    return learner.ranks * MFU * device.bf16_flops_s / (token_flops(net, length) * again)


def gather_s(net: Network, ranks: int, master_bytes: int, device: Device, *, node_gpus: int = NODE_GPUS) -> float:
    """Return the seconds in which every rank gathers all shards around a ring. Its slowest link is the network if there
    are at least two nodes."""
    link_bytes_s = device.peer_bytes_s if ranks <= node_gpus else min(NETWORK_BYTES_S, device.peer_bytes_s)
    return net.parameters * master_bytes * (ranks - 1) / ranks / link_bytes_s


def hand_over_s(
    net: Network, learner: LearnerShape, device: Device, *, same_gpu: bool, merged_there: bool = False
) -> dict[str, float]:
    """Return seconds by way: gathered over the ranks' links (`gather_s`), then `direct` (CUDA IPC on the same GPU, else
    NCCL over the network) or through the object store. `merged_there`: adapters, whose bytes are negligible against the
    base that an engine reads from host memory to merge them."""
    if merged_there:
        merged_s = net.parameters * net.item_bytes / device.host_bytes_s
        return {"direct": merged_s, "object store": merged_s}
    wire_bytes = net.weight_bytes  # low-bit if the engines' are
    gathered_s = gather_s(net, learner.ranks, learner.master_bytes, device)
    direct_s = 2 * wire_bytes / device.bandwidth_bytes_s if same_gpu else wire_bytes / NETWORK_BYTES_S
    store_s = _HOST_PASSES * wire_bytes / HOST_COPY_BYTES_S + 2 * wire_bytes / device.host_bytes_s
    return {"direct": gathered_s + direct_s, "object store": gathered_s + store_s}


def quantising_s(net: Network, learner: LearnerShape, device: Device) -> float:
    """Return the seconds to quantise every matrix once, by torch's elementwise kernels. It happens after an update if
    one rank keeps the copies, and in each forward (and recomputation) if several gather the masters."""
    passes_bytes = QUANTISING_BYTES * net.num_layers * net.matrix_parameters
    return passes_bytes / device.bandwidth_bytes_s if learner.mirrored and net.low_bits is not None else 0.0
