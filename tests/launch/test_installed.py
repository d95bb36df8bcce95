"""What to type for an extra, by the way in which Paceline was installed."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest

from config.installed import install_extra

CHECKOUT, WHEEL = "pip install -e '.[wandb]'", "pip install 'paceline[wandb]'"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ('{"url": "file:///x", "dir_info": {"editable": true}}', CHECKOUT),
        ('{"url": "file:///x", "dir_info": {}}', WHEEL),
        ('{"url": "file:///x.whl", "archive_info": {}}', WHEEL),
        (None, WHEEL),
    ],
)
def test_an_extra_is_installed_as_the_package_was(
    monkeypatch: pytest.MonkeyPatch, url: str | None, expected: str
) -> None:
    found: Any = SimpleNamespace(read_text=lambda name: url)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    assert install_extra("wandb") == expected


def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install_extra("wandb") == CHECKOUT
