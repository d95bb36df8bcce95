"""An engine's end of a hand-off: pieces into its live parameters, between two of its steps. Owns that it says how far
it got; what an engine does that holds half of them is the engine's."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.handoff.board import Board, Excuse, connect, now_and_then, own_address, place_of
from actors.handoff.group import BroadcastGroup
from actors.handoff.send import COME_S, FORM_S, PATIENCE_S
from actors.handoff.window import opened
from contracts.handoff import HandOffError, Offer, Received
from models.pieces import PieceSums, Scatter

_PATIENCE = 6  # times the learner's, who may be waiting for another engine, or for a group to form


class PieceSink(Protocol):
    """What pieces go into: tensors (models.pieces.Scatter), or the ranks of an engine."""

    def take(self, piece: Tensor) -> None:
        """The next piece, uint8."""


class Receiver:
    """Receiver of one engine process. It keeps the group of broadcasts from one hand-off to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._token = uuid.uuid4().hex  # another one in an engine that was started anew
        self._group = BroadcastGroup()
        self._store = ""  # the learner's, that the client is of
        self._client: Any = None

    def receive(self, offer: Offer, targets: Mapping[str, Tensor]) -> Received:
        """Fill `targets`, by the names of the offer, in place. Raises HandOffError, which says whether it has begun to;
        before that names, shapes and dtypes are compared."""
        try:
            if missing := sorted(targets.keys() - {spec.name for spec in offer.tensors}):
                raise ValueError(f"{missing[0]} (and {len(missing) - 1} more) does not come")
            scatter = Scatter(offer.tensors, targets)
        except (KeyError, ValueError) as error:
            raise self.refused(offer, error) from error
        return self.receive_into(offer, scatter)

    def refused(self, offer: Offer, error: Exception) -> HandOffError:
        """Say that the engine's tensors are others, and what to raise."""
        reason = f"the engine's tensors are others: {error}"
        self._board(offer).say(f"here/{offer.receiver}", {"refuses": reason})
        return HandOffError(reason)

    def receive_into(self, offer: Offer, sink: PieceSink) -> Received:
        """Give `sink` every piece. Raises HandOffError, which says whether it has begun to."""
        board = self._board(offer)
        here = {"token": self._token, "place": place_of(self._device), "device": self._device.type}
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
        try:
            for piece in pieces:
                began = True
                sums.add(piece)
                sink.take(piece)
            board.wait(["sum"], "the learner's checksum", _PATIENCE * PATIENCE_S, self._excuse(board, offer))
            checksum, sent = sums.value(), int(board.read("sum"), 16)
            if checksum != sent:
                raise HandOffError(f"checksum {checksum:#x} came, {sent:#x} was sent")
        except (HandOffError, torch.OutOfMemoryError) as error:
            with suppress(HandOffError):  # of a store that is gone
                board.say(f"gone/{offer.receiver}")
            self._group.leave()
            raise HandOffError(str(error), began=began) from error
        return Received(checksum, way)

    def _board(self, offer: Offer) -> Board:
        if offer.store != self._store:  # at first, and when the learner is another one
            self._group.leave()  # whose names may come again
            self._client = connect(offer.store)
            self._store = offer.store
        return Board(self._client, offer.name, offer.limit_s)

    def _shared(self, board: Board, offer: Offer, plan: dict[str, Any], count: int) -> Iterator[Tensor]:
        rank, excuse = plan["ranks"][offer.receiver], self._excuse(board, offer)
        board.wait([f"window/{rank}"], "the learner's memory", _PATIENCE * PATIENCE_S, excuse)
        exported = board.read(f"window/{rank}")
        if "error" in exported:
            raise HandOffError(exported["error"])
        whole, room = opened(exported["memory"], self._device), plan["piece_bytes"]
        two = whole[:room], whole[room:]
        for number in range(count):
            board.wait([f"full/{rank}/{number}"], f"piece {number} of {count}", _PATIENCE * PATIENCE_S, excuse)
            yield two[number % 2][: _size(offer, plan, number)]
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # it may be written again from here on
            board.say(f"taken/{offer.receiver}/{number}")

    def _broadcast(self, board: Board, offer: Offer, plan: dict[str, Any], count: int) -> Iterator[Tensor]:
        members, excuse = plan["members"], self._excuse(board, offer)
        device = self._device if plan["device"] == "cuda" else torch.device("cpu")
        rank, size = 1 + members.index(offer.receiver), 1 + len(members)
        host = own_address(offer.store)
        self._group.form(self._client, plan["group"], rank, size, host=host, device=device, limit_s=FORM_S[device.type])
        two = [torch.empty(plan["piece_bytes"], dtype=torch.uint8, device=device) for _ in range(2)]

        def start(number: int) -> None:
            if number < count:
                self._group.start(two[number % 2][: _size(offer, plan, number)])

        start(0)
        for number in range(count):
            self._group.finish(_PATIENCE * PATIENCE_S, excuse)
            start(number + 1)  # while this one is copied; into it goes the one after, once it was
            yield two[number % 2][: _size(offer, plan, number)]

    def _excuse(self, board: Board, offer: Offer) -> Excuse:
        """Whether the learner has said that it is in vain."""
        key = f"failed/{offer.receiver}"
        return now_and_then(lambda: board.read(key) if board.said(key) else None)


def _size(offer: Offer, plan: dict[str, Any], number: int) -> int:
    """Bytes of a piece: the last one has what is left."""
    piece: int = plan["piece_bytes"]
    return min(piece, offer.total_bytes - number * piece)
