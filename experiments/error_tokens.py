"""Bursts of unlikely tokens in bad responses: what each objective makes of them.

    python -m experiments.error_tokens [--target DIR]

Owns `experiments/results/error_tokens.{json,md}`. Low-bit rollouts of long responses end in garbled tokens, mostly in
responses without reward (QaRL, section 3.2, Figures 4 and 5). Here they are put there: the demo's warm start samples
a few RL steps' responses, and in a share of those with a negative advantage some consecutive tokens are replaced by
tokens drawn uniformly. Every objective then learns from the same responses in 8 mini-batches per step (the paper's
number), from the same weights. A token's *weight* is what its gradient is multiplied by beyond its advantage: PPO's
ratio, unless it is clipped. The sampler's log-probs are the learner's own: no mismatch but the bursts.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from actors.training import trainer as learner
from actors.training.trainer import Trainer
from benchmarks.harness import ROOT, command, machine, markdown, write
from benchmarks.tools.rollouts import engine_options
from benchmarks.tools.targets import find_warm_start, load_target
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence
from experiments.demo_learner import DemoLearner
from policies.objectives import LossInputs, TokenLosses, token_losses

BURST_TOKENS = 8
OBJECTIVES = {
    "grpo, clip_dual null": ObjectiveOptions(clip_dual=None),
    "grpo": ObjectiveOptions(),
    "gspo": ObjectiveOptions(name="gspo", clip_low=3e-3, clip_high=4e-3),
    "tbpo": ObjectiveOptions(name="tbpo", clip_high=4e-3, band_low=3e-3, band_high=7e-3),
}  # bounds of sequences: ten times the defaults, as for the demo (docs/learning.md)


def with_bursts(sequences: Sequence[TrainSequence], share: float, vocab_size: int, seed: int) -> list[TrainSequence]:
    """In `share` of the responses with a negative advantage, BURST_TOKENS consecutive tokens drawn uniformly."""
    rng, changed = np.random.default_rng(seed), []
    for sequence in sequences:
        drawn, at = rng.random(), rng.integers(0, max(1, len(sequence.response_tokens) - BURST_TOKENS))
        garbled = rng.integers(0, vocab_size, BURST_TOKENS)
        if np.mean(sequence.advantage) < 0 and drawn < share and len(sequence.response_tokens) > BURST_TOKENS:
            tokens = sequence.response_tokens.copy()
            tokens[at : at + BURST_TOKENS] = garbled
            sequence = replace(sequence, response_tokens=tokens)
        changed.append(sequence)
    return changed


@contextmanager
def weighed() -> Iterator[list[float]]:
    """The largest weight of a token in each micro-batch that is learned from meanwhile."""
    found: list[float] = []

    def watched(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
        losses = token_losses(inputs, options)
        (gradient,) = torch.autograd.grad(losses.loss.sum(), inputs.logprobs, retain_graph=True)
        learns = inputs.advantages != 0
        found.append(float((gradient[learns] / inputs.advantages[learns]).abs().max()))
        return losses

    with patch.object(learner, "token_losses", watched):
        yield found


def learn(
    directory: Path, objective: ObjectiveOptions, batches: Sequence[Sequence[TrainSequence]], lr: float, mini: int
) -> dict[str, Any]:
    """What an objective makes of the batches, one RL step each."""
    trainer = Trainer(ModelOptions(path=str(directory)), LearnerOptions(mini_batches=mini, threads=1), objective)
    trainer.begin(OptimizerOptions(lr=lr), mini * len(batches))
    steps = []
    for batch in batches:
        own = iter(torch.cat(list(trainer.logprobs([s], temperature=1.0))).numpy() for s in batch)
        exact = [replace(s, sampler_logprobs=lp, sampler_logprobs_t1=None) for s, lp in zip(batch, own, strict=True)]
        with weighed() as weights:
            result = trainer.rl_step(exact, temperature=1.0)
        names = [name for name in result.metrics if name.startswith(("ratio/", "clip_fraction", "kl_old"))]
        steps.append(
            {
                **{name: float(f"{result.metrics[name]:.4g}") for name in names},
                "largest_weight": float(f"{max(weights):.5g}"),
                "largest_grad_norm": float(f"{max(result.grad_norms):.4g}"),
            }
        )
    return {"steps": steps}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; the worst of all RL steps."""
    head = (
        "bursts in bad responses | objective | largest token ratio | a response's ratio | largest weight of a token | "
        "largest gradient norm | tokens without gradient | KL(old, new)"
    )
    lines = []
    for row in rows:
        steps = row["steps"]
        low, high = min(s["ratio/sequence_min"] for s in steps), max(s["ratio/sequence_max"] for s in steps)
        lines.append(
            f"{row['share']:.0%} | {row['objective']} | {max(s['ratio/token_max'] for s in steps):,.4g} | "
            f"{low:.3g} to {high:.3g} | {max(s['largest_weight'] for s in steps):.4g} | "
            f"{max(s['largest_grad_norm'] for s in steps):.3g} | "
            f"{np.mean([s['clip_fraction'] for s in steps]):.1%} | {max(s['kl_old'] for s in steps):.2g}"
        )
    return markdown(head, lines)


def main(
    target: Annotated[Path | None, "the demo's warm start; default: the newest in runs/"] = None,
    shares: Sequence[float] = (0.0, 0.25),
    steps: int = 3,
    prompts: int = 16,
    lr: float = 3e-4,
    mini_batches: int = 8,
    out: Path = ROOT / "experiments/results/error_tokens.json",
) -> None:
    torch.set_num_threads(1)
    directory = find_warm_start(target)
    model = load_target(directory, "demo", "float32")
    demo = DemoLearner(model, directory, steps)
    asked = [demo.next_batch(prompts) for _ in range(steps)]
    engine = NativeEngine(model.model, engine_options(len(asked[0])))
    clean = [demo.sequences(batch, engine.generate(batch.requests)) for batch in asked]
    rows = []
    for share in shares:
        batches = [with_bursts(batch, share, model.model.config.vocab_size, i) for i, batch in enumerate(clean)]
        for name, objective in OBJECTIVES.items():
            found = learn(directory, objective, batches, lr, mini_batches)
            rows.append({"share": share, "objective": name, **found})
    settings = {"steps": steps, "prompts": prompts, "lr": lr, "mini_batches": mini_batches, "burst": BURST_TOKENS}
    write(out, "bursts of unlikely tokens in bad responses", {"rows": rows}, settings=settings)
    text = (
        "# Bursts of unlikely tokens in bad responses\n\n"
        f"The demo's warm start, {steps} RL steps of {len(asked[0])} responses in {mini_batches} mini-batches at lr "
        f"{lr:g}; a burst is {BURST_TOKENS} tokens drawn uniformly. The worst of all steps, except tokens without "
        "gradient: their mean. Written by `python -m experiments.error_tokens`.\n\n"
        f"{table(rows)}\n\n{machine()['cpu']}, torch {machine()['versions']['torch']}.\n"
    )
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    command(main, timed=False)
