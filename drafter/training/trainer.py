"""The drafter's trainer: micro-steps, state to resume from, weights to publish. No processes, no files, no data order.

With several members, each makes the same update: only the inputs of `reduce` differ between them. On the CPU the same
calls in the same order give bitwise the same losses; after initialisation nothing here is random.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from config.drafter import DrafterOptions
from contracts.records import SequenceRecord
from drafter.eagle.model import Drafting, copy_of, init_eagle
from drafter.training.head import TargetHead
from drafter.training.losses import Objective, objective_of
from drafter.training.packing import pack_records
from drafter.training.variants import VARIANTS
from models.manifest import WeightsManifest
from models.weights import Buffer, pack, unpack

Reduce = Callable[[Tensor], None]
_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class MicroStepResult:
    """The result for this member's own records, before the update. Means are NaN if nothing was supervised."""

    loss: float
    accuracy: float  # share of rows whose most probable token is the target's draw
    top3_accuracy: float
    positions: int  # supervised rows
    updated: bool  # False: no member had a supervised row, or the gradient was not finite


class DrafterTrainer:
    """Trains one drafter for one target, whose present version is `head`; see `set_head`.

    Weights, gradients and optimizer are float32. The weights come from `model`, else they are fresh, from `seed`
    (default: options.seed). Raises ValueError if `model` is not what `options.algorithm` trains.
    """

    def __init__(
        self,
        head: TargetHead,
        options: DrafterOptions,
        *,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        model: Drafting | None = None,
    ) -> None:
        self.options, self.head = options, head
        self.variant = replace(VARIANTS[options.algorithm], loss=options.loss)
        self.device = torch.device(device)
        self.steps = 0  # updates of this drafter since its first, within its lineage
        self.rate_scale = 1.0  # factor on the learning rate; the caller sets a schedule
        self.model = self._network(seed, model)
        self._parameters = dict(self.model.named_parameters())
        # One buffer holds all gradients and the weight of their sum, so that members need one collective.
        self._sums = torch.zeros(sum(p.numel() for p in self._parameters.values()) + 1, device=self.device)
        offset = 0
        for parameter in self._parameters.values():
            parameter.grad = self._sums[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        matrices = [p for p in self._parameters.values() if p.dim() >= 2]
        others = [p for p in self._parameters.values() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=options.learning_rate, betas=options.betas, eps=_EPS
        )
        self._counters = torch.zeros(2, dtype=torch.int64)  # on the host: steps; steps of the warm-up done
        self._create_moments()

    def set_head(self, head: TargetHead) -> None:
        """Set the target's next version: from now on only its records give soft targets. Raises ValueError for another
        network's."""
        if head.config != self.head.config:
            raise ValueError("the head is another network's: its config differs from that of the drafter's target")
        self.head = head

    def micro_step(self, records: Sequence[SequenceRecord], *, reduce: Reduce | None = None) -> MicroStepResult:
        """Make one update from all records of at least three rows, packed.

        `reduce` sums a float32 tensor over the members in place. Each member calls it once, even without usable
        records. If it raises, nothing has changed. Raises ValueError for records that do not fit.
        """
        self._sums.zero_()
        objective = self._objective(records)
        if objective is not None:
            objective.loss.backward()  # type: ignore[no-untyped-call]
            self._sums[-1].fill_(objective.weight)  # an assignment would be a copy that waits
        if reduce is not None:
            reduce(self._sums)
        gradients, weight = self._sums[:-1], self._sums[-1]
        gradients /= weight
        numbers = _numbers(objective, weight, torch.linalg.vector_norm(gradients))  # the only wait for the device
        return _result(objective, numbers, self._update(*numbers[:2]))

    @torch.no_grad()
    def evaluate(self, records: Sequence[SequenceRecord]) -> MicroStepResult:
        """Return what `micro_step` would return, without the update."""
        objective = self._objective(records)
        return _result(objective, [] if objective is None else _numbers(objective), updated=False)

    # State.

    def state_dict(self) -> dict[str, Tensor]:
        """Return live tensors by name: the trainable parameters, the optimizer's moments and the counters. Besides the
        records and the head, the next losses depend only on these. Frozen tensors are not included."""
        state = {f"model.{name}": parameter.detach() for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            state |= {f"optimizer.{name}.{key}": value for key, value in self._optimizer.state[parameter].items()}
        return state | {"counters": self._counters}

    def load_state_dict(self, state: Mapping[str, Tensor], *, non_blocking: bool = False) -> None:
        """Restore a `state_dict` exactly. `non_blocking`: copy from or into pinned memory without waiting for the
        device; the caller waits. Raises ValueError, before anything changed, for another drafter's."""
        own = self.state_dict()
        _check("checkpoint", own, state)
        for name, tensor in own.items():
            tensor.copy_(state[name], non_blocking=non_blocking)
        self.steps = int(self._counters[0])

    def export(self, dtype: torch.dtype | None = None) -> tuple[WeightsManifest, Buffer]:
        """Return the weights for engines and other members, under the network's names. Their version is the number of
        updates. In `dtype`, else in the target's."""
        dtype = dtype or self.head.embedding.dtype
        return pack({name: p.detach().to(dtype) for name, p in self._parameters.items()}, self.steps)

    def load(self, manifest: WeightsManifest, buffer: Buffer) -> None:
        """Load exported weights that others trained, or after a roll-back. The optimizer starts anew, with its warm-up,
        since its moments belong to other weights.

        Raises WeightsCorruptError or ValueError before anything changed."""
        tensors = dict(unpack(manifest, buffer))
        own = {name: parameter.detach() for name, parameter in self._parameters.items()}
        _check(f"drafter weights version {manifest.version}", own, tensors)
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        for moments in self._optimizer.state.values():
            for moment in moments.values():
                moment.zero_()
        self._counters[1] = 0
        self.renumber(manifest.version)

    def renumber(self, version: int) -> None:
        """Continue counting from `version`: restored weights have a new one (`policies.drafter.lineage`)."""
        self.steps = version
        self._counters[0] = version

    # Helpers.

    def _network(self, seed: int | None, model: Drafting | None) -> Drafting:
        options, head, kind = self.options, self.head, self.variant.network
        if model is None:
            return init_eagle(
                head.config,
                options.seed if seed is None else seed,
                kind,
                options.layers,
                dtype=torch.float32,
                device=self.device,
                batch_invariant=False,
            )
        if model.kind != kind or (options.layers and model.layers and model.layers != options.layers):
            raise ValueError(
                f"drafter.algorithm={options.algorithm} trains {kind}{options.layers or ''}, the given weights are "
                f"{model.kind}{model.layers or ''}"
            )
        return copy_of(model, dtype=torch.float32, device=self.device, batch_invariant=False)

    def _objective(self, records: Sequence[SequenceRecord]) -> Objective | None:
        batch = pack_records(records, self.head.version, self.device)
        if batch is None:
            return None
        half = self.device.type == "cuda" and self.head.embedding.dtype is torch.bfloat16
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return objective_of(self.model, self.head, batch, self.variant)

    def _update(self, weight: float, norm: float) -> bool:
        """Apply the mean of gradients with this norm, summed with this weight; the same on every member."""
        if not (weight > 0 and math.isfinite(norm)):
            return False
        if norm > self.options.max_grad_norm:
            self._sums[:-1] *= self.options.max_grad_norm / norm
        warm = min(1.0, (self._counters.tolist()[1] + 1) / max(self.options.warmup_steps, 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.learning_rate * warm * self.rate_scale
        self._optimizer.step()
        self._counters += 1
        self.steps = self._counters.tolist()[0]
        return True

    def _create_moments(self) -> None:
        """Create now what torch creates at the first step, so that every checkpoint has it."""
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _numbers(objective: Objective | None, *more: Tensor) -> list[float]:
    """Return `more` and the objective's values on the host, fetched together."""
    found = [] if objective is None else [objective.loss.detach(), objective.correct, objective.among_top3]
    numbers: list[float] = torch.stack([x.double() for x in (*more, *found)]).tolist()
    return numbers


def _result(objective: Objective | None, numbers: Sequence[float], updated: bool) -> MicroStepResult:
    if objective is None:
        return MicroStepResult(math.nan, math.nan, math.nan, 0, updated)
    (loss, correct, among_top3), rows = numbers[-3:], objective.rows
    return MicroStepResult(loss / objective.weight, int(correct) / rows, int(among_top3) / rows, rows, updated)


def _check(what: str, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name in own.keys() | given.keys():
        mine, theirs = (tuple(x[name].shape) if name in x else None for x in (own, given))
        if mine != theirs:
            raise ValueError(
                f"{what}: {name} is {'missing' if theirs is None else list(theirs)}, this drafter has "
                f"{'no such tensor' if mine is None else list(mine)}: drafter.algorithm, drafter.layers or the target "
                "is another"
            )
