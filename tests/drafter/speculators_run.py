"""Run by an interpreter that has speculators (0.9), without Paceline: `make` EAGLE-3 heads for FOLDER/target, or write
what it computes with each head below FOLDER/NAME.

usage: speculators_run.py make FOLDER IDS VOCAB | speculators_run.py logits FOLDER NAME VOCAB
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.model import SpeculatorModel  # type: ignore[import-not-found]
from speculators.models.attention import create_float_mask  # type: ignore[import-not-found]
from speculators.models.eagle3 import Eagle3DraftModel  # type: ignore[import-not-found]
from transformers import LlamaConfig, Qwen3Config

H, PASSES, ROWS = 32, 3, 23
CASES: dict[str, tuple[Any, int, dict[str, bool]]] = {
    "qwen3_reduced": (Qwen3Config, 24, {}),
    "qwen3_whole": (Qwen3Config, 0, {"norm_before_residual": True}),
    "llama_norm_before_fc": (LlamaConfig, 20, {"norm_before_fc": True}),
    "llama_fc_norm": (LlamaConfig, 24, {"fc_norm": True, "norm_output": True}),
    "llama_biases": (LlamaConfig, 24, {"attention_bias": True}),
}


def make(folder: Path, ids: list[int], vocab: int) -> None:
    torch.manual_seed(0)
    for name, (kind, rows, flags) in CASES.items():
        layer = kind(
            vocab_size=vocab,
            hidden_size=H,
            intermediate_size=40,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            attention_bias=flags.pop("attention_bias", False),
        )
        tokens = torch.randperm(vocab)[: rows or vocab].sort().values
        can = torch.zeros(vocab, dtype=torch.bool)
        can[tokens] = True
        model = Eagle3DraftModel.from_training_args(
            layer,
            t2d=can if rows else None,
            d2t=tokens - torch.arange(rows) if rows else None,
            verifier_name_or_path=str(folder / "target"),
            draft_vocab_size=rows or vocab,
            ttt_steps=PASSES,
            target_layer_ids=ids,
            draft_attn_impl="eager",
            norm_before_residual=flags.pop("norm_before_residual", False),
            **flags,
        )
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if not parameter_name.startswith(("verifier", "embed")):
                    one = 1.0 if parameter.dim() == 1 and "norm" in parameter_name else 0.0
                    parameter.copy_(one + 0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder / "made" / name)


def logits(folder: Path, name: str, vocab: int) -> None:
    (folder / "theirs").mkdir(exist_ok=True)
    for head in sorted((folder / name).iterdir()):
        model = SpeculatorModel.from_pretrained(str(head)).float().eval()
        model.config.transformer_layer_config._attn_implementation = model._attn_impl = "eager"
        model._create_mask_fn = create_float_mask
        found: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda _module, _inputs, out, found=found: found.append(out[0]))
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(ROWS, 3 * H, generator=generator)
        tokens = torch.randint(0, vocab, (ROWS,), generator=generator)
        with torch.no_grad():
            model(hidden[None], tokens[None], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=PASSES)
        save_file(
            {"hidden": hidden, "tokens": tokens, "logits": torch.stack(found)},
            folder / "theirs" / f"{name}_{head.name}.safetensors",
        )


if __name__ == "__main__":
    what, where, argument, size = sys.argv[1:]
    if what == "make":
        make(Path(where), json.loads(argument), int(size))
    else:
        logits(Path(where), argument, int(size))
