"""The process groups of one epoch: gloo says who is there, and sums whatever lies on hosts; NCCL sums between devices.

Owns which of the two carries gradients. Each micro-step's gloo collective comes first, so that a member that is gone is
missed on the hosts, by its closed socket, before a device waits for it; one that goes later is missed by the deadline
of whoever waits (`actors.spot.members`).

Why NCCL at all: the gradients of a 7B target's drafter are 1.0 GB (258 million parameters), which gloo takes about a
second for, ten times as long as the micro-step; NVLink takes 5 ms, PCIe 80 ms.
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
_READ_S = 1.0  # for others to read the last of a collective
_ATTEMPTS = 2  # to connect NCCL, one after the other: a member may be lost meanwhile, but hardly twice


class Transport:
    """What this process may sum gradients with, and what it learned of it."""

    def __init__(self, device: torch.device, collectives: Collectives = "auto") -> None:
        self.device = device
        self.apart = device.type != "cpu"  # gradients are not where gloo sums
        self.nccl = collectives == "auto" and device.type == "cuda" and has_nccl()
        self._connecting = False
        self._failures = 0

    def connecting(self) -> None:
        """NCCL begins to connect the members."""
        self._connecting = True

    def connected(self) -> None:
        """It has."""
        self._connecting, self._failures = False, 0

    def gave_up(self, why: str) -> None:
        """No group was made. If it was for NCCL, and not the first time, sums go through the hosts from now on, which
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
    """Members that are connected. Works are polled with `models.process_groups.finished`."""

    def __init__(self, hosts: Any, devices: Any, device: torch.device) -> None:
        """`hosts`: gloo. `devices`: NCCL between devices like `device`, else None."""
        self.hosts, self.devices = hosts, devices
        self.carrier = hosts if devices is None else devices  # of gradients and states
        self.place = torch.device("cpu") if devices is None else device  # where `carrier` wants them

    def end(self, *, broken: bool) -> None:
        """No collective of it any more. `broken`: one may hang in it."""
        if self.devices is not None:
            abort_group(self.devices, 0.0 if broken else _READ_S)


def connect(store: Any, session: TrainSession, transport: Transport, host: str, timeout_s: float) -> TrainerGroup:
    """The group of an epoch, which all its members make now; blocks, for a thread. Raises RuntimeError."""
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
