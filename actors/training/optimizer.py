"""Optimizers and the learning-rate schedule. Assigns parameters to optimizers; never computes gradients.

`adamw`: AdamW for everything; weight decay for matrices only. `muon`: torch.optim.Muon for the matrices inside the
decoder layers, AdamW for the rest (embedding, head, norms, biases), with one learning rate. Muon's update is scaled to
the root mean square of AdamW's (`match_rms_adamw`, Liu et al. 2025, "Muon is Scalable for LLM Training").

Fused matrices (qkv_proj, gate_up_proj) are orthogonalised as they are stored, all parts together: the parts share one
spectral norm, where separate matrices would have one each. The shape-dependent scale uses the fused shape.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from actors.training.away import Away
from config.learner import OptimizerOptions
from models.checkpoint import copy_full, is_sharded

Named = list[tuple[str, nn.Parameter]]


class FullMatrixMuon(torch.optim.Muon):
    """torch.optim.Muon that also accepts sharded matrices.

    The Newton-Schulz iteration needs whole matrices. The momentum stays sharded; each rank gathers one momentum-updated
    gradient at a time, orthogonalises all of it, and applies its own rows. So N ranks compute the same as one.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            sharded = [p for p in group["params"] if is_sharded(p) and p.grad is not None]
            if not sharded:
                super().step(closure)  # type: ignore[no-untyped-call]
                return
            for p in sharded:
                self._step_sharded(p, group)

    def _step_sharded(self, p: Any, group: dict[str, float]) -> None:
        momentum: Any = self.state[p]["momentum_buffer"]
        assert is_sharded(p.grad)
        # torch's Muon on a whole temporary copy: only its update is used.
        whole = nn.Parameter(p.full_tensor())
        whole.grad = p.grad.full_tensor()
        full_momentum = momentum.full_tensor() if is_sharded(momentum) else momentum
        scratch = torch.optim.Muon([whole], **{k: v for k, v in group.items() if k != "params"})  # type: ignore[arg-type]
        scratch.state[whole] = {"momentum_buffer": full_momentum}
        scratch.step()  # type: ignore[no-untyped-call]
        _copy_shard(p, whole.detach())
        _copy_shard(momentum, full_momentum)


def _copy_shard(target: Tensor, full: Tensor) -> None:
    if is_sharded(target):
        copy_full(target, full)
    else:
        target.copy_(full)


class Optimizers:
    """One or two torch optimizers that step together on one schedule."""

    def __init__(
        self, parameters: Named, matrices: Iterable[nn.Parameter], options: OptimizerOptions, total_steps: int
    ) -> None:
        """`matrices`: the parameters for Muon, if chosen. Raises ValueError if a schedule has no end."""
        if options.schedule != "constant" and total_steps < 1:
            raise ValueError(f"optimizer.schedule={options.schedule} needs the number of optimizer steps")
        self.options = options
        self.total_steps = total_steps
        self.steps_done = 0
        hidden = {id(p) for p in matrices} if options.name == "muon" else set()
        muon = [p for _, p in parameters if id(p) in hidden]
        decayed = [p for _, p in parameters if id(p) not in hidden and p.dim() >= 2]
        undecayed = [p for _, p in parameters if id(p) not in hidden and p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
        self._all: list[torch.optim.Optimizer] = []
        if taken := [g for g in groups if g["params"]]:  # Muon may have all parameters
            self._all.append(torch.optim.AdamW(taken, lr=options.lr, betas=options.betas, eps=options.eps, fused=True))
        if muon:
            decay = options.weight_decay
            self._all.append(FullMatrixMuon(muon, lr=options.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
        self._names = {id(p): name for name, p in parameters}
        self._away = Away()
        self._create_state()

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.options.lr * lr_factor(self.steps_done, self.options, self.total_steps)

    def step(self) -> float:
        """Apply the gradients at the scheduled learning rate, and return that."""
        self._away.come_back()
        lr = self.lr
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            # A fused step does not count the changes, but caches of values computed from a parameter rely on that
            # count.
            increment_version([p for group in optimizer.param_groups for p in group["params"]])
        self.steps_done += 1
        return lr

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for optimizer in self._all:
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the live state tensors, '<parameter>.<key>', for saving and for loading in place. Complete from the
        start."""
        self._away.come_back()
        return self._state()

    def rest(self) -> None:
        """Keep the state in host memory until `step` or `state` needs it. No number changes."""
        self._away.leave(self._state().values())

    def _state(self) -> dict[str, Tensor]:
        return {
            f"{self._names[id(p)]}.{key}": value
            for optimizer in self._all
            for p, values in optimizer.state.items()
            for key, value in values.items()
        }

    def _create_state(self) -> None:
        """Create at once the state that torch creates at the first step, so that every checkpoint has all of it."""
        for optimizer in self._all:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if isinstance(optimizer, torch.optim.AdamW):
                    zeros = (torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(2))
                    step = torch.zeros((), dtype=torch.float32, device=p.device)
                    optimizer.state[p] = dict(zip(("step", "exp_avg", "exp_avg_sq"), (step, *zeros), strict=True))
                else:
                    optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p)}


def lr_factor(step: int, options: OptimizerOptions, total_steps: int) -> float:
    """Return the factor of options.lr at optimizer step `step` (from 0): linear warm-up, then the schedule, which ends
    at 0 after `total_steps`. The warm-up's first step already has 1 / warmup_steps, so no step is wasted."""
    warm = min(1.0, (step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
    if options.schedule == "constant":
        return warm
    start = options.warmup_steps if options.schedule == "linear" else max(options.warmup_steps, total_steps // 2)
    left = (total_steps - step) / max(1, total_steps - start)
    return min(warm, max(0.0, min(1.0, left)))


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the global 2-norm of all gradients, over all ranks, as a scalar on the device."""
    total: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], 2.0)
    norm: Tensor = total.full_tensor() if is_sharded(total) else total
    return norm


def clip_gradients(parameters: list[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale gradients with global 2-norm `norm` so that it is at most max_norm."""
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], max_norm / (norm + 1e-6))
