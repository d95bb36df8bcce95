"""The members of a training session: collectives, epochs and equal replicas. The coordinator decides the members, and
the trainer computes the gradients.

Every epoch of a session with several members has its own process group. Each micro-step's collective also carries two
flags: whether a member leaves, and whether the leader continues to its next epoch, which it does once joining members
have arrived. So all change at the same micro-step boundary, without another message. A failure (a member was killed, or
is silent for `LIMIT_S`) affects all: that micro-step is dropped, and the rest wait for a newer session. A leader
without one for `ALONE_S` continues alone until then.

A joining member takes the leader's state before its first micro-step. The same applies to a diverged one: whenever a
group forms, its members compare micro-steps and fingerprints, and if these differ the leader sends its state. A member
that does not arrive in time, because another node's address is unreachable, is left out until a newer session.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.spot.groups import TrainerGroup, Transport
from actors.spot.rendezvous import LIMIT_S, Rendezvous, open_store
from contracts.spot import TrainSession
from drafter.training.trainer import DrafterTrainer
from models.process_groups import finished

ALONE_S = 1.0
_PATIENCE_S = 0.5  # for others, once this member must stop

State = Mapping[str, Tensor]


class BrokenGroupError(RuntimeError):
    """A collective did not complete: another member is gone or late, or this one must stop."""


class Members:
    """Members of one trainer's session. For one thread. Waits at most `LIMIT_S` for others, and little more than
    `_PATIENCE_S` once `stop` is set, because the trainer must stop."""

    def __init__(self, host: str, transport: Transport, stop: threading.Event) -> None:
        self._host, self._transport, self._stop = host, transport, stop
        self._store: Any = None  # this member's own
        self._told: TrainSession | None = None  # the newest session
        self._formed: TrainSession | None = None  # the session whose members sum now
        self._spent: TrainSession | None = None  # its group has broken: only a newer session helps
        self._group: TrainerGroup | None = None
        self._work: Any = None  # a running collective
        self._abandoned: list[tuple[float, Any, Any]] = []  # groups whose destruction would wait for a collective
        self._rendezvous: Rendezvous | None = None
        self._since_s = 0.0  # time since which no group is formed
        self._ends = False  # whether the group ends with this micro-step

    @property
    def session(self) -> TrainSession | None:
        """The session whose members sum now, else the newest; None: none."""
        return self._formed or self._told

    @property
    def leads(self) -> bool:
        return self.session is not None and self.session.rank == 0

    @property
    def count(self) -> int:
        """Number of members that sum now; 0 while they are being gathered."""
        return len(self._formed.members) if self._formed else 0

    @property
    def settled(self) -> bool:
        """Whether nobody is to be gathered."""
        return self._formed is not None and (self._told is self._formed or self._told is self._spent)

    @property
    def waited_s(self) -> float:
        return 0.0 if self._formed else time.monotonic() - self._since_s

    @property
    def missing(self) -> str:
        """The members it waits for, as text."""
        told = self._told
        if told is None or not told.rank:
            return "the other members have left"
        return f"{told.members[0]} leads, and does not answer at {told.store}, or began without this member"

    def enter(self, session: TrainSession) -> str:
        """Join `session` once its members have arrived. Returns the address of this member's store, if it leads."""
        self._withdraw()
        self._told = session
        if session.rank and self.count == 1:
            self._dissolve()
        elif not self.count:
            self._since_s = time.monotonic()
        if session.rank:
            return ""
        self._store = self._store or open_store(self._host)
        return f"{self._host}:{self._store.port}"

    def leave(self) -> None:
        """Leave the session. Members that the last collective did not inform drop their next micro-step."""
        self._withdraw()
        self._dissolve()
        self._told = None

    def gather(self, trainer: DrafterTrainer) -> bool:
        """At a micro-step boundary of `trainer`: form the newest session's group if its members are there.

        Returns whether this member can train now. Raises BrokenGroupError if the group came apart while it formed;
        nothing was loaded then."""
        told, formed = self._told, self._formed
        assert told is not None
        if self._ends:
            self._dissolve(formed)
        if self.settled or self.count > 1:
            return True
        if len(told.members) == 1:
            self._formed = told
            return True
        if told is not self._spent:
            self._rendezvous = self._rendezvous or Rendezvous(told, self._store)
            if self._rendezvous.complete():
                self._told = self._rendezvous.session  # without those who did not come
                self._form(self._rendezvous, trainer)
                return True
            if self._rendezvous.left_out:
                self._rendezvous, self._spent = None, told
        if self._formed is None and told.rank == 0 and self.waited_s > ALONE_S:
            self._formed = TrainSession(told.session, told.epoch, (told.members[0],), 0)
        return self._formed is not None

    def reduce(self, sums: Tensor) -> None:
        """`drafter.training.trainer.Reduce`: sum over the members, in place. Raises BrokenGroupError; `sums` is then
        unchanged."""
        group = self._group
        assert group is not None
        tail = torch.tensor([float(self._goes_on()), float(self._stop.is_set())])
        try:
            if self._transport.apart:  # hosts first: see `actors.spot.groups`
                self._wait(group.hosts.allreduce([tail]))
                buffer = sums.to(group.place, copy=True)
                self._wait(group.carrier.allreduce([buffer]), on_devices=group.devices is not None)
                sums.copy_(buffer)
            else:
                buffer = torch.cat((sums, tail))
                self._wait(group.hosts.allreduce([buffer]))
                sums.copy_(buffer[: len(sums)])
                tail = buffer[len(sums) :]
        except RuntimeError as error:
            self._dissolve(self._formed, broken=True)
            raise BrokenGroupError(str(error).partition("\n")[0]) from error
        self._ends = bool(tail.any())

    def part(self) -> None:
        """Leave a group of several, because this member's state now differs."""
        if self.count > 1:
            self._dissolve(self._formed)

    def _goes_on(self) -> bool:
        """Return whether this member leads and the joining ones have arrived."""
        told, formed = self._told, self._formed
        if told is None or formed is None or formed.rank or told is formed:
            return False
        joining = [rank for rank, member in enumerate(told.members) if member not in formed.members]
        if told.rank or not joining:  # another one leads from now on, or nobody joins
            return True
        self._rendezvous = self._rendezvous or Rendezvous(told, self._store)
        if self._rendezvous.overdue:
            return any(self._rendezvous.here([rank]) for rank in joining)
        return self._rendezvous.here(joining)

    def _form(self, rendezvous: Rendezvous, trainer: DrafterTrainer) -> None:
        session = rendezvous.session
        self._formed = None
        try:
            made = rendezvous.group(self._transport, self._host)
            self._until(lambda: made() is not None)
            self._group = made()
            self._agree(session, trainer)
        except RuntimeError as error:
            rendezvous.give_up()
            if self._group is None:
                self._transport.gave_up(str(error).partition("\n")[0])
            self._dissolve(session, broken=True)
            raise BrokenGroupError(f"epoch {session.epoch}: {str(error).partition(chr(10))[0]}") from error
        self._rendezvous, self._formed = None, session

    def _agree(self, session: TrainSession, trainer: DrafterTrainer) -> None:
        """Take the leader's state if any member's differs from it."""
        group, state = self._group, trainer.state_dict()
        assert group is not None
        mine = torch.tensor([trainer.steps, fingerprint(state)])
        everyones = [torch.empty_like(mine) for _ in session.members]
        self._wait(group.hosts.allgather([everyones], [mine]))
        if all(torch.equal(everyones[0], other) for other in everyones):
            return
        received = {}
        for name, tensor in state.items():
            flat = tensor.detach().to(group.place, copy=True).reshape(-1)
            self._wait(group.carrier.broadcast(flat, 0), on_devices=group.devices is not None)
            received[name] = flat.view(tensor.shape)
        if not torch.equal(mine, everyones[0]):
            trainer.load_state_dict(received)

    def _dissolve(self, spent: TrainSession | None = None, *, broken: bool = False) -> None:
        """End the group; `spent` will get no other. `broken`: a collective may hang in it."""
        now_s = time.monotonic()
        self._abandoned = [entry for entry in self._abandoned if now_s - entry[0] < 2 * LIMIT_S]
        if self._group is not None:
            self._group.end(broken=broken or self._work is not None)
        if self._work is not None and not self._work.is_completed():
            self._abandoned.append((now_s, self._group, self._work))
        self._group = self._work = None
        if self._rendezvous is not None and self._rendezvous.session is spent:
            self._rendezvous = None
        self._spent, self._formed, self._ends = spent, None, False
        self._since_s = now_s

    def _withdraw(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.withdraw()
        self._rendezvous = None

    def _wait(self, work: Any, *, on_devices: bool = False) -> None:
        self._work = work
        self._until(lambda: finished(work, on_devices=on_devices))
        self._work = None

    def _until(self, done: Callable[[], bool]) -> None:
        start_s, stop_s = time.monotonic(), None
        while not done():
            now_s = time.monotonic()
            if stop_s is None and self._stop.is_set():
                stop_s = now_s
            if stop_s is not None and now_s - stop_s > _PATIENCE_S:
                raise BrokenGroupError("called back while the others are late")
            if now_s - start_s > LIMIT_S:
                raise BrokenGroupError(f"the others did not answer within {LIMIT_S:g} s")


def fingerprint(state: State) -> int:
    """Return a number that is equal for equal tensors: sums of bit patterns, exact for any order of additions, and fast
    on any device, with one wait."""
    sums: list[Tensor] = []
    for name in sorted(state):
        tensor = state[name].detach()
        bits = tensor.view(torch.int32) if tensor.dtype is torch.float32 else tensor
        sums.append(bits.sum(dtype=torch.int64))
    total = 0
    for index, number in enumerate(_on_host(sums)):
        total = (total * 1_000_003 + index + number) & (2**63 - 1)
    return total


def _on_host(scalars: Sequence[Tensor]) -> list[int]:
    """Return int64 scalars of several devices, by one copy from each."""
    found = dict[int, int]()
    for device in {scalar.device for scalar in scalars}:
        own = [index for index, scalar in enumerate(scalars) if scalar.device == device]
        found |= zip(own, torch.stack([scalars[index] for index in own]).tolist(), strict=True)
    return [found[index] for index in range(len(scalars))]
