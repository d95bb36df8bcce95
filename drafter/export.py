"""A drafter as a checkpoint that stock vLLM loads with `method` `eagle` or `eagle3`. Owns vLLM's names and config keys.

Read from vLLM 0.32 (model_executor/models/llama_eagle.py, llama_eagle3.py, qwen3_eagle3.py). Names have no `model.`
prefix; the embedding, and EAGLE's head, are left out, so that vLLM shares the target's own modules.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.eagle import Drafting, load_eagle
from drafter.eagle.files import CONFIG_FILE, WEIGHTS_FILE
from drafter.eagle.model import Kind
from models.config import ModelConfig, read_config
from models.directory import SafetensorsDirectory, write_checkpoint
from models.layout import Slice, hf_layout


class ExportError(ValueError):
    """A drafter that vLLM would not load, or would compute differently; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Exported:
    method: Kind  # of vLLM's speculative_config
    architecture: str
    tensors: int
    directory: Path


def export_drafter(drafter: str | Path, target: str | Path, out: str | Path, *, method: Kind | None = None) -> Exported:
    """Write `out` from a drafter's directory and the model directory of its target; `out` appears only when complete.

    `method`: what the drafter must be; default: whatever it is. Weights keep their dtype.
    Raises ExportError, EagleWeightsError (not a drafter of this target), ModelConfigError, WeightsMismatchError, and
    FileExistsError for an `out` that is no model directory.
    """
    drafter, target, out = Path(drafter), Path(target), Path(out)
    for given, path in (("drafter", drafter), ("target", target)):
        if out.resolve() == path.resolve():
            raise ExportError(f"{out} is the {given}'s own directory, which would be replaced: give another --out")
    config = ModelConfig.from_hf(read_config(target))
    model = load_eagle(drafter, config, dtype=_stored_dtype(drafter), device="cpu", batch_invariant=False)
    if method is not None and method != model.kind:
        raise ExportError(f"{drafter} holds a drafter for vLLM's method {model.kind}, not {method}")
    head = _head(target, config).to(model.fuse.weight.dtype) if model.kind == "eagle3" else None
    return write_for_vllm(model, out, head)


def write_for_vllm(model: Drafting, out: Path, head: Tensor | None = None) -> Exported:
    """Write `out`. `head` [vocabulary, H] goes with it as EAGLE-3's own; without one vLLM drafts with the target's.
    Raises ExportError, and FileExistsError as `export_drafter` does."""
    hf_config = vllm_config(model)
    tensors = dict(vllm_tensors(model.kind, model.config, model.state_dict()))
    if head is not None:
        tensors["lm_head.weight"] = head
    write_checkpoint(hf_config, tensors.items(), out)
    return Exported(model.kind, hf_config["architectures"][0], len(tensors), out)


def vllm_config(model: Drafting) -> dict[str, Any]:
    """config.json. Raises ExportError for a block that no vLLM class computes."""
    config = model.config
    llama = model.block.q_norm is None
    if model.kind == "eagle" and not llama:
        raise ExportError(
            "this drafter norms its queries and keys, which vLLM's only eagle block (EagleLlamaForCausalLM) does not: "
            "train a new one; they are made without these norms now"
        )
    if not llama and config.output_bias:
        raise ExportError("the target has attention_bias, and vLLM's Qwen3 eagle3 block has none on o_proj")
    shape = replace(config, family="llama" if llama else "qwen3", num_layers=1, tied=False, source={})
    written = shape.to_hf() | {"draft_vocab_size": config.vocab_size}
    if model.kind == "eagle":
        return written | {"attention_bias": config.output_bias, "qkv_bias": config.qkv_bias}
    ids = _layer_ids(model.layers)
    return written | {
        "architectures": ["LlamaForCausalLMEagle3" if llama else "Eagle3Qwen3ForCausalLM"],
        "attention_bias": config.qkv_bias,
        # Without them vLLM takes (2, L/2, L - 3), which are no three layers of a shallow target.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }


def vllm_tensors(kind: Kind, config: ModelConfig, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A drafter's `state_dict` under vLLM's names, unfused, without EAGLE-3's head. Views of the tensors given."""
    yield "fc.weight", state["fuse.weight"]
    layer = "midlayer." if kind == "eagle3" else "layers.0."
    for piece in _block_layout(config):
        if piece.parameter in state:  # EAGLE has no input norm, and its block no norms of queries and keys
            yield layer + piece.hf_name, state[piece.parameter][piece.start : piece.stop]
    if kind == "eagle3":
        yield "midlayer.hidden_norm.weight", state["block.hidden_norm.weight"]
        yield "norm.weight", state["norm.weight"]
        if config.qkv_bias and not config.output_bias:  # vLLM's block has both biases, or none
            yield "midlayer.self_attn.o_proj.bias", torch.zeros_like(state["block.o_proj.weight"][:, 0])


def _block_layout(config: ModelConfig) -> Iterator[Slice]:
    """The tensors of a decoder layer as Hugging Face names them below the layer, and where they are in `block`."""
    for piece in hf_layout(replace(config, num_layers=1)):
        if piece.parameter.startswith("blocks.0."):
            name = piece.hf_name.removeprefix("model.layers.0.")
            yield replace(piece, hf_name=name, parameter="block." + piece.parameter.removeprefix("blocks.0."))


def _layer_ids(layers: tuple[int, ...]) -> list[int]:
    """vLLM's id i is the residual stream before layer i: the output of layer i - 1."""
    if len(set(layers)) < len(layers):
        raise ExportError(
            f"the drafter reads layers {list(layers)} of the target, some twice: vLLM hands each over once, so this "
            "target is too shallow for eagle3 there"
        )
    return [layer + 1 for layer in layers]


def _head(target: Path, config: ModelConfig) -> Tensor:
    with SafetensorsDirectory(target) as tensors:
        return tensors["model.embed_tokens.weight" if config.tied else "lm_head.weight"]


def _stored_dtype(drafter: Path) -> torch.dtype:
    """Raises ExportError if `drafter` is no drafter's directory."""
    if not (drafter / CONFIG_FILE).is_file() or not (drafter / WEIGHTS_FILE).is_file():
        raise ExportError(f"{drafter} holds no drafter: it needs {CONFIG_FILE} and {WEIGHTS_FILE}")
    with SafetensorsDirectory(drafter) as tensors:
        return next(iter(tensors.values())).dtype
