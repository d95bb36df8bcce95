"""Where a drafter's trainer lives. On CUDA it is on the device only while a session runs: between sessions weights and
optimizer are in pinned host memory, and the engine has the device's memory (but for the CUDA context of this process).
"""

import dataclasses

import torch
from torch import Tensor

from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer


class Residence:
    """`trainer` is the authoritative one; it is another object after `move_in` and `move_out`."""

    def __init__(self, home: DrafterTrainer, device: torch.device, *, moves: bool | None = None) -> None:
        """`home`: on the host. `moves`: whether device memory is another's between sessions; default: not on CPU."""
        self._home, self._device = home, device
        self._moves = device.type != "cpu" if moves is None else moves
        self._away: DrafterTrainer | None = None
        self.pins = device.type == "cuda"  # what stays on the host, so that moving it waits for nothing
        if self.pins:
            moments = [t for name, t in home.state_dict().items() if not name.startswith("model.")]
            for tensor in (*home.model.parameters(), *moments):
                tensor.data = tensor.data.pin_memory()
            home.set_head(pinned(home.head))

    @property
    def trainer(self) -> DrafterTrainer:
        return self._away or self._home

    def set_head(self, head: TargetHead) -> None:
        """A new version of the target; `head` is on the host, pinned where `pins`. Raises ValueError for another
        network's."""
        self._home.set_head(head)
        if self._away is not None:
            self._away.set_head(on_device(head, self._device))

    def same_head(self, version: int) -> None:
        """A new version of the target, of which what a drafter shares is as it was."""
        self.set_head(dataclasses.replace(self._home.head, version=version))

    def move_in(self) -> None:
        """Take device memory. Nothing happens if it is there."""
        if self._moves and self._away is None:
            home = self._home
            head = on_device(home.head, self._device)
            self._away = DrafterTrainer(head, home.options, device=self._device, model=home.model)
            self._away.load_state_dict(home.state_dict(), non_blocking=self.pins)

    def move_out(self) -> None:
        """Give all device memory back."""
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
