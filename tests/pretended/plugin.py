"""pytest on the pretended device: `python -m pytest -p tests.pretended.plugin tests/gpu`. It must be named on the
command line: torch looks for devices when it is imported."""

from collections.abc import Iterator

import pytest

import tests.pretended

tests.pretended.install()


@pytest.fixture(autouse=True)
def _device_is_idle_afterwards() -> Iterator[None]:
    """Copies that a test left in flight are checked as if it had waited for them."""
    from tests.pretended.device import DEVICE

    yield
    DEVICE.finish(DEVICE.now())
