"""Run by an interpreter that has speculators (0.9), without Paceline: `make` EAGLE-3 heads for FOLDER/target, write
the `logits` that it computes with each head below FOLDER/NAME, or `fit` a head to the target's texts by its own loss.

usage: speculators_run.py make FOLDER IDS VOCAB | speculators_run.py logits FOLDER NAME VOCAB |
       speculators_run.py fit FOLDER JOB.json -

JOB: name (of FOLDER/NAME), kind (qwen3 or llama), ids (of target layers), texts (token ids), prompt (length of each
one's prompt), tokens (that can be drafted; null: all), layer (keys of the decoder layer), steps.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config  # type: ignore[import-not-found]
from speculators.model import SpeculatorModel  # type: ignore[import-not-found]
from speculators.models.attention import create_float_mask  # type: ignore[import-not-found]
from speculators.models.eagle3 import Eagle3DraftModel  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

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


def fit(folder: Path, job: dict[str, Any]) -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(str(folder / "target"), dtype=torch.float32).eval()
    vocab, tokens = target.config.vocab_size, None if job["tokens"] is None else torch.tensor(job["tokens"])
    can = torch.zeros(vocab, dtype=torch.bool)
    if tokens is not None:
        can[tokens] = True
    model = Eagle3DraftModel.from_training_args(
        {"qwen3": Qwen3Config, "llama": LlamaConfig}[job["kind"]](
            vocab_size=vocab, num_hidden_layers=1, **job["layer"]
        ),
        t2d=None if tokens is None else can,
        d2t=None if tokens is None else tokens - torch.arange(len(tokens)),
        verifier_name_or_path=str(folder / "target"),
        draft_vocab_size=vocab if tokens is None else len(tokens),
        ttt_steps=PASSES,
        target_layer_ids=job["ids"],
        draft_attn_impl="eager",
        norm_before_residual=False,
    )
    batches = [batch_of(target, job["texts"][i : i + 4], job) for i in range(0, len(job["texts"]), 4)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, job["steps"])
    losses = resolve_loss_config("kl_div", "eager")
    for step in range(job["steps"]):
        _, loss, _ = model(**batches[step % len(batches)], ttt_steps=PASSES, loss_config=losses)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.save_pretrained(folder / job["name"])


def batch_of(target: Any, texts: list[list[int]], job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """These texts as documents of one row, aligned as speculators.models.eagle3.data.shift_batch does."""
    before_norm: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _module, inputs: before_norm.append(inputs[0][0]))
    rows: dict[str, list[torch.Tensor]] = {}
    for number, text in enumerate(texts):
        with torch.no_grad():
            out = target(torch.tensor([text]), output_hidden_states=True)
        places = torch.arange(len(text))
        one = {
            "hidden_states": torch.cat([out.hidden_states[i][0] for i in job["ids"]], -1)[:-1],
            "input_ids": torch.tensor(text)[1:],
            "verifier_last_hidden_states": before_norm[-1][1:],
            "loss_mask": (places >= job["prompt"] - 1)[1:],
            "position_ids": places[1:],
            "document_ids": torch.full((len(text) - 1,), number),
        }
        for name, tensor in one.items():
            rows.setdefault(name, []).append(tensor)
    hook.remove()
    return {name: torch.cat(parts)[None] for name, parts in rows.items()}


if __name__ == "__main__":
    what, where, argument, size = sys.argv[1:]
    if what == "fit":
        fit(Path(where), json.loads(Path(argument).read_text()))
    elif what == "make":
        make(Path(where), json.loads(argument), int(size))
    else:
        logits(Path(where), argument, int(size))
