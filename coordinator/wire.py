"""Wire format: one msgspec frame per message, bounded in size. Encoding and its errors; no sockets."""

from typing import TypeVar

import msgspec

from contracts.coordinator import Command, DriverEvent, Serial, Train, WorkerEvent, WorkerMessage

MAX_FRAME_BYTES = 64 * 1024
T = TypeVar("T")
DRIVER = "driver"  # peer name of the driver; no worker has it


class Say(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A peer's message. `number` rises by one per message of an incarnation. Repeated until acknowledged."""

    incarnation: Serial
    number: Serial
    event: WorkerEvent | DriverEvent


def speaker(say: Say) -> str:
    """Return the peer that the message claims to come from; empty for a worker with the driver's name."""
    if not isinstance(say.event, WorkerMessage):
        return DRIVER
    return say.event.worker if say.event.worker != DRIVER else ""


class Ack(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Acknowledges this message and all earlier ones of its incarnation. `error` says why it changed nothing."""

    incarnation: int
    number: int
    term: int
    error: str = ""


class Tell(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A command to one incarnation of a worker. `heard` is the last message received before the command was made.
    Repeated until answered.
    """

    command: Command
    incarnation: int
    heard: int


class BadFrameError(ValueError):
    """The frame holds no message."""


class OversizedFrameError(BadFrameError):
    """The frame exceeds MAX_FRAME_BYTES."""


_encoder = msgspec.msgpack.Encoder()
_from_peer = msgspec.msgpack.Decoder(Say)
_from_coordinator: msgspec.msgpack.Decoder[Ack | Tell] = msgspec.msgpack.Decoder(Ack | Tell)


def encode(message: Say | Ack | Tell) -> bytes:
    return _encoder.encode(message)


class _Train(msgspec.Struct, frozen=True, tag="Train"):
    """`Train` with its members already encoded."""

    worker: str
    term: int
    epoch: int
    session: int
    members: msgspec.Raw
    store: str


class _Tell(msgspec.Struct, frozen=True, tag="Tell"):
    command: _Train
    incarnation: int
    heard: int


class AnswerEncoder:
    """Same as `encode`, but encodes a session's members once for all its commands. Not thread-safe."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._members: tuple[str, ...] = ()
        self._encoded = msgspec.Raw(_encoder.encode(()))

    def encode(self, message: Ack | Tell) -> bytes:
        if not (isinstance(message, Tell) and isinstance(message.command, Train)):
            return self._encoder.encode(message)
        train = message.command
        if train.members is not self._members:
            self._members, self._encoded = train.members, msgspec.Raw(self._encoder.encode(train.members))
        command = _Train(train.worker, train.term, train.epoch, train.session, self._encoded, train.store)
        return self._encoder.encode(_Tell(command, message.incarnation, message.heard))


def decode_say(frame: bytes) -> Say:
    """Decode a peer's message. Raises BadFrameError, OversizedFrameError."""
    if len(frame) > MAX_FRAME_BYTES:
        raise OversizedFrameError(f"{len(frame)} bytes, more than {MAX_FRAME_BYTES}")
    return _decode(_from_peer, frame)


def decode_answer(frame: bytes) -> Ack | Tell:
    """Decode the coordinator's answer. Raises BadFrameError."""
    return _decode(_from_coordinator, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except Exception as error:  # any exception (UnicodeDecodeError is no DecodeError): these bytes are untrusted
        raise BadFrameError(f"{type(error).__name__}: {error}") from None
