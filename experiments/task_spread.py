"""What there is for a token budget to win in a task: how its prompts differ before RL.

    python -m experiments.task_spread --models RUN/warm_starts/A RUN/warm_starts/B [--configs ONE.yaml OTHER.yaml]

Owns `experiments/results/task_spread.{json,md}`. Every training prompt gets 64 responses of the warm start (one model
per configuration, in that order). Its success, its spread s (standard deviation of one response's reward) and its
length L (mean tokens of a response) say what other counts than equal ones could save: in a batch, equal counts have a
variance of sum s^2 / n for n * sum L tokens, and no counts of that cost have less than (sum s sqrt L)^2 / (n * sum L)
(Cauchy and Schwarz; DUET, equation 4). `bound` is the share of the variance between the two; `saved` is what
policies.token_budget saves of it with whole responses of at least 2, if it knew s and L exactly. Late responses: those
longer than the quantile of all responses at which DUET gives up by default; what they cost beyond it and what they
earn says what giving them up could save and lose.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.data import Prompt
from actors.data.order import PromptOrder
from actors.engine.native.engine import NativeEngine
from actors.rewards.grader import build
from benchmarks.harness import DEMO, ROOT, command, machine, markdown, write
from benchmarks.tools.rollouts import engine_options
from config.token_budget import AbortOptions, BudgetOptions
from contracts.rewards import GradeItem
from contracts.rollout import Rollout
from launch.batch import Batch, Pick, sampling_params
from launch.config import Config, load_config
from launch.run.inputs import load_inputs
from models.checkpoint import load_model
from policies.token_budget.allocation import allocate, bound, variance

TASKS = (DEMO / "config.yaml", ROOT / "examples/long_guess_and_check/config.yaml")
HOPELESS, ALWAYS = 0.02, 0.98  # success below and above which a prompt counts as one of these
QUANTILES = (0.2, 0.5, 0.8, 0.9, 0.95, 1.0)
DECODED_TOGETHER = 256

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of every prompt and response: [prompts, samples]."""

    rewards: Floats
    tokens: Floats
    boxed: NDArray[np.bool_]  # it holds a box; it may be the wrong one


@dataclass(frozen=True, slots=True)
class Response:
    """One response of a model, graded."""

    prompt: Prompt
    place: tuple[int, int]  # index of its prompt, and among the prompt's responses
    rollout: Rollout
    text: str
    reward: float


def responses(config: Config, model: Path, samples: int, *, held_out: bool = False) -> list[Response]:
    """To all training (or held-out) prompts, as RL would sample and grade them; as many to each."""
    inputs, grader = load_inputs(config), build(config.reward)
    sets = [held.prompts for held in inputs.held_out] if held_out else [inputs.prompts]
    if len(sets) != 1:
        raise SystemExit(f"{config.run.name}: data.eval is needed for held-out prompts")
    (prompts,) = sets
    picks = [Pick(-2, prompt) for prompt in prompts]  # noise that RL never meets
    sampling = sampling_params(config.rollout.sampling, inputs.stop_tokens)
    expected = [float(sampling.max_new_tokens)] * len(picks)
    batch = Batch(picks, [samples] * len(picks), sampling, seed=config.run.seed, expected_tokens=expected)
    engine = NativeEngine(load_model(model, batch_invariant=False), engine_options(DECODED_TOGETHER))
    found = []
    for number, rollout in engine.generate(batch.requests).items():
        text = inputs.tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        prompt = batch.prompt(number)
        item = GradeItem(
            prompt=prompt.text,
            response=text,
            record=prompt.record,
            finish_reason=rollout.finish_reason,
            tokens=rollout.tokens,
        )
        found.append(Response(prompt, batch.place(number), rollout, text, grader.grade(item).value))
    grader.close()
    return found


def sample(config: Config, model: Path, samples: int, *, held_out: bool = False) -> Sampled:
    """Of the model's responses to all training (or held-out) prompts."""
    found = responses(config, model, samples, held_out=held_out)
    rewards, tokens, boxed = (np.zeros((len(found) // samples, samples)) for _ in range(3))
    for one in found:
        rewards[one.place], tokens[one.place] = one.reward, len(one.rollout.tokens)
        boxed[one.place] = "\\boxed{" in one.text
    return Sampled(rewards, tokens, boxed.astype(np.bool_))


def batches(prompts: int, size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Prompts of the RL steps of some epochs."""
    order = PromptOrder(prompts, seed, True)
    for _ in range(epochs * prompts // size):
        yield [index for _, index in order.take(size)]


def room(found: Sampled, config: Config, epochs: int) -> dict[str, Any]:
    """Means over an RL step's batches: the bound, and what whole counts save at the full budget and at half of it."""
    spread, length = found.rewards.std(axis=1, ddof=1), found.tokens.mean(axis=1)
    size, each = config.rollout.prompts_per_step, config.rollout.rollouts_per_prompt
    bounds, saved = [], {1.0: list[float](), 0.5: list[float]()}
    for indices in batches(len(spread), size, epochs, config.run.seed):
        s, tokens = spread[indices], length[indices]
        bounds.append(bound(s, tokens))
        for share, values in saved.items():
            equal = share * each
            counts = allocate(
                s, tokens, equal * float(tokens.sum()), least=BudgetOptions().min_rollouts, most=4 * each
            ).counts
            values.append(1 - variance(s, counts) / variance(s, np.full(size, equal)))
    return {
        "bound": round(fmean(bounds), 4),
        "bound_min": round(min(bounds), 4),
        "bound_max": round(max(bounds), 4),
        "saved": {str(share): round(fmean(values), 4) for share, values in saved.items()},
    }


def late(found: Sampled) -> dict[str, float]:
    """Responses beyond the default abort_quantile and its grace, if all others stay as they are."""
    options = AbortOptions()
    threshold = float(np.quantile(found.tokens, options.abort_quantile)) + options.grace_tokens
    beyond = found.tokens > threshold
    return {
        "threshold_tokens": round(threshold, 1),
        "responses": round(float(beyond.mean()), 4),
        "tokens_beyond": round(float((found.tokens - threshold)[beyond].sum() / found.tokens.sum()), 4),
        "their_reward": round(float(found.rewards[beyond].mean()), 4) if beyond.any() else 0.0,
        "share_of_reward": round(float(found.rewards[beyond].sum() / max(found.rewards.sum(), 1e-9)), 4),
    }


def summarise(found: Sampled, config: Config, epochs: int) -> dict[str, Any]:
    """What the record keeps: rounded, prompts in the order of the file."""
    success, spread = found.rewards.mean(axis=1), found.rewards.std(axis=1, ddof=1)
    limit = config.rollout.sampling.max_new_tokens
    hopeless, always = success < HOPELESS, success > ALWAYS
    return {
        "prompts": len(success),
        "reward": round(float(success.mean()), 4),
        "hopeless": round(float(hopeless.mean()), 4),
        "always": round(float(always.mean()), 4),
        "tokens_mean": round(float(found.tokens.mean()), 1),
        "tokens_quantiles": {str(q): float(np.quantile(found.tokens, q)) for q in QUANTILES},
        "at_limit": round(float((found.tokens >= limit).mean()), 4),
        "without_box": round(float(1 - found.boxed.mean()), 4),
        "tokens_on_hopeless": round(float(found.tokens[hopeless].sum() / found.tokens.sum()), 4),
        "tokens_on_always": round(float(found.tokens[always].sum() / found.tokens.sum()), 4),
        "spread_mean": round(float(spread.mean()), 4),
        "late": late(found),
        **room(found, config, epochs),
        "per_prompt": {
            "success": np.round(success, 4).tolist(),
            "spread": np.round(spread, 4).tolist(),
            "tokens": np.round(found.tokens.mean(axis=1), 1).tolist(),
        },
    }


def tables(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown: a column per task."""
    names = list(rows)

    def line(label: str, *path: str, form: str = ".1%") -> list[str]:
        cells = []
        for name in names:
            value: Any = rows[name]
            for key in path:
                value = value[key]
            cells.append(format(value, form))
        return [label, *cells]

    return markdown(
        ["", *names],
        [
            line("mean reward", "reward", form=".3f"),
            line(f"prompts solved in less than {HOPELESS:.0%}", "hopeless"),
            line(f"prompts solved in more than {ALWAYS:.0%}", "always"),
            line("tokens of a response, mean", "tokens_mean", form=".0f"),
            *(line(f"quantile {q:g}", "tokens_quantiles", str(q), form=".0f") for q in QUANTILES),
            line("responses at the limit", "at_limit"),
            line("responses without a box", "without_box"),
            line("tokens spent on prompts that are hardly ever solved", "tokens_on_hopeless"),
            line("on prompts that always are", "tokens_on_always"),
            line("spread s, mean over prompts", "spread_mean", form=".3f"),
            line("late: beyond quantile 0.8 and grace, tokens", "late", "threshold_tokens", form=".0f"),
            line("responses that are late", "late", "responses"),
            line("tokens beyond it", "late", "tokens_beyond"),
            line("mean reward of late responses", "late", "their_reward", form=".3f"),
            line("share of all reward that is theirs", "late", "share_of_reward"),
            line("variance that other counts save at most (bound)", "bound"),
            line("least of the batches", "bound_min"),
            line("largest", "bound_max"),
            line("saved by whole counts, full budget", "saved", "1.0"),
            line("half of it", "saved", "0.5"),
        ],
    )


def main(
    *,
    models: Annotated[Sequence[Path], "a warm start for each configuration"],
    configs: Sequence[Path] = TASKS,
    samples: int = 64,
    epochs: int = 20,
    out: Path = ROOT / "experiments/results/task_spread.json",
) -> None:
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    for path, model in zip(configs, models, strict=True):
        config = load_config(path).config
        rows[config.run.name] = summarise(sample(config, model, samples), config, epochs)
    question = "what is there for a token budget to win in a task, before RL? (DUET, section 3.1)"
    settings = {"samples": samples, "epochs": epochs, "hopeless": HOPELESS, "always": ALWAYS}
    write(out, question, {"tasks": rows}, settings=settings)
    text = (
        "# How the prompts of a task differ before RL\n\n"
        f"{samples} responses of the warm start to every training prompt; batches of an RL step's prompts over "
        f"{epochs} epochs. Bound and savings are of the variance of equal counts at the same cost, with spreads and "
        "lengths known exactly. Written by `python -m experiments.task_spread`.\n\n"
        f"{tables(rows)}\n\n{machine()['cpu']}, torch {machine()['versions']['torch']}.\n"
    )
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    command(main, timed=False)
