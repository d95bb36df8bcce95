"""The reference policy of the KL term: the weights at the start of a phase. Kept as a frozen copy of the network or, if
only adapters are trained, as the initial adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from actors.training.network import LogProbModel


class Frozen:
    """A second network as the reference, without gradients."""

    def __init__(self, module: LogProbModel, copy: LogProbModel) -> None:
        """`copy`: another network like `module`."""
        self._module, self.copy = module, copy
        self.copy.requires_grad_(False)

    @torch.no_grad()
    def take(self) -> None:
        """Make the module's present weights the reference."""
        for theirs, ours in zip(self.copy.parameters(), self._module.parameters(), strict=True):
            theirs.copy_(ours)

    @contextmanager
    def computing(self) -> Iterator[LogProbModel]:
        """Yield a module with the reference's weights."""
        yield self.copy

    def state(self) -> dict[str, Tensor]:
        """Return live tensors, for saving and for loading in place."""
        return {name: p.detach() for name, p in self.copy.named_parameters()}


class AdaptersBefore:
    """The same network with its initial adapters; fresh ones add nothing, so that is the network without adapters."""

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


Reference = Frozen | AdaptersBefore
