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
        plan: dict[str, Any] = {}
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
                others = plan["members"] if self._index == 0 else []
                if terms.changes and (mine or others):
                    whole = self._before.begin(specs, total_bytes, piece_bytes)
                    before = None if whole else self._before
                whole = whole or plan["whole"]
                if mine:
                    window = Window(self._device, piece_bytes)
                    outlets.append(_Shared(board, window, self._index, mine, changes=mine[0] in plan["changes"]))
                if others:
                    host, some = own_address(self._address), others[0] in plan["changes"]
                    outlets.append(_Broadcast(board, self._group, plan, self._client, host, changes=some))
            except HandOffError as error:
                ways = [f"{way}: {error}" if way in ("ipc", "broadcast") else str(error) for way in ways]
                if board is not None:
                    _tell(board, f"window/{self._index}", {"error": str(error)})
            if self._index == 0 or outlets:
                # Changes are copied into the window, so pieces are then made elsewhere.
                staged = window.pieces if window is not None and not outlets[0].changes else None
                encodes = before is not None and any(outlet.changes for outlet in outlets)
                made = in_pieces(specs, total_bytes, tensors, self._device, into=staged, piece_bytes=piece_bytes)
                number = -1
                for number, piece in enumerate(made):
                    if self._index == 0 or before is not None:
                        sums.add(piece)
                    changes = before.encoded(number, piece) if before is not None and encodes else None
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(self._device).synchronize()  # others read it without this stream
                    for outlet in outlets:
                        outlet.give(number, piece, changes)
                    if before is not None:
                        before.replace(number, piece)
                    for outlet in outlets if number else ():
                        outlet.reclaim(number - 1)
                for outlet in outlets if number >= 0 else ():
                    outlet.reclaim(number)
            if before is not None:
                before.end(sums.value())
            else:
                self._before.drop()  # no engine will hold what it holds
            delta_bytes, changed = (before.sent_bytes, before.share) if before is not None else (0, 1.0)
            if self._index != 0:
                if board is not None:
                    _tell(board, f"delta/{self._index}", [delta_bytes, changed])
                return None
            if board is not None and plan.get("changes") and not delta_bytes:
                delta_bytes, changed = _delta_of(board, plan["ranks"][plan["changes"][0]])
            sent = Sent(
                version=terms.version,
                checksum=sums.value(),
                total_bytes=total_bytes,
                seconds=time.monotonic() - start_s,
                ways=tuple(ways),
                delta_bytes=delta_bytes,
                changed=changed if delta_bytes else 1.0,
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
        base = self._before.checksum if terms.changes and self._before.fits(specs) else None
        board.say(f"rank/{self._index}", {"place": place_of(self._device), "base": "" if base is None else f"{base:x}"})
        if self._index != 0:
            board.wait(["plan"], "rank 0's plan", COME_S + PATIENCE_S)
            told: dict[str, Any] = board.read("plan")
            return told
        end_s = time.monotonic() + COME_S
        board.wait([f"rank/{rank}" for rank in range(self._size)], "a rank of the learner", COME_S)
        said = [board.read(f"rank/{rank}") for rank in range(self._size)]
        places = [one["place"] for one in said]
        ways, ranks, members, kinds = [], [], [], [self._device.type]
        based: list[tuple[int, int, bool]] = []  # receivers whose sender has a base: number, rank or -1, holds it too
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
                else:
                    way = "no rank of the learner is on its device, and the way is ipc"
                if way in ("ipc", "broadcast") and (base_of := said[max(rank, 0)]["base"]):
                    based.append((receiver, rank, here["holds"] == base_of))
            except HandOffError as error:
                way = str(error)
            ways.append(way)
            ranks.append(rank)
        tokens = [token for token, _ in members]
        kept = self._group.name if tokens == self._tokens else ""
        self._tokens = tokens
        whole = {rank: receiver for receiver, rank, holds in reversed(based) if not holds}  # who prevents changes
        plan = {
            "ways": ways,
            "ranks": ranks,
            "members": [receiver for _, receiver in members],
            "group": kept or terms.name,
            "device": "cuda" if set(kinds) == {"cuda"} else "cpu",
            "piece_bytes": piece_bytes,
            "changes": [receiver for receiver, rank, _ in based if rank not in whole],
            "whole": f"engine {min(whole.values())} does not hold the weights that were sent before" if whole else "",
        }
        board.say("plan", plan)
        return plan


class _Shared:
    """Sends to engines on this rank's device, which copy from the window."""

    def __init__(self, board: Board, window: Window, rank: int, receivers: list[int], *, changes: bool = False) -> None:
        """`changes`: the window holds the bodies of what changed instead of pieces."""
        self.changes = changes
        self._board, self._window, self._rank, self._receivers = board, window, rank, receivers
        try:
            board.say(f"window/{rank}", {"memory": window.export()})
        except HandOffError as error:
            board.say(f"window/{rank}", {"error": str(error)})
            self._receivers = []

    def give(self, number: int, piece: Tensor, changes: tuple[Tensor, Tensor] | None) -> None:
        header: list[int] = []
        if self._receivers and self.changes and changes is not None:
            header, body = changes[0].view(torch.int64).tolist(), changes[1]
            self._window.pieces[number % 2][: body.numel()].copy_(body)
            if piece.device.type == "cuda":
                torch.cuda.current_stream(piece.device).synchronize()
        if self._receivers and not _tell(self._board, f"full/{self._rank}/{number}", header):
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
        *,
        changes: bool = False,
    ) -> None:
        """`changes`: send only what changed."""
        self.changes = changes
        self._board, self._group, self._members = board, group, plan["members"]
        self._device = torch.device(plan["device"])
        self._active, self._started = True, -1
        self._gone = _gone(board, self._members)
        with self._guarded():
            size = 1 + len(self._members)
            group.form(store, plan["group"], 0, size, host=host, device=self._device, limit_s=FORM_S[self._device.type])

    def give(self, number: int, piece: Tensor, changes: tuple[Tensor, Tensor] | None) -> None:
        if not self._active:
            return
        parts = changes if self.changes and changes is not None else (piece,)
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


def _delta_of(board: Board, rank: int) -> tuple[int, float]:
    """Return the bytes and the share of what changed, as that rank has sent it; (0, 1.0) if it does not say."""
    try:
        board.wait([f"delta/{rank}"], "a rank's delta", PATIENCE_S)
        size, changed = board.read(f"delta/{rank}")
    except HandOffError:
        return 0, 1.0
    return size, changed


def _tell(board: Board, key: str, value: object) -> bool:
    try:
        board.say(key, value)
    except HandOffError:
        return False
    return True
