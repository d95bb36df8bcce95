"""How well a low-bit copy of the target drafts for it, and what RL does to that: EfficientRollout's Figures 2c, 9, 10
and Table 4 on the demo.

    python -m experiments.self_drafter [--target runs/warm_starts/...] [--steps 24] [--every 2]

Owns `results/self_drafter.json`, `.svg` and `.md`. The demo's target before RL learns by the demo's own RL (prompts,
rewards and learner of its config, in this process). Under the weights that decode an RL step, the step's own requests
are decoded plainly and with a copy in each format that always drafts chains of `--depth` tokens (no toggle, no ladder,
as in the paper's appendix C): measured are the share of first drafts that are accepted, the block efficiency (tokens
per verification, the target's own included) and the policy's entropy over what was decoded (nats per token, T = 1).
Table 4: block efficiency over draft lengths 3, 5 and 7, before and after RL, on requests of their own.

Every run must draw the tokens of plain decoding. Nothing is timed: a busy machine changes no figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, fmean
from typing import Annotated, Any

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import ROOT, command, markdown, write
from benchmarks.tools.drafting import Acceptance, accept
from benchmarks.tools.rollouts import Tokens, engine_options, first_difference
from benchmarks.tools.targets import Target, find_warm_start, load_target
from config.speculation import SpeculationOptions
from config.strategy import Strategy
from contracts.rollout import Request
from drafter.build import build_drafters
from experiments.demo_learner import DemoLearner
from models.packed import PackedContext
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy

FORMATS = ("w4a8", "w8a8")
LENGTHS = (3, 5, 7)
PAPER = {"w8a8": (3.94, 5.87, 7.79), "w4a8": (3.59, 5.18, 6.70)}  # Table 4: W8 and W4 (16-bit activations)
RUNNING = 64
TABLE_EPOCH = -3  # noise that learning never meets
ENTROPY_TOKENS = 4096  # in one pass
Row = dict[str, Any]


class Measurement:
    """The target's engine with a copy in every format."""

    def __init__(self, target: Target) -> None:
        self._target = target
        options = engine_options(RUNNING)
        drafters = {
            form: build_drafters(
                SpeculationOptions.model_validate(
                    {"mode": "fixed", "strategies": ["self:5"], "self": {"format": form}}
                ),
                target.model,
                options,
            )["self"]
            for form in FORMATS
        }
        self.engine = NativeEngine(target.model, options, drafters=drafters)

    def plain(self, requests: Sequence[Request]) -> dict[int, Tokens]:
        """Responses by request id."""
        self.engine.use(None)
        return {number: rollout.tokens for number, rollout in self.engine.generate(requests).items()}

    def drafted(self, form: str, depth: int, requests: Sequence[Request], expected: dict[int, Tokens]) -> Acceptance:
        """Always chains of `depth`. SystemExit if a token differs from plain decoding's."""
        self.engine.use(FixedPolicy(Strategy(form, depth)))
        found = accept(self.engine, requests)
        responses = {number: rollout.tokens for number, rollout in found.rollouts.items()}
        if difference := first_difference(expected, responses):
            raise SystemExit(f"self-drafts in {form}, {depth} deep, are not lossless: {difference}")
        return found

    def entropy(self, requests: Sequence[Request], responses: dict[int, Tokens]) -> float:
        return entropy_of(self._target.model, [(r.prompt_tokens, responses[r.request_id]) for r in requests])


@torch.no_grad()
def entropy_of(model: Transformer, pairs: Sequence[tuple[Tokens, Tokens]]) -> float:
    """Mean over all response tokens of the entropy, in nats, of the distribution at T = 1 that each was drawn from."""
    total, count, batch, size = 0.0, 0, [], 0
    for number, (prompt, response) in enumerate(pairs):
        batch.append((prompt, response))
        size += len(prompt) + len(response)
        if size < ENTROPY_TOKENS and number + 1 < len(pairs):
            continue
        fed = [np.concatenate(pair)[:-1] for pair in batch]
        context = PackedContext.from_lengths([len(tokens) for tokens in fed], torch.device("cpu"))
        logits = model.logits(model(torch.from_numpy(np.concatenate(fed).astype(np.int64)), context)).float()
        drawn = np.concatenate(
            [np.arange(len(tokens)) >= len(prompt) - 1 for tokens, (prompt, _) in zip(fed, batch, strict=True)]
        )
        logprobs = torch.log_softmax(logits[torch.from_numpy(drawn)], dim=-1)
        total -= float((logprobs.exp() * logprobs).sum(dim=-1).double().sum())
        count += int(drawn.sum())
        batch, size = [], 0
    return total / count


def brief(found: Acceptance) -> Row:
    return {
        "block_efficiency": round(found.accept_length, 3),
        "first_accepted": round(found.by_depth[0], 4),
        "accepted_by_depth": found.by_depth,
        "verifications": found.verifications,
    }


def table_4(measurement: Measurement, requests: Sequence[Request]) -> Row:
    """Block efficiency by format and draft length under the present weights."""
    plain = measurement.plain(requests)
    found: Row = {"entropy": round(measurement.entropy(requests, plain), 4)}
    for form in FORMATS:
        found[form] = {str(depth): brief(measurement.drafted(form, depth, requests, plain)) for depth in LENGTHS}
    return found


def correlations(rows: Sequence[Row]) -> Row:
    """Pearson's, of the entropy with what is accepted, by format; None where that is always the same."""
    entropies = [row["entropy"] for row in rows]
    return {
        form: {
            name: None if len(set(values)) < 2 else round(correlation(entropies, values), 3)
            for name in ("first_accepted", "block_efficiency")
            for values in ([row[form][name] for row in rows],)
        }
        for form in FORMATS
    }


def figure(path: Path, rows: Sequence[Row], depth: int) -> None:
    """Figures 9 and 10, and 2c."""
    steps = [row["step"] for row in rows]

    def over_steps(name: str) -> list[Line]:
        return [Line(form, list(zip(steps, (row[form][name] for row in rows), strict=True))) for form in FORMATS]

    entropy = Line("policy", [(row["step"], row["entropy"]) for row in rows])
    shares = [Line(form, [(row["entropy"], row[form]["first_accepted"]) for row in rows], ".") for form in FORMATS]
    first, efficiency = "first drafted token accepted", f"tokens per verification, {depth} drafted"
    panels = [
        Panel(title="Entropy of the policy", lines=[entropy], x_label="RL step", y_label="nats per token"),
        Panel(title=first, lines=over_steps("first_accepted"), x_label="RL step", y_label="share"),
        Panel(title=efficiency, lines=over_steps("block_efficiency"), x_label="RL step", y_label="tokens"),
        Panel(title=f"{first}, by entropy", lines=shares, x_label="nats per token", y_label="share"),
    ]
    draw(path, panels, columns=2)


def tables(record: Row) -> str:
    """Table 4 beside the paper's, and RL step by RL step."""
    lines = []
    for name, found in record["table_4"].items():
        for form in FORMATS:
            cells = (f"{found[form][str(depth)]['block_efficiency']:.2f}" for depth in LENGTHS)
            first = found[form][str(LENGTHS[0])]["first_accepted"]
            lines.append([f"demo, {name}", form, f"{found['entropy']:.3f}", f"{first:.1%}", *cells])
    for form, printed in PAPER.items():
        lines.append(["Qwen2.5-7B (paper)", form[:2].upper(), "", "", *(f"{value:.2f}" for value in printed)])
    head = ["model", "copy", "entropy, nats", "first draft accepted", *(f"{depth} drafted" for depth in LENGTHS)]
    parts = [markdown(head, lines), ""]
    steps = [
        [
            row["step"],
            f"{row['reward']:.3f}",
            f"{row['entropy']:.3f}",
            *(f"{row[form]['first_accepted']:.2%}" for form in FORMATS),
            *(f"{row[form]['block_efficiency']:.2f}" for form in FORMATS),
        ]
        for row in record["steps"]
    ]
    head = ["RL step", "reward", "entropy"]
    head += [f"first accepted, {form}" for form in FORMATS] + [f"tokens per verification, {form}" for form in FORMATS]
    parts += [markdown(head, steps), ""]
    for form, found in record["correlation_with_entropy"].items():
        values = ("always the same" if value is None else f"{value:+.2f}" for value in found.values())
        first, efficiency = values
        parts.append(
            f"Correlation with the entropy over RL steps, {form}: {first} (first draft), {efficiency} (tokens per "
            "verification)."
        )
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Annotated[Path | None, "the demo's warm start; default: the newest in runs/warm_starts/"] = None
    steps: Annotated[int, "RL steps; the demo's run has 24"] = 24
    every: Annotated[int, "RL steps between measurements"] = 2
    depth: Annotated[int, "drafted while it learns"] = 5
    prompts: Annotated[int, "per RL step"] = 16
    table_prompts: Annotated[int, "of Table 4, 8 responses each"] = 32
    threads: int = 2
    out: Path = ROOT / "experiments/results/self_drafter.json"


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    directory = find_warm_start(options.target)
    target = load_target(directory, "demo", "float32")
    rl = DemoLearner(target, directory, options.steps)
    measurement = Measurement(target)
    asked = rl.sample(rl.train[: options.table_prompts], 8, TABLE_EPOCH)
    four = {"before RL": table_4(measurement, asked.requests)}
    rows: list[Row] = []
    for number in range(options.steps + 1):
        batch = rl.next_batch(options.prompts)
        measurement.engine.use(None)
        rollouts = measurement.engine.generate(batch.requests)
        responses = {request_id: rollout.tokens for request_id, rollout in rollouts.items()}
        row: Row | None = None
        if number % options.every == 0:
            row = {"step": number, "entropy": round(measurement.entropy(batch.requests, responses), 4)}
            for form in FORMATS:
                row[form] = brief(measurement.drafted(form, options.depth, batch.requests, responses))
            row["mean_length"] = round(fmean(map(len, responses.values())), 1)
        reward = rl.learn(batch, rollouts) if number < options.steps else rl.reward(batch, rollouts)
        if row is not None:
            rows.append(row | {"reward": round(reward, 4)})
            firsts = "  ".join(f"{form} {row[form]['first_accepted']:.2%}" for form in FORMATS)
            print(f"step {number:3d}: reward {reward:.3f}  entropy {row['entropy']:.4f}  first: {firsts}", flush=True)
        if number < options.steps:
            manifest, buffer = rl.weights(number + 1)
            measurement.engine.update_weights(manifest, np.asarray(buffer))
    four["after RL"] = table_4(measurement, rl.sample(rl.train[: options.table_prompts], 8, TABLE_EPOCH).requests)
    found = {"table_4": four, "steps": rows, "correlation_with_entropy": correlations(rows)}
    settings = {"steps": options.steps, "depth": options.depth, "running": RUNNING, "seed": 0}
    write(options.out, "does a low-bit copy draft better as RL sharpens the policy?", found, settings=settings)
    figure(options.out.with_suffix(".svg"), rows, options.depth)
    text = tables(found)
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main(command(Options, timed=False))
