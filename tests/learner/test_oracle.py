"""A dumb learner: one sequence at a time, float64, the formulas as they are printed. The fast one must do the same to
the weights."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.training.batches import split_mini_batches
from config.learner import OptimizerOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence
from models.checkpoint import init_model
from models.packed import PackedContext
from models.transformer import Transformer
from tests.learner.tiny import make_sequences, make_trainer

# A large eps keeps Adam smooth in the gradient: with a tiny one, its first steps are the sign of rounding noise.
OPTIMIZER = OptimizerOptions(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)


def logprobs(model: Transformer, s: TrainSequence, temperature: float) -> torch.Tensor:
    tokens = torch.tensor([*s.prompt_tokens, *s.response_tokens])
    logits = model.logits(model(tokens, PackedContext.from_lengths([len(tokens)]))).double() / temperature
    rows = torch.arange(len(s.prompt_tokens) - 1, len(tokens) - 1)
    return torch.log_softmax(logits, -1)[rows, tokens[rows + 1]]


def dumb_steps(
    model_dir: Path,
    steps: list[list[TrainSequence]],
    objective: ObjectiveOptions,
    mini_batches: int,
    temperature: float,
    asked: int = 0,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, reference = init_model(model_dir, 5), init_model(model_dir, 5)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    losses: list[Any] = []
    for step in steps:
        old = [logprobs(model, s, temperature).detach() for s in step]
        for part in split_mini_batches(len(step), mini_batches):
            total = torch.zeros((), dtype=torch.float64)
            norm = 0.0
            for i in part:
                s = step[i]
                new = logprobs(model, s, temperature)
                ref = logprobs(reference, s, temperature).detach()
                for t in range(len(new)):
                    ratio = torch.exp(new[t] - old[i][t])
                    clipped = torch.clamp(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
                    x = -torch.minimum(ratio * s.advantage, clipped * s.advantage)
                    if objective.clip_dual is not None and s.advantage < 0:
                        x = torch.minimum(x, -objective.clip_dual * torch.tensor(s.advantage))
                    if objective.kl == "k3":
                        x = x + objective.kl_coef * (torch.exp(ref[t] - new[t]) - 1 - (ref[t] - new[t]))
                    each = s.weight / len(new) if objective.aggregation == "seq_mean_token_mean" else s.weight
                    total = total + each / (objective.sum_divisor or 1) * x
                norm += s.weight * (len(new) if objective.aggregation == "token_mean" else 1)
            if objective.aggregation == "fixed_mean_token_sum_norm":
                norm = asked / mini_batches
            loss = total / norm
            adam.zero_grad()
            loss.backward()
            size = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters() if p.grad is not None))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad *= min(1.0, OPTIMIZER.max_grad_norm / size)
            for group in adam.param_groups:
                group["lr"] = OPTIMIZER.lr * min(1.0, (len(losses) + 1) / OPTIMIZER.warmup_steps)
            adam.step()
            losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("objective", "mini_batches", "temperature"),
    [
        (ObjectiveOptions(), 1, 1.0),
        (ObjectiveOptions(clip_low=0.02, clip_high=0.03), 3, 1.0),
        (ObjectiveOptions(clip_low=0.02, clip_high=0.03, kl="k3", kl_coef=0.3), 2, 0.7),
        (ObjectiveOptions(aggregation="seq_mean_token_mean"), 2, 1.3),
        (ObjectiveOptions(aggregation="seq_mean_token_sum_norm", sum_divisor=20), 2, 1.0),
        (ObjectiveOptions(clip_low=0.02, clip_high=0.03, clip_dual=1.05), 3, 1.0),
        (ObjectiveOptions(name="duet", sum_divisor=20, kl="k3", kl_coef=0.3), 3, 0.7),
    ],
)
def test_losses_and_weights_equal_the_dumb_learner(
    model_dir: Path, objective: ObjectiveOptions, mini_batches: int, temperature: float
) -> None:
    steps = [[replace(s, weight=1.0 + i) for i, s in enumerate(make_sequences(7, seed=k))] for k in range(2)]
    losses, weights = dumb_steps(model_dir, steps, objective, mini_batches, temperature, asked=11)
    trainer = make_trainer(
        model_dir, objective=objective, optimizer=OPTIMIZER, mini_batches=mini_batches, micro_batch_tokens=50
    )
    got = [loss for step in steps for loss in trainer.rl_step(step, temperature=temperature, asked=11).losses]
    assert got == pytest.approx(losses, rel=1e-4, abs=1e-6)
    for name, p in trainer.network.named_parameters():
        torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
