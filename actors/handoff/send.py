"""The learner's end of a hand-off: one rank's part. Assigns a way to each receiver, and owns the staging pieces.

The rank gathers in step with the others to the end, whatever happens to the receivers."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from actors.handoff.board import Board, Excuse, connect, now_and_then, own_address, place_of
from actors.handoff.changes import Before
from actors.handoff.group import BroadcastGroup
from actors.handoff.window import Window
from contracts.handoff import HandOffError, Sent, Terms
from models.checksum import BLOCK_BYTES
from models.manifest import TensorSpec
from models.pieces import PIECE_BYTES, PieceSums, in_pieces

COME_S = 15.0  # for receivers to report; an engine may be in the middle of a step
PATIENCE_S = 15.0  # for a receiver to take a piece; then the others continue without it
FORM_S = {"cuda": 60.0, "cpu": 15.0}  # for all members of a broadcast to connect; NCCL's first connection is slow

Layout = tuple[Sequence[TensorSpec], int]


class Sender:
    """Sender of one rank. It keeps its broadcast group for further hand-offs; to send only changes, also a copy of what
    it sent last."""

    def __init__(self, index: int, size: int, device: torch.device, store: str) -> None:
        """`store`: host:port of rank 0's store."""
        self._index, self._size, self._device, self._address = index, size, device, store
        self._client: Any = None
        self._group = BroadcastGroup()
        self._tokens: list[str] = []  # of the group's members
        self._before = Before(device)

    def send(self, terms: Terms, layout: Layout, tensors: Iterator[tuple[str, Tensor]]) -> Sent | None:
        """Send `tensors` (as in models.pieces.in_pieces) and return the result on rank 0.

        Failures of receivers are part of the result: they never raise."""
        start_s = time.monotonic()
        specs, total_bytes = layout
        ways, sums, whole = ["nobody came"] * terms.receivers, PieceSums(), ""
        before: Before | None = None
        outlets: list[_Shared | _Broadcast] = []
        window: Window | None = None
        board: Board | None = None
        try:
            piece_bytes = min(PIECE_BYTES, max(1, -(-total_bytes // BLOCK_BYTES)) * BLOCK_BYTES)
            try:
                self._client = self._client or connect(self._address)
                board = Board(self._client, terms.name, terms.limit_s)
                plan = self._plan(board, terms, piece_bytes, specs)
                ways = plan["ways"]
                mine = [i for i, rank in enumerate(plan["ranks"]) if rank == self._index]
                if mine:
                    window = Window(self._device, piece_bytes)
                    outlets.append(_Shared(board, window, self._index, mine))
                if self._index == 0 and plan["members"]:
                    whole = self._before.begin(specs, total_bytes, piece_bytes) if terms.changes else ""
                    if terms.changes and not whole:
                        whole, before = plan["whole"], self._before
                    changes = before if plan["changes"] else None
                    host = own_address(self._address)
                    outlets.append(_Broadcast(board, self._group, plan, self._client, host, changes))
            except HandOffError as error:
                ways = [f"{way}: {error}" if way in ("ipc", "broadcast") else str(error) for way in ways]
                if board is not None:
                    _tell(board, f"window/{self._index}", {"error": str(error)})
            if self._index == 0 or outlets:
                staged = window.pieces if window is not None else None
                made = in_pieces(specs, total_bytes, tensors, self._device, into=staged, piece_bytes=piece_bytes)
                number = -1
                for number, piece in enumerate(made):
                    if self._index == 0:
                        sums.add(piece)
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(self._device).synchronize()  # others read it without this stream
                    for outlet in outlets:
                        outlet.give(number, piece)
                    if before is not None:
                        before.replace(number, piece)
                    for outlet in outlets if number else ():
                        outlet.reclaim(number - 1)
                for outlet in outlets if number >= 0 else ():
                    outlet.reclaim(number)
            if self._index != 0:
                return None
            checksum = sums.value()
            if before is not None:
                before.end(checksum)
            else:
                self._before.drop()  # no engine will hold what it holds
            sent = Sent(
                version=terms.version,
                checksum=checksum,
                total_bytes=total_bytes,
                seconds=time.monotonic() - start_s,
                ways=tuple(ways),
                delta_bytes=before.sent_bytes if before is not None else 0,
                changed=before.share if before is not None and before.sent_bytes else 1.0,
                whole=whole,
            )
            if board is not None:
                _tell(board, "sum", f"{sent.checksum:x}")
            return sent
        finally:
            deque(tensors, maxlen=0)  # the other ranks take part in the same gathers
            if window is not None:
                window.close()

    def _plan(self, board: Board, terms: Terms, piece_bytes: int, specs: Sequence[TensorSpec]) -> dict[str, Any]:
        """Return the way for each receiver. Rank 0 decides once all have reported, or time is up."""
        board.say(f"rank/{self._index}", place_of(self._device))
        if self._index != 0:
            board.wait(["plan"], "rank 0's plan", COME_S + PATIENCE_S)
            plan: dict[str, Any] = board.read("plan")
            return plan
        end_s = time.monotonic() + COME_S
        board.wait([f"rank/{rank}" for rank in range(self._size)], "a rank of the learner", COME_S)
        places = [board.read(f"rank/{rank}") for rank in range(self._size)]
        ways, ranks, members, kinds, others = [], [], [], [self._device.type], []
        base = self._before.checksum if terms.changes and self._before.fits(specs) else None
        for receiver in range(terms.receivers):
            way, rank = "", -1
            try:
                board.wait([f"here/{receiver}"], "the engine", max(0.0, end_s - time.monotonic()))
                here = board.read(f"here/{receiver}")
                if "refuses" in here:
                    way = here["refuses"]
                elif here["place"] in places and terms.way != "broadcast":
                    way, rank = "ipc", places.index(here["place"])
                elif terms.way != "ipc":
                    way = "broadcast"
                    members.append((here["token"], receiver))
                    kinds.append(here["device"])
                    if base is not None and here["holds"] != f"{base:x}":
                        others.append(receiver)
                else:
                    way = "no rank of the learner is on its device, and the way is ipc"
            except HandOffError as error:
                way = str(error)
            ways.append(way)
            ranks.append(rank)
        tokens = [token for token, _ in members]
        kept = self._group.name if tokens == self._tokens else ""
        self._tokens = tokens
        plan = {
            "ways": ways,
            "ranks": ranks,
            "members": [receiver for _, receiver in members],
            "group": kept or terms.name,
            "device": "cuda" if set(kinds) == {"cuda"} else "cpu",
            "piece_bytes": piece_bytes,
            "changes": base is not None and not others,
            "whole": f"engine {others[0]} does not hold the weights that were sent before" if others else "",
        }
        board.say("plan", plan)
        return plan


class _Shared:
    """Sends to engines on this rank's device, which copy from the window."""

    def __init__(self, board: Board, window: Window, rank: int, receivers: list[int]) -> None:
        self._board, self._rank, self._receivers = board, rank, receivers
        try:
            board.say(f"window/{rank}", {"memory": window.export()})
        except HandOffError as error:
            board.say(f"window/{rank}", {"error": str(error)})
            self._receivers = []

    def give(self, number: int, piece: Tensor) -> None:
        if self._receivers and not _tell(self._board, f"full/{self._rank}/{number}", ""):
            self._receivers = []

    def reclaim(self, number: int) -> None:
        """Wait until nobody needs that piece any more."""
        end_s = time.monotonic() + PATIENCE_S
        for receiver in list(self._receivers):
            gone = _gone(self._board, [receiver])
            try:
                left_s = max(0.0, end_s - time.monotonic())
                self._board.wait([f"taken/{receiver}/{number}"], "the engine's word", left_s, gone)
            except HandOffError as error:
                self._receivers.remove(receiver)
                _tell(self._board, f"failed/{receiver}", str(error))
            else:
                self._board.forget([f"taken/{receiver}/{number}"])
        self._board.forget([f"full/{self._rank}/{number}"])


class _Broadcast:
    """Sends to all others, from rank 0."""

    def __init__(
        self,
        board: Board,
        group: BroadcastGroup,
        plan: dict[str, Any],
        store: Any,
        host: str,
        changes: Before | None = None,
    ) -> None:
        """`changes`: send only the differences from this buffer."""
        self._changes = changes
        self._board, self._group, self._members = board, group, plan["members"]
        self._device = torch.device(plan["device"])
        self._active, self._started = True, -1
        self._gone = _gone(board, self._members)
        with self._guarded():
            size = 1 + len(self._members)
            group.form(store, plan["group"], 0, size, host=host, device=self._device, limit_s=FORM_S[self._device.type])

    def give(self, number: int, piece: Tensor) -> None:
        if not self._active:
            return
        parts = [piece] if self._changes is None else list(self._changes.encoded(number, piece))
        with self._guarded():
            for part in parts:
                if part.numel():
                    self._group.finish(PATIENCE_S, self._gone)
                    self._group.start(part if part.device.type == self._device.type else part.to(self._device))
            self._started = number

    def reclaim(self, number: int) -> None:
        """Wait for that piece, unless a later `give` has done so."""
        if self._active and number == self._started:
            with self._guarded():
                self._group.finish(PATIENCE_S, self._gone)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the broadcast if the block breaks the group, and report it to waiting receivers."""
        try:
            yield
        except HandOffError as error:
            self._active = False
            self._group.leave()
            for receiver in self._members:
                _tell(self._board, f"failed/{receiver}", str(error))


def _gone(board: Board, receivers: Sequence[int]) -> Excuse:
    """Return a check whether one of the receivers has given up."""

    def gone() -> str | None:
        return next((f"engine {i} gave up" for i in receivers if board.said(f"gone/{i}")), None)

    return now_and_then(gone)


def _tell(board: Board, key: str, value: object) -> bool:
    try:
        board.say(key, value)
    except HandOffError:
        return False
    return True
