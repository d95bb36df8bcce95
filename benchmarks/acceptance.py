"""The cost and gain of coupling: acceptance of one fitted EAGLE head under five ways of drafting, on real rollouts.

    python -m benchmarks.acceptance --target runs/demo/model --eagle /path/to/drafter

The ways are coupled chains and trees, trees ranked by confidence as in TLT, rejection sampling with drafter
probabilities, and greedy one-hot drafts under rejection sampling (what a drafter without probabilities gets elsewhere).
All use the same prompts. The table of notes/coupled_sampling.md, measured on a model instead of synthetic
distributions.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from actors.engine.native.engine import NativeEngine
from benchmarks.harness import RESULTS, command, markdown, write
from benchmarks.tools.drafting import accept
from benchmarks.tools.rollouts import MEASURED_EPOCH, Tokens, decode, engine_options, wave
from benchmarks.tools.targets import Target, Task, find_demo, load_target, load_task
from config.speculation import EagleOptions
from config.strategy import Strategy
from contracts.rollout import Request
from drafter.eagle import Drafting, EagleDrafter, load_eagle
from models import ops
from models.packed import PackedContext
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy


@dataclass(frozen=True, slots=True)
class Way:
    """One way of drafting and verifying."""

    name: str
    drafter: Mapping[str, Any]
    strategy: str
    verification: Literal["coupled", "rejection"] = "coupled"


def ways(depth: int) -> list[Way]:
    chain, tree = f"eagle:{depth}", f"eagle:{depth}x3/{3 * depth}"
    return [
        Way("coupled chain", {}, chain),
        Way("rejection sampling", {"sampled": True}, chain, "rejection"),
        Way("greedy one-hot", {"coupled": False}, chain, "rejection"),
        Way("coupled tree", {}, tree),
        *(Way(f"coupled tree, s = {s:g}", {"tree_scale": s}, tree) for s in (0.5, 2.0)),
        Way("confidence tree (TLT)", {"coupled": False}, tree),
    ]


@torch.no_grad()
def first_token(
    target: Transformer,
    model: Drafting,
    requests: Sequence[Request],
    responses: Mapping[int, Tokens],
    temperature: float,
) -> dict[str, float]:
    """Return the probability that the first drafted token (of one, or of four children) is accepted, by way of
    drafting. It is the mean over every position of the same rollouts from the second token on, each drafted with its
    true past.

    With p and q the target's and the drafter's distribution, rejection sampling accepts with sum of min(p, q), one-hot
    drafts with p of the drafted tokens. Coupled drafts are accepted exactly when the target's own draw is among them.
    """
    sums: dict[str, float] = defaultdict(float)
    for request in requests:
        prompt, response = request.prompt_tokens, responses[request.request_id]
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        count, first = len(tokens) - 2, len(prompt) - 1  # row t drafts token t + 2; response token 1 is row `first`
        if count <= first:
            continue
        hidden = target(tokens, PackedContext.from_lengths([len(tokens)]))
        context = PackedContext.from_lengths([count])
        rotation = target.rope.at(context.positions)
        drafted = model.advance(target.embed_tokens(tokens[1:-1]), hidden[:count], rotation, context)
        logits, wanted = target.logits(drafted)[first:], target.logits(hidden[1:-1])[first:]
        p, q = (torch.softmax(x.float() / temperature, -1) for x in (wanted, logits))
        rows, draw = len(p), tokens[first + 2 :, None]
        settings = (
            logits,
            torch.full((rows,), -torch.inf),
            torch.full((rows,), temperature),
            torch.full((rows,), request.noise_key),
            torch.arange(1, rows + 1),
        )
        coupled, _ = ops.sample_topk(*settings, 4)
        likely = q.topk(4).indices
        sums["positions"] += rows
        sums["coupled, one token"] += int((coupled[:, :1] == draw).sum())
        sums["rejection sampling with drafter probabilities"] += float(torch.minimum(p, q).sum())
        sums["greedy one-hot, one token"] += float(p.gather(1, likely[:, :1]).sum())
        sums["coupled, four children"] += int((coupled == draw).sum())
        sums["greedy, four children"] += float(p.gather(1, likely).sum())
    positions = sums.pop("positions")
    return {way: total / positions for way, total in sums.items()}


def measure(target: Target, task: Task, way: Way, eagle: str, temperature: float, requests: int) -> dict[str, Any]:
    """Return counts over one set of requests."""
    options = engine_options(32)
    drafter = EagleDrafter(
        target.model,
        EagleOptions(path=eagle, min_probability=0),
        options.max_running,
        options.kv_tokens // options.block_tokens,
        options.block_tokens,
        **way.drafter,
    )
    engine = NativeEngine(
        target.model,
        options,
        drafters={"eagle": drafter},
        policy=FixedPolicy(Strategy.parse(way.strategy)),
        verification=way.verification,
    )
    found = accept(engine, wave(task, 0, requests, MEASURED_EPOCH, temperature))
    return {
        "way": way.name,
        "strategy": way.strategy,
        "temperature": temperature,
        "verifications": found.verifications,
        "accepted": found.accepted,
        "accepted_per_verification": found.accepted / found.verifications,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Render one line per way, one column per temperature."""
    temperatures = sorted({row["temperature"] for row in rows})
    found: dict[tuple[str, str], dict[float, str]] = {(row["way"], row["strategy"]): {} for row in rows}
    for row in rows:
        found[row["way"], row["strategy"]][row["temperature"]] = f"{row['accepted_per_verification']:.3f}"
    head = ["drafts", "strategy", *(f"T = {t:g}" for t in temperatures)]
    return markdown(head, [[*way, *(of[t] for t in temperatures)] for way, of in found.items()])


def first_table(first: Mapping[float, Mapping[str, float]]) -> str:
    """Render the probability that the first drafted token is accepted."""
    names = next(iter(first.values()))
    rows = [[name, *(f"{of[name]:.3f}" for of in first.values())] for name in names]
    return markdown(["first drafted token", *(f"T = {t:g}" for t in first)], rows)


def main(
    *,
    target: Annotated[Path | None, "model directory of the demo; default: the newest in runs/"] = None,
    eagle: Annotated[Path, "drafter directory (benchmarks.tools.fit_eagle)"],
    depth: int = 4,
    requests: int = 192,
    temperatures: Sequence[float] = (0.7, 1.0),
    out: Path = RESULTS / "acceptance.json",
) -> None:
    torch.set_num_threads(1)
    directory = find_demo(target)
    network, task = load_target(directory, "demo", "float32"), load_task(directory)
    model = load_eagle(eagle, network.model.config, dtype=torch.float32, device="cpu", batch_invariant=False)
    rows: list[dict[str, Any]] = []
    first: dict[float, dict[str, float]] = {}
    for temperature in temperatures:
        asked = wave(task, 0, requests, MEASURED_EPOCH, temperature)
        responses = decode(network, [asked], running=32).responses
        first[temperature] = first_token(network.model, model, asked, responses, temperature)
        for way in ways(depth):
            rows.append(measure(network, task, way, str(eagle), temperature, requests))
            print(f"T {temperature:g}  {way.name}: {rows[-1]['accepted_per_verification']:.3f}", flush=True)
    settings = {"depth": depth, "requests": requests, "threads": 1, "seed": 0}
    question = "how often is a draft accepted, by way of drafting?"
    write(out, question, {"first_token": first, "rows": rows}, settings=settings)
    print(table(rows))
    print(first_table(first))


if __name__ == "__main__":
    command(main, timed=False)
