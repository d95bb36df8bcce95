"""Anything that a stranger sends: no frame ends the coordinator, and no crowd of names fills its books."""

import random
from collections import Counter

import pytest

from contracts.coordinator import Busy, Heartbeat, Leave, Register, RolloutStarted, Started, State, TrainerFailed
from coordinator import hub as hubs
from coordinator.hub import Hub
from coordinator.link import Fate
from coordinator.machine import Machine
from coordinator.wire import BadFrameError, Say, decode_answer, decode_say, encode, speaker
from tests.coordinator.cluster import OPTIONS, Raw, eventually, served, states, worker

FRAMES = 100_000
SEEDS = [
    encode(Say(1, number, event))
    for number, event in enumerate(
        (
            Register("w0", 1, "node", "group", State.TRAINING, session=3, leader=True, store="h:1", epoch=4),
            Heartbeat("w0", 1, State.BUSY, running=7),
            Busy("w0", 1, running=2),
            Started("w0", 1, session=3, epoch=4, store="h:1"),
            TrainerFailed("w0", 1, 3, "out of memory"),
            Leave("w0", 1),
            RolloutStarted(7),
        )
    )
]


def mutated(rng: random.Random) -> bytes:
    """A true message with a few bytes changed, cut out, put in or doubled."""
    frame = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(4):
            case 0:
                frame[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del frame[at : at + rng.randint(1, 8)]
            case 2:
                frame[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                frame[at:at] = frame[at : at + 8]
    return bytes(frame)


def test_no_frame_is_anything_but_a_message_or_a_bad_frame() -> None:
    """100,000 mutated frames, through all that the server's thread does with them; the hub must not raise either."""
    rng = random.Random(9)
    hub = Hub(Machine(OPTIONS, term=1), members=["w0"])
    fates: Counter[str] = Counter()
    for number in range(FRAMES):
        frame = mutated(rng)
        try:
            say = decode_say(frame)
        except BadFrameError:
            fates["bad"] += 1
            continue
        fates[hub.hear(speaker(say), say, number * 1e-3).value] += 1
        hub.tick(number * 1e-3)
        hub.take(number * 1e-3)
    assert fates.total() == FRAMES
    assert fates["bad"] > FRAMES / 2
    assert fates["heard"] > 0
    assert fates["stranger"] > 0
    assert set(hub.machine.roster.workers) <= {"w0"}


@pytest.mark.parametrize(
    "frame",
    [b"\x81\xa1\xff\x00", b"\x81\xa4type\xa1\xff", b""],
    ids=["a key that is no UTF-8", "a tag that is no UTF-8", "empty"],
)
def test_text_that_is_no_utf8_is_a_bad_frame(frame: bytes) -> None:
    for decode in (decode_say, decode_answer):
        with pytest.raises(BadFrameError):
            decode(frame)


def test_a_frame_that_is_no_utf8_does_not_end_the_coordinator() -> None:
    with served() as server, Raw(server.endpoint) as raw, worker(server.endpoint, "w0") as client:
        raw.send(b"\x81\xa1\xff\x00")
        eventually(lambda: server.counts()["malformed"] == 1)
        eventually(lambda: client.connected)


def test_a_crowd_of_strangers_leaves_nothing_behind() -> None:
    """Workers that the run has not configured are refused, however many; those that it has are served meanwhile."""
    with served(members=["w0", "w1"]) as server, Raw(server.endpoint) as raw:
        for number in range(5_000):
            raw.say(Say(1, 0, Register(f"ghost-{number}", 1, "n0", "g", State.IDLE)))
        with worker(server.endpoint, "w0") as client:
            eventually(lambda: client.connected)
            assert states(server) == {"w0": "BUSY"}
            eventually(lambda: server.counts()[Fate.STRANGER.value] > 0)
            with server.hub() as (hub, _):
                assert len(hub._links) == 1
        assert raw.answer(0.0) is None


def test_where_any_name_may_register_the_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MAX_PEERS", 3)
    hub = Hub(Machine(OPTIONS, term=1))
    fates = [hub.hear(f"w{n}", Say(1, 0, Register(f"w{n}", 1, "n0", "g", State.BUSY)), 0.0) for n in range(5)]
    assert fates == [Fate.NEW] * 3 + [Fate.STRANGER] * 2
    assert hub.hear("driver", Say(1, 0, RolloutStarted(1)), 0.0) is Fate.NEW
    assert hub.hear("w1", Say(1, 1, Leave("w1", 1)), 0.0) is Fate.NEW
    assert len(hub.machine.roster.workers) == 2
