"""The policy that the KL term compares with: the weights that a phase began with. Owns where they are kept: as a frozen
copy of the network or, where only adapters are trained, as what those were.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from actors.training.network import LogProbModel


class Reference(Protocol):
    """Reference of one module. No gradient is ever taken of it."""

    def take(self) -> None:
        """The module's present weights are the reference from here on."""

    def computing(self) -> AbstractContextManager[LogProbModel]:
        """Inside the block: a module with the reference's weights."""

    def state(self) -> dict[str, Tensor]:
        """Live tensors, for saving and for loading in place."""


class Frozen:
    """A second network."""

    def __init__(self, module: LogProbModel, build: Callable[[], LogProbModel] | None) -> None:
        """`build` makes another one like `module`; None: it can be copied."""
        self._module = module
        self.copy = copy.deepcopy(module) if build is None else build()
        self.copy.requires_grad_(False)

    @torch.no_grad()
    def take(self) -> None:
        for theirs, ours in zip(self.copy.parameters(), self._module.parameters(), strict=True):
            theirs.copy_(ours)

    @contextmanager
    def computing(self) -> Iterator[LogProbModel]:
        yield self.copy

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.copy.named_parameters()}


class AdaptersBefore:
    """The same network with the adapters that it had; fresh ones add nothing, so that is the network without them."""

    def __init__(self, module: LogProbModel) -> None:
        self._module = module
        self._live = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._kept = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def take(self) -> None:
        for name, p in self._live.items():
            self._kept[name].copy_(p)

    @contextmanager
    def computing(self) -> Iterator[LogProbModel]:
        present = {name: p.detach().clone() for name, p in self._live.items()}
        self._put(self._kept)
        try:
            yield self._module
        finally:
            self._put(present)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, p in self._live.items():
            p.copy_(values[name])

    def state(self) -> dict[str, Tensor]:
        return dict(self._kept)
