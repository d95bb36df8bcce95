"""For tests on the pretended device: what a piece of code made it do.

with counting() as seen:
    engine.step()
assert seen.waits.total() == 1, seen.waits
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.pretended.device import DEVICE, Seen


@contextmanager
def counting() -> Iterator[Seen]:
    """What happens inside; filled in when the block ends, by an exception too."""
    before, seen = DEVICE.seen.copy(), Seen()
    try:
        yield seen
    finally:
        found = DEVICE.seen.minus(before)
        for name in Seen.__slots__:
            setattr(seen, name, getattr(found, name))
