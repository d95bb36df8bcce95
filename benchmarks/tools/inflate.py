"""Inflate a checkpoint to a larger model with the same logits, check the logits, and write it.

python -m benchmarks.tools.inflate runs/demo/model inflated/20m --size 20m
python -m benchmarks.tools.inflate runs/demo/model inflated/big --hidden-size 2048 --num-layers 12
"""

import sys
from pathlib import Path
from typing import Annotated

import torch

from benchmarks.harness import command
from benchmarks.tools.inflating import PRESETS
from benchmarks.tools.targets import DTYPES, inflated
from models.checkpoint import load_model, parameter_count, save_model
from models.packed import PackedContext
from models.transformer import Transformer

TOLERANCE = 1e-3  # largest difference of float32 logits


@torch.no_grad()
def largest_difference(a: Transformer, b: Transformer, tokens: int = 256) -> float:
    """Return the largest absolute difference of the logits over random tokens in two packed sequences."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(a.config.vocab_size, (tokens,), generator=generator)
    context = PackedContext.from_lengths([tokens // 3, tokens - tokens // 3])
    return (a.logits(a(ids, context)) - b.logits(b(ids, context))).abs().max().item()


def main(
    source: Annotated[Path, "Hugging Face model directory"],
    out: Annotated[Path, "directory to write"],
    *,
    size: Annotated[str | None, "sizes that give about so many parameters from the demo model", tuple(PRESETS)] = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_layers: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    seed: Annotated[int, "of the weights that multiply zeros"] = 0,
    dtype: Annotated[str, "of the written weights", DTYPES] = "float32",
) -> int:
    given = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_layers": num_layers}
    given |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes = dict(PRESETS[size] if size else {}) | {name: value for name, value in given.items() if value is not None}
    small = load_model(source)
    large = inflated(small, sizes, batch_invariant=True, seed=seed)
    difference = largest_difference(small, large)
    print(
        f"{parameter_count(small) / 1e6:.2f}M -> {parameter_count(large) / 1e6:.2f}M parameters, "
        f"largest logit difference {difference:.1e}"
    )
    if not difference <= TOLERANCE:
        print(f"error: the logits differ by more than {TOLERANCE}; nothing was written", file=sys.stderr)
        return 1
    save_model(large.to(getattr(torch, dtype)), out, tokenizer_dir=source, source_dir=source)
    return 0


if __name__ == "__main__":
    sys.exit(command(main, timed=False))
