"""How messages travel: one msgspec frame each, bounded in size. Owns encoding and its errors; knows no sockets."""

import msgspec

from coordinator.events import Command, ControlEvent, WorkerEvent

MAX_FRAME_BYTES = 64 * 1024


class Say(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker's or the driver's message. `number` rises by one per message of an incarnation; sent again until acked."""

    number: int
    event: WorkerEvent | ControlEvent


class Ack(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Heard. `error` says why it changed nothing."""

    number: int
    term: int
    error: str = ""


class Tell(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A command; sent again while the answer is owed."""

    command: Command


class BadFrameError(ValueError):
    """A frame that is no message."""


_encoder = msgspec.msgpack.Encoder()
_from_peer = msgspec.msgpack.Decoder(Say)
_from_coordinator = msgspec.msgpack.Decoder(Ack | Tell)


def encode(message: Say | Ack | Tell) -> bytes:
    return _encoder.encode(message)


def decode_say(frame: bytes) -> Say:
    """Raises BadFrameError."""
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrameError(f"{len(frame)} bytes, more than {MAX_FRAME_BYTES}")
    try:
        return _from_peer.decode(frame)
    except msgspec.DecodeError as error:
        raise BadFrameError(str(error)) from None


def decode_answer(frame: bytes) -> Ack | Tell:
    """Raises BadFrameError."""
    try:
        return _from_coordinator.decode(frame)
    except msgspec.DecodeError as error:
        raise BadFrameError(str(error)) from None
