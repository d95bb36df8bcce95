"""Export a drafter as a checkpoint that stock vLLM loads with `method` `eagle` or `eagle3`. Owns vLLM's names and
config keys, and those of the `speculators` library.

Read from vLLM 0.32 (model_executor/models/llama_eagle.py, llama_eagle3.py, qwen3_eagle3.py) and 0.33, and speculators
0.9. Names have no `model.` prefix. In vLLM's form the embedding, and EAGLE's head, are left out, so that vLLM shares
the target's own modules. An EAGLE-3 head in vLLM's form is also in SpecForge's, which SGLang loads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from drafter.eagle import Drafting, Eagle3Model, load_eagle
from drafter.eagle.files import WEIGHTS_FILE
from drafter.eagle.model import Kind
from drafter.eagle.names import LAYER, SPECULATORS_LAYER, TORCH_FILE, block_layout, head_layout, offsets, open_tensors
from drafter.published import CONFIG_FILE, FLAGS
from models.config import ModelConfig, read_config
from models.directory import SafetensorsDirectory, write_checkpoint

Format = Literal["vllm", "speculators"]
_EAGLE3_NAMES = {
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "fuse_norm.weight": "input_norm.weight",
    **{f"fuse_norms.{index}.weight": f"fc_norm.{index}.weight" for index in range(3)},
}
_EMBEDDING = "embed_tokens.weight"
_TTT_STEPS = 3  # default drafts per step in a speculators config


class ExportError(ValueError):
    """The drafter is one that vLLM would not load, or would compute differently. The message has reason and remedy."""


@dataclass(frozen=True, slots=True)
class Exported:
    method: Kind  # of vLLM's speculative_config
    architecture: str
    tensors: int
    directory: Path


def export_drafter(
    drafter: str | Path,
    target: str | Path,
    out: str | Path,
    *,
    method: Kind | None = None,
    form: Format = "vllm",
) -> Exported:
    """Write `out` from a drafter's directory and the model directory of its target; `out` appears only when complete.

    `method`: required kind of the drafter; default: any. `form`: format of names and config.json; vLLM loads an EAGLE-3
    head in either. Weights keep their dtype.
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
    shared = model.kind == "eagle3" and model.lm_head is None
    head = _head(target, config).to(model.fuse.weight.dtype) if shared else None
    if form == "vllm":
        return write_for_vllm(model, out, head)
    if not isinstance(model, Eagle3Model):
        raise ExportError(
            f"{drafter} holds a drafter of kind eagle, and speculators 0.9 has eagle3: leave out --format"
        )
    return write_for_speculators(model, out, head, target)


def write_for_vllm(model: Drafting, out: Path, head: Tensor | None = None) -> Exported:
    """Write `out`. `head` [vocabulary, H] is stored as EAGLE-3's own; without one vLLM drafts with the target's. Raises
    ExportError, and FileExistsError as `export_drafter` does."""
    hf_config = vllm_config(model)
    tensors = dict(vllm_tensors(model.kind, model.block.config, model.state_dict()))
    if head is not None:
        tensors["lm_head.weight"] = head
    if isinstance(model, Eagle3Model):
        tensors |= offsets(model.ids, model.shape.draft_vocab or 0, model.config.vocab_size)
    write_checkpoint(hf_config, tensors.items(), out)
    return Exported(model.kind, hf_config["architectures"][0], len(tensors), out)


def write_for_speculators(model: Eagle3Model, out: Path, head: Tensor | None, target: Path) -> Exported:
    """Write `out` in the format of speculators 0.9, for the target in `target`; `head` as in `write_for_vllm`.

    Raises ExportError, and FileExistsError as `export_drafter` does."""
    block, shape = model.block.config, model.shape
    if block.qkv_bias != block.output_bias:
        raise ExportError(
            "the head has biases on queries, keys and values alone, and speculators' block has all or none"
        )
    if block.family not in ("llama", "qwen3"):
        block = replace(block, family="llama")
    layer = replace(block, num_layers=1, tied=False, source={}).to_hf()
    layer.pop("architectures")
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": _TTT_STEPS,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": read_config(target).get("architectures") or [],
                "name_or_path": str(target.resolve()),
            },
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab or block.vocab_size,
        "eagle_aux_hidden_state_layer_ids": _layer_ids(model.layers),
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **_dtype(model),
        **{flag: getattr(shape, flag) for flag in FLAGS},
    }
    tensors = _head_tensors(model, head, SPECULATORS_LAYER)
    with SafetensorsDirectory(target) as weights:  # without it speculators may tie its head
        tensors[_EMBEDDING] = weights[f"model.{_EMBEDDING}"].to(model.fuse.weight.dtype)
    write_checkpoint(config, tensors.items(), out)
    return Exported(model.kind, "Eagle3DraftModel", len(tensors), out)


def _head_tensors(model: Eagle3Model, head: Tensor | None, layer: str) -> dict[str, Tensor]:
    state = model.state_dict()
    tensors = {
        piece.hf_name: state[piece.parameter][piece.start : piece.stop] for piece in head_layout(model.shape, layer)
    }
    if head is not None:
        tensors["lm_head.weight"] = head
    rows = model.shape.draft_vocab or model.config.vocab_size
    return tensors | offsets(model.ids, rows, model.config.vocab_size)


def vllm_config(model: Drafting) -> dict[str, Any]:
    """Return config.json. Raises ExportError for a block that no vLLM class computes."""
    config = model.block.config
    llama = model.block.q_norm is None
    if model.kind == "eagle" and not llama:
        raise ExportError(
            "this drafter norms its queries and keys, which vLLM's only eagle block (EagleLlamaForCausalLM) does not: "
            "train a new one; they are made without these norms now"
        )
    if not llama and config.output_bias:
        raise ExportError("the drafter's block has attention_bias, and vLLM's Qwen3 eagle3 block has none on o_proj")
    shape = replace(config, family="llama" if llama else "qwen3", num_layers=1, tied=False, source={})
    written = shape.to_hf() | {"draft_vocab_size": config.vocab_size}
    if model.kind == "eagle":
        return written | {"attention_bias": config.output_bias, "qkv_bias": config.qkv_bias}
    assert isinstance(model, Eagle3Model)
    ids, head = _layer_ids(model.layers), model.shape
    return written | {
        **({"draft_vocab_size": head.draft_vocab} if head.draft_vocab else {}),
        **{flag: True for flag in FLAGS if getattr(head, flag)},
        **_dtype(model),
        "architectures": ["LlamaForCausalLMEagle3" if llama else "Eagle3Qwen3ForCausalLM"],
        "attention_bias": config.qkv_bias,
        # Without them vLLM takes (2, L/2, L - 3), which are not three layers of a shallow target.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }


def vllm_tensors(kind: Kind, config: ModelConfig, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a drafter's `state_dict` under vLLM's names, unfused, as views. `config`: of its block. Tensors missing in
    `state` are left out: EAGLE-3's head is only there if it is its own."""
    yield "fc.weight", state["fuse.weight"]
    layer = LAYER if kind == "eagle3" else SPECULATORS_LAYER
    for piece in block_layout(config):
        if piece.parameter in state:  # EAGLE has no input norm, and its block no norms of queries and keys
            yield layer + piece.hf_name, state[piece.parameter][piece.start : piece.stop]
    if kind == "eagle3":
        yield f"{layer}hidden_norm.weight", state["block.hidden_norm.weight"]
        for ours, theirs in _EAGLE3_NAMES.items():
            if ours in state:
                yield theirs, state[ours]
        if config.qkv_bias and not config.output_bias:  # vLLM's block has both biases, or none
            yield f"{layer}self_attn.o_proj.bias", torch.zeros_like(state["block.o_proj.weight"][:, 0])


def _layer_ids(layers: tuple[int, ...]) -> list[int]:
    """Return vLLM's ids: id i is the residual stream before layer i, the output of layer i - 1."""
    if len(set(layers)) < len(layers):
        raise ExportError(
            f"the drafter reads layers {list(layers)} of the target, some twice: vLLM hands each over once, so this "
            "target is too shallow for eagle3 there"
        )
    return [layer + 1 for layer in layers]


def _head(target: Path, config: ModelConfig) -> Tensor:
    with SafetensorsDirectory(target) as tensors:
        return tensors["model.embed_tokens.weight" if config.tied else "lm_head.weight"]


def _dtype(model: Drafting) -> dict[str, str]:
    """Return the dtype, which `write_checkpoint` cannot infer for a head with integer tables."""
    return {"dtype": str(model.fuse.weight.dtype).removeprefix("torch.")}


def _stored_dtype(drafter: Path) -> torch.dtype:
    """Return the dtype of the stored weights. Raises ExportError if `drafter` is no drafter's directory."""
    weights = [*drafter.glob("*.safetensors"), *drafter.glob(TORCH_FILE)]
    if not (drafter / CONFIG_FILE).is_file() or not weights:
        raise ExportError(f"{drafter} holds no drafter: it needs {CONFIG_FILE} and {WEIGHTS_FILE}")
    if weights[0].name == TORCH_FILE:
        return next(tensor.dtype for name, tensor in open_tensors(drafter)[1].items() if name.endswith("fc.weight"))
    with SafetensorsDirectory(drafter) as tensors:
        return next(tensors[name].dtype for name in tensors if name.endswith(("fc.weight", "fuse.weight")))
