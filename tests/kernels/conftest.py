"""Kernel tests run on one thread and are skipped, with the remedy, where the extension is not installed."""

from collections.abc import Iterator

import pytest
import torch

from models.ops.native import kernels


@pytest.fixture
def native() -> None:
    if kernels is None:
        pytest.skip("paceline_native is not installed: pip install -e .")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
