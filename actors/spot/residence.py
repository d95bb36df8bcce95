"""Device memory of a drafter's trainer. On CUDA it is on the device only during a session. Between sessions, weights
and optimizer are in pinned host memory, and the engine has the device's memory (except this process's CUDA context).
"""

import dataclasses

import torch
from torch import Tensor

from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer


class Residence:
    """Moves a trainer. `trainer` is the current object; `move_in` and `move_out` replace it."""

    def __init__(self, home: DrafterTrainer, device: torch.device, *, moves: bool | None = None) -> None:
        """`home`: on the host. `moves`: whether device memory is freed between sessions; default: not on CPU."""
        self._home, self._device = home, device
        self._moves = device.type != "cpu" if moves is None else moves
        self._away: DrafterTrainer | None = None
        self.pins = device.type == "cuda"  # host tensors are pinned, so that moves are asynchronous
        if self.pins:
            moments = [t for name, t in home.state_dict().items() if not name.startswith("model.")]
            for tensor in (*home.model.parameters(), *moments):
                tensor.data = tensor.data.pin_memory()
            home.set_head(pinned(home.head))

    @property
    def trainer(self) -> DrafterTrainer:
        return self._away or self._home

    def set_head(self, head: TargetHead) -> None:
        """Set a new version of the target; `head` is on the host, pinned if `pins`. Raises ValueError for another
        network's."""
        self._home.set_head(head)
        if self._away is not None:
            self._away.set_head(on_device(head, self._device))

    def same_head(self, version: int) -> None:
        """Set a new version of the target whose parts shared with the drafter are unchanged."""
        self.set_head(dataclasses.replace(self._home.head, version=version))

    def move_in(self) -> None:
        """Move to the device. No effect if it is there."""
        if self._moves and self._away is None:
            home = self._home
            head = on_device(home.head, self._device)
            self._away = DrafterTrainer(head, home.options, device=self._device, model=home.model)
            self._away.load_state_dict(home.state_dict(), non_blocking=self.pins)

    def move_out(self) -> None:
        """Move to the host and free all device memory."""
        if self._away is not None:
            self._home.load_state_dict(self._away.state_dict(), non_blocking=self.pins)
            if self.pins:
                torch.cuda.current_stream(self._device).synchronize()  # once, for all tensors
            self._away = None
            if self.pins:
                torch.cuda.empty_cache()


def on_device(head: TargetHead, device: torch.device) -> TargetHead:
    """The same tensors on another device; a tied head stays tied."""
    return _of(head, [tensor.to(device, non_blocking=True) for tensor in _tensors(head)])


def pinned(head: TargetHead) -> TargetHead:
    """The same tensors in pinned memory."""
    return _of(head, [tensor if tensor.is_pinned() else tensor.pin_memory() for tensor in _tensors(head)])


def _tensors(head: TargetHead) -> list[Tensor]:
    """Norm and embedding, and the head where that is another tensor."""
    return [head.norm, head.embedding, *([] if head.lm_head is head.embedding else [head.lm_head])]


def _of(head: TargetHead, tensors: list[Tensor]) -> TargetHead:
    """`head` with these in place of its `_tensors`."""
    return dataclasses.replace(head, norm=tensors[0], embedding=tensors[1], lm_head=tensors[-1])
