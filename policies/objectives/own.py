"""A user's own loss, named by `objective.loss: package.module:function`. Owns the import and the checks of its result:
a mistake is reported here, before it becomes a gradient.

The checks read the values once per micro-batch, which makes the host wait for a GPU. Built-in losses are not checked.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from config.import_path import OwnCodeError, described, imported
from config.objective import ObjectiveOptions
from policies.objectives.types import LossInputs, TokenLosses

KEY = "objective.loss"
PREFIX = "own_loss"  # of its metrics


class OwnLoss:
    """`package.module:function`, called as function(inputs, **loss_arguments). Raises OwnCodeError."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._function = imported(path, KEY)
        self._metrics: frozenset[str] | None = None  # names from the first call

    def __call__(self, inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
        """Call it like a built-in loss. Raises OwnCodeError that names the fault: an error of the function, another
        type, shape or dtype than specified, a loss without gradient, values that are not finite."""
        try:
            returned: object = self._function(inputs, **options.loss_arguments)
        except Exception as error:  # the user's code may raise anything
            raise self._fault(f"raised {described(error)}") from error
        if not isinstance(returned, TokenLosses):
            raise self._fault(f"returned {type(returned).__name__}, not TokenLosses")
        self._check_loss(returned.loss, inputs)
        metrics = self._checked_metrics(returned.metrics, inputs)
        return TokenLosses(returned.loss, metrics)

    def _check_loss(self, loss: object, inputs: LossInputs) -> None:
        like = inputs.logprobs
        if not isinstance(loss, Tensor):
            raise self._fault(f"returned a loss of type {type(loss).__name__}, not a tensor")
        if loss.shape != like.shape:
            raise self._fault(
                f"returned a loss of shape {list(loss.shape)}; it must have one entry per response token, "
                f"{list(like.shape)}: sums and means over tokens are objective.aggregation's"
            )
        if loss.dtype != like.dtype or loss.device != like.device:
            raise self._fault(f"returned a loss in {loss.dtype} on {loss.device}, not {like.dtype} on {like.device}")
        if like.requires_grad and not loss.requires_grad:
            raise self._fault("returned a loss without gradient: it must depend on inputs.logprobs, undetached")
        if not bool(torch.isfinite(loss.detach()).all()):
            where = int(torch.nonzero(~torch.isfinite(loss.detach()))[0, 0])
            raise self._fault(
                f"returned {float(loss.detach()[where])} for token {where} of {loss.numel()} (log-prob "
                f"{float(like.detach()[where]):g}, advantage {float(inputs.advantages[where]):g})"
            )

    def _checked_metrics(self, metrics: object, inputs: LossInputs) -> dict[str, Tensor]:
        """Return the metrics, detached. All ranks add them up in order, so their names must not depend on the data."""
        if not isinstance(metrics, dict):
            raise self._fault(f"returned metrics of type {type(metrics).__name__}, not a dictionary")
        checked = dict[str, Tensor]()
        for name, values in metrics.items():
            if not isinstance(name, str) or not isinstance(values, Tensor) or values.shape != inputs.logprobs.shape:
                shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise self._fault(
                    f"returned a metric {name!r} of {shape}; a metric is a tensor with one entry per response token, "
                    f"{list(inputs.logprobs.shape)}"
                )
            checked[f"{PREFIX}/{name}"] = values.detach()
        names = frozenset(checked)
        if self._metrics is None:
            self._metrics = names
        if names != self._metrics:
            said = ", ".join(sorted(name.removeprefix(f"{PREFIX}/") for name in names ^ self._metrics))
            raise self._fault(f"returned other metrics than in its first call ({said}); their names must be constant")
        return dict(sorted(checked.items()))

    def _fault(self, said: str) -> OwnCodeError:
        return OwnCodeError(f"{KEY}: {self._path} {said}")


@cache
def own_loss(path: str) -> OwnLoss:
    """Return the loss at that path; imported once per process."""
    return OwnLoss(path)


def try_loss(path: str, arguments: dict[str, Any]) -> None:
    """Call it on five tokens of two responses, and on none, since a rank without work passes it nothing. Raises
    OwnCodeError."""
    options = ObjectiveOptions.model_validate({"loss": path, "loss_arguments": arguments})
    loss, logprobs = OwnLoss(path), torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0])
    advantages = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5])
    for size, segments in ((5, [0, 3, 5]), (0, [0])):
        inputs = LossInputs(
            logprobs=logprobs[:size].clone().requires_grad_(),
            old_logprobs=logprobs[:size] - 0.1,
            sampler_logprobs=logprobs[:size] - 0.2,
            advantages=advantages[:size],
            segments=torch.tensor(segments),
        )
        loss(inputs, options)
