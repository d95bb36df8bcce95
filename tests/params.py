"""Parameters of tests that only `make test-all` runs."""

from typing import Any

import pytest


def long(*values: Any) -> list[Any]:
    """Return the values marked `long`, for a sweep whose ends `make test` runs: `[1, 32, *long(2, 4, 8, 16)]`."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
