"""A short offline fit of an EAGLE head to a fixed target, for benchmarks: `python -m benchmarks.tools.fit_eagle`.

    python -m benchmarks.tools.fit_eagle --target runs/demo/model --size demo --out /path/to/drafter

Samples the target's own rollouts, then minimises cross-entropy against the target's distribution plus smooth L1 on its
hidden states (TLT Figure 7, EAGLE), teacher-forced, segments packed. Training that follows an evolving target is the
spot trainer's business, not this tool's.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.tools.rollouts import record_history
from benchmarks.tools.targets import SIZES, find_demo, load_target, load_task
from drafter.eagle import EagleModel, init_eagle, save_eagle
from models.packed import PackedContext
from models.transformer import Transformer

Tokens = NDArray[np.int32]


def loss_of(model: EagleModel, target: Transformer, sequences: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """(loss, accuracy of the most probable token) over sequences of at least 3 tokens.

    Position t of a sequence of length L, 0 <= t <= L - 3: input (embedding of token t+1, h_t), label the target's
    distribution for token t+2, which its h_{t+1} gives.
    """
    lengths = [len(sequence) for sequence in sequences]
    tokens = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
    with torch.no_grad():
        hidden = target(tokens, PackedContext.from_lengths(lengths))  # [T, H]
    at = torch.cat([torch.arange(n - 2) + end - n for n, end in zip(lengths, np.cumsum(lengths), strict=True)])
    inputs, context = tokens[at + 1], PackedContext.from_lengths([n - 2 for n in lengths])
    predicted = model(target.embed_tokens(inputs), hidden[at], target.rope.at(context.positions), context)
    logits = target.logits(predicted).float()
    with torch.no_grad():
        wanted = target.logits(hidden[at + 1]).float().softmax(-1)
    cross_entropy = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
    accuracy = (logits.argmax(-1) == wanted.argmax(-1)).float().mean()
    return cross_entropy + F.smooth_l1_loss(predicted.float(), hidden[at + 1].float()), accuracy


def batches(sequences: Sequence[Tokens], tokens: int, seed: int) -> Iterator[list[Tokens]]:
    """For ever: packs of about `tokens` tokens, in a new order every epoch."""
    rng, pack, size = np.random.default_rng(seed), list[Tokens](), 0
    while True:
        for index in rng.permutation(len(sequences)):
            pack.append(sequences[index])
            size += len(sequences[index])
            if size >= tokens:
                yield pack
                pack, size = [], 0


def fit(
    target: Transformer, sequences: Sequence[Tokens], *, steps: int, learning_rate: float, seed: int = 0
) -> EagleModel:
    """A fitted head in float32, for a float32 target; progress goes to stdout."""
    model = init_eagle(target.config, seed, dtype=torch.float32, device="cpu", batch_invariant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    source, start_s = batches([s for s in sequences if len(s) >= 3], 2048, seed), time.monotonic()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss, accuracy = loss_of(model, target, next(source))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - start_s
            print(f"step {step}/{steps}  loss {loss:.4f}  accuracy {accuracy:.3f}  {seconds:.0f} s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="model directory of the demo; default: the newest in runs/")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--out", required=True, help="where the drafter goes")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()
    directory = find_demo(arguments.target)
    task = load_task(directory)
    prompts, responses = record_history(load_target(directory, "demo", "float32"), task)
    sequences = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
    target = load_target(directory, arguments.size, "float32").model.requires_grad_(False)
    save_eagle(fit(target, sequences, steps=arguments.steps, learning_rate=arguments.lr), Path(arguments.out))
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
