"""An engine's end of a hand-off: pieces into its live parameters, between two of its steps.

Errors say whether anything was overwritten; the engine handles half overwritten weights."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.handoff.board import Board, Excuse, connect, now_and_then, own_address, place_of
from actors.handoff.changes import Changer, PieceLayout
from actors.handoff.group import BroadcastGroup
from actors.handoff.send import COME_S, FORM_S, PATIENCE_S
from actors.handoff.window import opened
from contracts.handoff import HandOffError, Offer, Received
from models.manifest import WeightsManifest
from models.pieces import PieceSums, Scatter

_PATIENCE = 6  # times the learner's, which may be waiting for another engine or for a group to form


class PieceSink(Protocol):
    """Destination of pieces: tensors (models.pieces.Scatter), or the ranks of an engine."""

    def take(self, piece: Tensor) -> None:
        """Write the next piece, uint8."""


class Receiver:
    """Receiver of one engine process. It keeps the broadcast group for further hand-offs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._token = uuid.uuid4().hex  # a restarted engine has another one
        self._group = BroadcastGroup()
        self._store = ""  # address of the client's store
        self._client: Any = None

    def receive(self, offer: Offer, targets: Mapping[str, Tensor], held: WeightsManifest | None = None) -> Received:
        """Fill `targets`, by the names of the offer, in place, after a comparison of names, shapes and dtypes. `held`:
        what they hold, bit for bit, so that only what changed needs to come. Raises HandOffError, which says whether
        anything was written."""
        try:
            if missing := sorted(targets.keys() - {spec.name for spec in offer.tensors}):
                raise ValueError(f"{missing[0]} (and {len(missing) - 1} more) does not come")
            scatter = Scatter(offer.tensors, targets)
        except (KeyError, ValueError) as error:
            raise self.refused(offer, error) from error
        holds = f"{held.checksum:x}" if held is not None and held.tensors == offer.tensors else ""
        return self.receive_into(offer, scatter, holds, targets)

    def refused(self, offer: Offer, error: Exception) -> HandOffError:
        """Report that the engine's tensors differ, and return the error to raise."""
        reason = f"the engine's tensors are others: {error}"
        self._board(offer).say(f"here/{offer.receiver}", {"refuses": reason})
        return HandOffError(reason)

    def receive_into(
        self, offer: Offer, sink: PieceSink, holds: str = "", targets: Mapping[str, Tensor] | None = None
    ) -> Received:
        """Give `sink` every piece. `holds`: checksum of the offer's buffer as `targets` make it now, in hexadecimal.
        Raises HandOffError, which says whether anything was written."""
        board = self._board(offer)
        here = {"token": self._token, "place": place_of(self._device), "device": self._device.type, "holds": holds}
        board.say(f"here/{offer.receiver}", here)
        board.wait(["plan"], "the learner's plan", COME_S + _PATIENCE * PATIENCE_S)
        plan = board.read("plan")
        way = plan["ways"][offer.receiver]
        count = -(-offer.total_bytes // plan["piece_bytes"])
        match way:
            case "ipc":
                pieces = self._shared(board, offer, plan, count)
            case "broadcast":
                pieces = self._broadcast(board, offer, plan, count)
            case why:
                raise HandOffError(f"the learner left this engine out: {why}")
        sums, began = PieceSums(), False
        changer = None
        if offer.receiver in plan["changes"]:
            assert targets is not None  # otherwise it holds nothing that the plan could build on
            changer = Changer(PieceLayout(offer.tensors, offer.total_bytes, plan["piece_bytes"]), targets)
            changes = self._shared_changes if way == "ipc" else self._changes
            way, pieces = "delta", iter(())
        try:
            if changer is not None:
                for number, header, body in changes(board, offer, plan, changer):
                    began |= body.numel() > 0
                    changer.take(number, header, body)
            for piece in pieces:
                began = True
                sums.add(piece)
                sink.take(piece)
            board.wait(["sum"], "the learner's checksum", _PATIENCE * PATIENCE_S, self._excuse(board, offer))
            checksum = sums.value() if changer is None else changer.checksum()
            sent = int(board.read("sum"), 16)
            if checksum != sent:
                raise HandOffError(f"checksum {checksum:#x} came, {sent:#x} was sent")
        except (HandOffError, torch.OutOfMemoryError) as error:
            with suppress(HandOffError):  # if the store is gone
                board.say(f"gone/{offer.receiver}")
            self._group.leave()
            raise HandOffError(str(error), began=began) from error
        return Received(checksum, way)

    def _board(self, offer: Offer) -> Board:
        if offer.store != self._store:  # the first time, and after the learner was replaced
            self._group.leave()  # its name may be used again
            self._client = connect(offer.store)
            self._store = offer.store
        return Board(self._client, offer.name, offer.limit_s)

    def _shared(self, board: Board, offer: Offer, plan: dict[str, Any], count: int) -> Iterator[Tensor]:
        for number, _, room in self._windows(board, offer, plan, count):
            yield room[: _size(offer, plan, number)]

    def _shared_changes(
        self, board: Board, offer: Offer, plan: dict[str, Any], changer: Changer
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Same as `_changes`, from the learner's memory."""
        count = -(-offer.total_bytes // plan["piece_bytes"])
        for number, words, room in self._windows(board, offer, plan, count):
            header = torch.tensor(words, dtype=torch.int64).view(torch.uint8)
            if header.numel() != changer.header_bytes(number):
                raise HandOffError(f"the changes of piece {number} are damaged")
            yield number, header, room[: changer.body_bytes(number, header)]

    def _windows(
        self, board: Board, offer: Offer, plan: dict[str, Any], count: int
    ) -> Iterator[tuple[int, list[int], Tensor]]:
        """Yield each piece's number, what the learner says of it, and its place in the learner's memory, which stays
        valid until the next is requested."""
        rank, excuse = plan["ranks"][offer.receiver], self._excuse(board, offer)
        board.wait([f"window/{rank}"], "the learner's memory", _PATIENCE * PATIENCE_S, excuse)
        exported = board.read(f"window/{rank}")
        if "error" in exported:
            raise HandOffError(exported["error"])
        whole, room = opened(exported["memory"], self._device), plan["piece_bytes"]
        two = whole[:room], whole[room:]
        for number in range(count):
            board.wait([f"full/{rank}/{number}"], f"piece {number} of {count}", _PATIENCE * PATIENCE_S, excuse)
            yield number, board.read(f"full/{rank}/{number}"), two[number % 2]
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # from here on it may be overwritten
            board.say(f"taken/{offer.receiver}/{number}")

    def _changes(
        self, board: Board, offer: Offer, plan: dict[str, Any], changer: Changer
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each piece's number, header on the host, and body; the body stays valid until the next is requested."""
        device, excuse = self._join(offer, plan), self._excuse(board, offer)
        room = torch.empty(plan["piece_bytes"], dtype=torch.uint8, device=device)

        def received(into: Tensor) -> Tensor:
            if into.numel():
                self._group.start(into)
                self._group.finish(_PATIENCE * PATIENCE_S, excuse)
            return into

        for number in range(-(-offer.total_bytes // plan["piece_bytes"])):
            header = torch.empty(changer.header_bytes(number), dtype=torch.uint8, device=device)
            header = received(header).cpu()
            yield number, header, received(room[: changer.body_bytes(number, header)])

    def _join(self, offer: Offer, plan: dict[str, Any]) -> torch.device:
        """Form the broadcast's group. Returns the device of its tensors."""
        members = plan["members"]
        device = self._device if plan["device"] == "cuda" else torch.device("cpu")
        rank, size = 1 + members.index(offer.receiver), 1 + len(members)
        host = own_address(offer.store)
        self._group.form(self._client, plan["group"], rank, size, host=host, device=device, limit_s=FORM_S[device.type])
        return device

    def _broadcast(self, board: Board, offer: Offer, plan: dict[str, Any], count: int) -> Iterator[Tensor]:
        device, excuse = self._join(offer, plan), self._excuse(board, offer)
        two = [torch.empty(plan["piece_bytes"], dtype=torch.uint8, device=device) for _ in range(2)]

        def start(number: int) -> None:
            if number < count:
                self._group.start(two[number % 2][: _size(offer, plan, number)])

        start(0)
        for number in range(count):
            self._group.finish(_PATIENCE * PATIENCE_S, excuse)
            start(number + 1)  # receive the next piece while this one is copied; the buffers alternate
            yield two[number % 2][: _size(offer, plan, number)]

    def _excuse(self, board: Board, offer: Offer) -> Excuse:
        """Return a check whether the learner reported a failure."""
        key = f"failed/{offer.receiver}"
        return now_and_then(lambda: board.read(key) if board.said(key) else None)


def _size(offer: Offer, plan: dict[str, Any], number: int) -> int:
    """Return the bytes of a piece; the last one may be shorter."""
    piece: int = plan["piece_bytes"]
    return min(piece, offer.total_bytes - number * piece)
