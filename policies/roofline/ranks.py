"""One rank of our engine over several GPUs: the shape of its part, and the cost of its collectives. Arithmetic only.

models.tensor_parallel computes it: o and down gather every rank's part and add them, the head gathers logits.
"""

from dataclasses import replace

from config.network import Network
from policies.roofline.devices import Device

GATHER_S = 12e-6  # of one all-gather of a node's GPUs, besides its bytes; an estimate
_FLOAT_BYTES = 4


def part_of_network(net: Network, ranks: int, *, tables: bool) -> Network:
    """Return what one rank holds (`tables`: embedding and head whole), or reads in a step (its part of the head)."""
    return replace(
        net,
        num_heads=-(-net.num_heads // ranks),
        num_kv_heads=max(1, net.num_kv_heads // ranks),
        intermediate_size=-(-net.intermediate_size // ranks),
        vocab_size=net.vocab_size if tables else -(-net.vocab_size // ranks),
    )


def gathers_s(net: Network, ranks: int, rows: int, device: Device) -> float:
    """Return the seconds of a step's collectives: two per layer, one for the logits of `rows`."""
    if ranks == 1:
        return 0.0
    moved = (ranks - 1) * rows * net.hidden_size * net.item_bytes
    logits = (ranks - 1) * rows * _FLOAT_BYTES * -(-net.vocab_size // ranks)
    bytes_s = (2 * net.num_layers * moved + logits) / device.peer_bytes_s
    return (2 * net.num_layers + 1) * GATHER_S + bytes_s


def gathered_bytes(net: Network, ranks: int, rows: int) -> int:
    """Return the bytes of the parts of one sum, and of the sum in float32."""
    return rows * net.hidden_size * (ranks * net.item_bytes + _FLOAT_BYTES) if ranks > 1 else 0
