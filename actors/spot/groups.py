"""The process groups of one epoch: gloo synchronises the members and sums host memory; NCCL sums between devices.

Chooses which of the two sums gradients. Each micro-step's gloo collective comes first, so that a lost member is
detected on the hosts, by its closed socket, before a device waits for it. A later loss is detected by the deadline of
the waiting members (`actors.spot.members`).

Reason for NCCL: the gradients of a 7B target's drafter are 1.0 GB (258 million parameters), for which gloo takes about
a second, ten times the micro-step; NVLink takes 5 ms, PCIe 80 ms.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist

from config.drafter import Collectives
from contracts.spot import TrainSession
from models.nccl import abort_group, has_nccl, nccl_group
from models.process_groups import gloo_group

_LOG = logging.getLogger(__name__)
_READ_S = 1.0  # for others to finish reading a collective
_ATTEMPTS = 2  # attempts to connect NCCL: a member may be lost meanwhile, but hardly twice


class Transport:
    """This process's means to sum gradients, and the outcome of earlier attempts."""

    def __init__(self, device: torch.device, collectives: Collectives = "auto") -> None:
        self.device = device
        self.apart = device.type != "cpu"  # gradients are not in host memory
        self.nccl = collectives == "auto" and device.type == "cuda" and has_nccl()
        self._connecting = False
        self._failures = 0

    def connecting(self) -> None:
        """Note that NCCL starts to connect the members."""
        self._connecting = True

    def connected(self) -> None:
        """Note that NCCL has connected them."""
        self._connecting, self._failures = False, 0

    def gave_up(self, why: str) -> None:
        """Note that no group was made. After repeated failures of NCCL, gradients are summed through the hosts, which
        always works."""
        self._failures += self._connecting
        self._connecting = False
        if self.nccl and self._failures >= _ATTEMPTS:
            self.nccl = False
            _LOG.warning(
                "NCCL did not connect the members of a training session (%s): their gradients are summed over the "
                "hosts' network from now on, which is slower; drafter.collectives=gloo does so from the start",
                why,
            )


class TrainerGroup:
    """A group of connected members. Poll works with `models.process_groups.finished`."""

    def __init__(self, hosts: Any, devices: Any, device: torch.device) -> None:
        """`hosts`: gloo. `devices`: NCCL between devices like `device`, else None."""
        self.hosts, self.devices = hosts, devices
        self.carrier = hosts if devices is None else devices  # for gradients and states
        self.place = torch.device("cpu") if devices is None else device  # device of the carrier's tensors

    def end(self, *, broken: bool) -> None:
        """End the group's collectives. `broken`: one may hang."""
        if self.devices is not None:
            abort_group(self.devices, 0.0 if broken else _READ_S)


def connect(store: Any, session: TrainSession, transport: Transport, host: str, timeout_s: float) -> TrainerGroup:
    """Make the group of an epoch, with all its members; blocks, for a thread. Raises RuntimeError."""
    rank, size = session.rank, len(session.members)
    hosts = gloo_group(store, rank, size, host, timeout_s)
    if not transport.apart:
        return TrainerGroup(hosts, None, transport.device)
    everyone = torch.tensor([float(transport.nccl)])
    hosts.allreduce([everyone]).wait()
    if int(everyone) < size:
        return TrainerGroup(hosts, None, transport.device)
    transport.connecting()
    prefix = dist.PrefixStore("nccl", store)  # type: ignore[attr-defined]
    devices = nccl_group(prefix, rank, size, transport.device, timeout_s)
    transport.connected()
    return TrainerGroup(hosts, devices, transport.device)
