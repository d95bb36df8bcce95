"""What a response really adds to the variance of the gradient, and what counts by cheaper estimates of it are worth.

    python -m experiments.gradient_spread --models RUN/warm_starts/A RUN/warm_starts/B

Owns `experiments/results/gradient_spread.{json,md}`. Every training prompt of the example gets responses of its warm
start; each response's gradient under objective `duet` is computed by the learner alone, and its squared norm is what
the response adds. Then the RL steps' batches get counts by policies.token_budget.allocation from several spreads, all
of them exact (means over all responses), at the same cost, and each is judged by the gradients: variance relative to
equal counts. `bound` is what no counts can go below (Cauchy and Schwarz). `online`: spreads as a run has them, by what
its own responses said in the epochs before, with a policy that stands still; at half of the usual budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from actors.training.trainer import Trainer
from benchmarks.harness import ROOT, command, machine, markdown, write
from contracts.training import TrainSequence
from experiments.task_spread import TASKS, batches, responses
from launch.config import Config, load_config
from policies.token_budget.allocation import allocate, bound, variance
from policies.token_budget.spread import SpreadModel, squares, visit_variance

Floats = NDArray[np.float64]
OVERRIDES = ("objective.name=duet", "learner.mini_batches=1", "learner.threads=1")
NO_STEP = 1e-12  # learning rate: the weights stay
EPOCHS = 8


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of every prompt and response: [prompts, samples]."""

    rewards: Floats
    tokens: Floats
    advantages: Floats  # leave-one-out over all samples
    norms: Floats  # of the gradient, 0 where the advantage is


def gradients(config: Config, model: Path, samples: int) -> Gradients:
    """Responses as RL would sample and grade them, each learned from alone."""
    found = responses(config, model, samples)
    rewards, tokens, norms = (np.zeros((len(found) // samples, samples)) for _ in range(3))
    for one in found:
        rewards[one.place], tokens[one.place] = one.reward, len(one.rollout.tokens)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) * samples / (samples - 1)
    options = config.model.model_copy(update={"path": str(model)})
    trainer = Trainer(options, config.learner, config.objective, seed=config.run.seed)
    trainer.begin(config.learner.optimizer.model_copy(update={"lr": NO_STEP}), len(found))
    for one in found:
        if advantages[one.place]:
            alone = TrainSequence(
                prompt_tokens=one.prompt.tokens,
                response_tokens=one.rollout.tokens,
                sampler_logprobs=one.rollout.logprobs,
                sampler_logprobs_t1=one.rollout.logprobs_t1,
                advantage=float(advantages[one.place]),
            )
            step = trainer.rl_step([alone], temperature=config.rollout.sampling.temperature, asked=1)
            norms[one.place] = step.grad_norms[0]
    return Gradients(rewards, tokens, advantages, norms)


def judged(found: Gradients, config: Config) -> dict[str, dict[str, float]]:
    """By share of the usual budget: the variance by counts of each spread, relative to equal counts of its cost."""
    length, real = found.tokens.mean(axis=1), np.sqrt((found.norms**2).mean(axis=1))
    spreads = {
        "rewards (the paper's)": found.rewards.std(axis=1, ddof=1),
        "advantage^2 x tokens (ours)": np.sqrt((found.advantages**2 * found.tokens).mean(axis=1)),
        "the gradients": real,
    }
    size, usual = config.rollout.prompts_per_step, config.rollout.rollouts_per_prompt
    judged: dict[str, dict[str, float]] = {}
    for share in (1.0, 0.5):
        values: dict[str, list[float]] = {name: [] for name in (*spreads, "bound")}
        for indices in batches(len(real), size, EPOCHS, config.run.seed):
            tokens, truth = length[indices], real[indices]
            budget = share * usual * float(tokens.sum())
            for name, spread in spreads.items():
                counts = allocate(spread[indices], tokens, budget, least=2, most=4 * usual).counts
                equal = np.full(size, float((counts * tokens).sum() / tokens.sum()))
                values[name].append(variance(truth, counts) / variance(truth, equal))
            values["bound"].append(1 - bound(truth, tokens))
        judged[str(share)] = {name: round(fmean(each), 4) for name, each in values.items()}
    return judged


def online(found: Gradients, config: Config, worlds: int = 12) -> list[float]:
    """Of the epochs behind the first: the variance by counts of estimates, relative to equal counts of their cost."""
    length, real = found.tokens.mean(axis=1), np.sqrt((found.norms**2).mean(axis=1))
    prompts, samples = found.tokens.shape
    size, usual = config.rollout.prompts_per_step, config.rollout.rollouts_per_prompt
    rng, values = np.random.default_rng(0), [list[float]() for _ in range(4)]
    for _ in range(worlds):
        model = SpreadModel()
        for epoch in values:
            for indices in np.array_split(rng.permutation(prompts), prompts // size):
                tokens = length[indices]
                spread = np.array([model.spread(int(i)) for i in indices]) * np.sqrt(tokens)
                counts = allocate(spread, tokens, usual / 2 * float(tokens.sum()), least=2, most=4 * usual).counts
                equal = np.full(len(indices), float((counts * tokens).sum() / tokens.sum()))
                epoch.append(variance(real[indices], counts) / variance(real[indices], equal))
                for i, count in zip(indices.tolist(), counts.tolist(), strict=True):
                    drawn = rng.choice(samples, min(count, samples), replace=False)
                    own = found.tokens[i, drawn]
                    square = visit_variance(squares(found.rewards[i, drawn].tolist(), own / own.mean()))
                    model.observe(i, square, len(drawn))
    return [round(fmean(epoch), 4) for epoch in values[1:]]


def scores(found: Gradients) -> dict[str, Any]:
    """How the mean square of a score goes with the length of its response."""
    taught = found.norms > 0
    tokens, score = found.tokens[taught], (found.norms / np.where(taught, found.advantages, 1.0))[taught] ** 2
    edges = np.quantile(tokens, [0.0, 0.25, 0.5, 0.75, 1.0])
    parts = [(tokens >= low) & (tokens <= high) for low, high in pairwise(edges)]
    mean = float(score.mean())
    return {
        "responses": int(taught.sum()),
        "quarters_by_length": [
            {
                "tokens": round(float(tokens[part].mean()), 1),
                "score": round(float(score[part].mean() / mean), 3),
                "score_per_token": round(float((score[part] / tokens[part]).mean() / (score / tokens).mean()), 3),
            }
            for part in parts
        ],
    }


def page(record: dict[str, Any]) -> str:
    parts = [
        "# What a response adds to the gradient's variance",
        "At the warm start, by the gradient of each response alone (`python -m experiments.gradient_spread`).\n"
        "Variance of a step's gradient relative to equal counts of the same cost, with spreads known exactly:",
    ]
    for task, result in record.items():
        judged, found = result["judged"], result["scores"]
        rows = [(name, *(f"{judged[share][name]:.3f}" for share in judged)) for name in judged["1.0"]]
        quarters = [(q["tokens"], q["score"], q["score_per_token"]) for q in found["quarters_by_length"]]
        parts += [
            f"## {task}",
            markdown(("counts by", "full budget", "half budget"), rows),
            "With spreads estimated online, half budget, second to fourth epoch: "
            + ", ".join(f"{value:.3f}" for value in result["online"])
            + ".",
            f"Squared scores by quarters of the lengths of {found['responses']} responses with an advantage:",
            markdown(("mean tokens", "squared score, mean 1", "per token, mean 1"), quarters),
        ]
    return "\n\n".join([*parts, str(machine()["cpu"])]) + "\n"


def main(
    *,
    models: Annotated[Sequence[Path], "a warm start of each task"],
    samples: Annotated[int, "responses to each prompt"] = 16,
    out: Path = ROOT / "experiments/results/gradient_spread.json",
) -> None:
    record: dict[str, Any] = {}
    for path, model in zip(TASKS, models, strict=True):
        config = load_config(path, list(OVERRIDES)).config
        found = gradients(config, model.resolve(), samples)
        record[path.parent.name] = {
            "judged": judged(found, config),
            "online": online(found, config),
            "scores": scores(found),
        }
    write(
        out, "what a response adds to the gradient's variance", record, settings={"samples": samples, "epochs": EPOCHS}
    )
    out.with_suffix(".md").write_text(page(record), encoding="utf-8")
    print(page(record))


if __name__ == "__main__":
    command(main, timed=False)
