"""Inflate a checkpoint to a larger model with the same logits, check that they are the same, and write it.

python -m benchmarks.tools.inflate runs/demo/model inflated/20m --size 20m
python -m benchmarks.tools.inflate runs/demo/model inflated/big --hidden-size 2048 --num-layers 12
"""

import argparse
import sys

import torch

from models.checkpoint import hf_state_dict, load_hf_state_dict, load_model, parameter_count, save_model
from models.inflate import PRESETS, inflate, inflated_config
from models.packed import PackedContext
from models.transformer import Transformer

SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
TOLERANCE = 1e-3  # largest difference of float32 logits


@torch.no_grad()
def largest_difference(a: Transformer, b: Transformer, tokens: int = 256) -> float:
    """Largest absolute difference of the logits over random tokens in two packed sequences."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(a.config.vocab_size, (tokens,), generator=generator)
    context = PackedContext.from_lengths([tokens // 3, tokens - tokens // 3])
    return (a.logits(a(ids, context)) - b.logits(b(ids, context))).abs().max().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Hugging Face model directory")
    parser.add_argument("out", help="directory to write")
    parser.add_argument("--size", choices=PRESETS, help="sizes that give about so many parameters from the demo model")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the weights that multiply zeros")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the written weights")
    options = parser.parse_args()

    sizes = dict(PRESETS[options.size]) if options.size else {}
    sizes |= {name: value for name in SIZES if (value := getattr(options, name)) is not None}
    source = load_model(options.source)
    target = inflated_config(source.config, **sizes)
    inflated = Transformer(target)
    load_hf_state_dict(inflated, inflate(source.config, hf_state_dict(source), target, seed=options.seed))
    difference = largest_difference(source, inflated)
    print(
        f"{parameter_count(source) / 1e6:.2f}M -> {parameter_count(inflated) / 1e6:.2f}M parameters, "
        f"largest logit difference {difference:.1e}"
    )
    if not difference <= TOLERANCE:
        print(f"error: the logits differ by more than {TOLERANCE}; nothing was written", file=sys.stderr)
        return 1
    save_model(
        inflated.to(getattr(torch, options.dtype)), options.out, tokenizer_dir=options.source, source_dir=options.source
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
