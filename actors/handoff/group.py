"""One process group from the learner's rank 0 to engines, which broadcasts pieces. Every wait is bounded; a group with
a lost member is abandoned."""

import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actors.handoff.board import Excuse
from contracts.handoff import HandOffError
from models.nccl import abort_group, nccl_group
from models.process_groups import finished, gloo_group

_KEPT_S = 60.0  # an abandoned group is kept this long: its destruction would wait for its collective


class BroadcastGroup:
    """One member's broadcast group, 0 being the sender.

    It is kept for further hand-offs while the members stay the same (an NCCL communicator takes seconds to make)."""

    def __init__(self) -> None:
        self.name = ""  # of the hand-off that it was formed for; "": no group
        self._group: Any = None
        self._device = torch.device("cpu")
        self._work: Any = None
        self._left: list[tuple[float, Any, Any]] = []

    def form(
        self, store: Any, name: str, rank: int, size: int, *, host: str, device: torch.device, limit_s: float
    ) -> None:
        """Form the group. All members call it with the same name, of their present group or of a new one.

        `store`: this member's client, unused by others meanwhile. `host`: its address for the others. Raises
        HandOffError."""
        if self._group is not None and self.name == name:
            return
        self.leave()
        made: list[Any] = []

        def make() -> None:
            try:
                prefix = dist.PrefixStore(f"{name}/group", store)  # type: ignore[attr-defined]
                made.append(_process_group(prefix, rank, size, host=host, device=device, limit_s=limit_s))
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=make, name="weights-group", daemon=True)
        thread.start()
        thread.join(2 * limit_s)  # the waits inside have that limit themselves
        if not made:
            raise HandOffError(f"the group for the broadcast did not form within {2 * limit_s:g} s")
        if isinstance(made[0], Exception):
            raise HandOffError(f"the group for the broadcast did not form: {made[0]}")
        self._group, self._device, self.name = made[0], device, name

    def start(self, piece: Tensor) -> None:
        """Send the piece (rank 0) or receive into it. It must not be used before `finish`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._work = self._group.broadcast([piece], options)
        except RuntimeError as error:
            self.leave()
            raise HandOffError(f"the broadcast broke: {error}") from error

    def finish(self, limit_s: float, excuse: Excuse) -> None:
        """Wait for the started broadcast, if any. Raises HandOffError, after abandoning the group."""
        work, end_s = self._work, time.monotonic() + limit_s
        reason: str | None = None
        try:
            while work is not None and reason is None and not finished(work, on_devices=self._device.type == "cuda"):
                reason = excuse()
                if reason is None and time.monotonic() > end_s:
                    reason = f"a member of the broadcast is late by {limit_s:g} s"
        except RuntimeError as error:
            reason = f"the broadcast broke: {next(iter(str(error).splitlines()), '')}"
        if reason is not None:
            self.leave()
            raise HandOffError(reason)
        self._work = None

    def leave(self) -> None:
        """Abandon the group; never waits."""
        now_s = time.monotonic()
        self._left = [entry for entry in self._left if now_s - entry[0] < _KEPT_S]
        group, self._group, self.name = self._group, None, ""
        if group is not None:
            self._left.append((now_s, group, self._work))
            if self._device.type == "cuda":
                abort_group(group)
        self._work = None


def _process_group(store: Any, rank: int, size: int, *, host: str, device: torch.device, limit_s: float) -> Any:
    if device.type == "cuda":
        return nccl_group(store, rank, size, device, limit_s)
    return gloo_group(store, rank, size, host, limit_s)
