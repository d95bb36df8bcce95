"""The tensors of EAGLE-3 heads under others' names, read and written. Owns names, shapes and vocabulary tables.

Names are those without prefix. The decoder layer is `midlayer.` (SpecForge, the EAGLE authors, vLLM) or `layers.0.`
(speculators, and EAGLE-1 heads).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from drafter.published import EagleWeightsError, HeadShape
from models.config import ModelConfig
from models.directory import SafetensorsDirectory, WeightsMismatchError
from models.layout import Slice, hf_layout

TORCH_FILE = "pytorch_model.bin"  # the EAGLE authors'
LAYER, SPECULATORS_LAYER = "midlayer.", "layers.0."
D2T, T2D = "d2t", "t2d"
# Tensors of the target that some files repeat, and computed ones.
_IGNORED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")


def block_layout(config: ModelConfig) -> Iterator[Slice]:
    """Yield a decoder layer's tensors by their Hugging Face names below the layer, with their place in `block`."""
    for piece in hf_layout(replace(config, num_layers=1)):
        if piece.parameter.startswith("blocks.0."):
            name = piece.hf_name.removeprefix("model.layers.0.")
            yield replace(piece, hf_name=name, parameter="block." + piece.parameter.removeprefix("blocks.0."))


def head_layout(shape: HeadShape, layer: str = LAYER) -> Iterator[Slice]:
    """Yield every trained tensor of an EAGLE-3 head, with its place in `Eagle3Model`."""
    yield Slice("fc.weight", "fuse.weight")
    if shape.norm_before_fc:
        yield Slice("input_norm.weight", "fuse_norm.weight")
    if shape.fc_norm:
        for index in range(3):
            yield Slice(f"fc_norm.{index}.weight", f"fuse_norms.{index}.weight")
    for piece in block_layout(shape.block):
        yield replace(piece, hf_name=layer + piece.hf_name)
    yield Slice(f"{layer}hidden_norm.weight", "block.hidden_norm.weight")
    yield Slice("norm.weight", "norm.weight")
    if shape.draft_vocab is not None:
        yield Slice("lm_head.weight", "lm_head.weight")


def offsets(ids: Tensor | None, rows: int, vocab: int) -> dict[str, Tensor]:
    """Return `d2t`, the offset from a head row to its token, and `t2d`, which tokens can be drafted; empty
    if all can."""
    if ids is None:
        return {}
    can = torch.zeros(vocab, dtype=torch.bool)
    can[ids.cpu()] = True
    return {D2T: ids.cpu() - torch.arange(rows), T2D: can}


def read_head(
    directory: Path, shape: HeadShape, like: Mapping[str, Tensor], vocab: int
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Read the tensors in `directory` under the names and with the shapes of `like`, a network's state, and its `ids`.

    Raises EagleWeightsError naming file and tensor if one is missing, has another shape, is unknown or not finite, or
    if a table is out of range."""
    file, given = open_tensors(directory)
    names = {name.removeprefix("model.").replace(LAYER, SPECULATORS_LAYER): name for name in given}
    layout = list(head_layout(shape, SPECULATORS_LAYER))
    _require(file, given, names, layout, like)
    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    for piece in layout:
        state[piece.parameter][piece.start : piece.stop].copy_(given[names[piece.hf_name]])
    if bad := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
        raise EagleWeightsError(f"{file}: {bad[0]} has values that are not finite")
    tables = {name: given[names[name]] for name in (D2T, T2D) if name in names}
    return state, _ids(file, tables, shape, vocab)


def open_tensors(directory: Path) -> tuple[Path, Mapping[str, Tensor]]:
    """Return the file for messages, and its tensors by name. Raises EagleWeightsError."""
    try:
        if (directory / TORCH_FILE).is_file() and not any(directory.glob("*.safetensors")):
            file = directory / TORCH_FILE
            return file, torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return directory / "model.safetensors", SafetensorsDirectory(directory)
    except PermissionError as error:
        raise EagleWeightsError(f"{directory} cannot be read by this user ({error}): check the permissions") from error
    except WeightsMismatchError as error:
        raise EagleWeightsError(f"{error}: the checkpoint is not whole") from error
    except Exception as error:  # torch.load may raise anything
        raise EagleWeightsError(f"{directory / TORCH_FILE} cannot be read: {error}") from error


def _require(
    file: Path,
    given: Mapping[str, Tensor],
    names: Mapping[str, str],
    layout: list[Slice],
    like: Mapping[str, Tensor],
) -> None:
    for piece in layout:
        if piece.hf_name not in names:
            raise EagleWeightsError(f"{file}: {piece.hf_name} is missing: half a checkpoint, or another kind of head")
        wanted = list(like[piece.parameter][piece.start : piece.stop].shape)
        found = list(given[names[piece.hf_name]].shape)
        if found != wanted:
            raise EagleWeightsError(
                f"{file}: {names[piece.hf_name]} is {found}, and config.json and the target make it {wanted}"
            )
    known = {piece.hf_name for piece in layout} | {D2T, T2D}
    for name, own in names.items():
        if name not in known and not name.endswith(_IGNORED):
            raise EagleWeightsError(f"{file}: {own} is no tensor of an EAGLE-3 head with this config.json")


def _ids(file: Path, tables: Mapping[str, Tensor], shape: HeadShape, vocab: int) -> Tensor | None:
    """Return the token of each head row. d2t holds offsets: row i is token i + d2t[i] (speculators, SpecForge, the
    EAGLE authors)."""
    rows = shape.draft_vocab or vocab
    table = tables.get(D2T)
    if table is None:
        if rows != vocab:
            raise EagleWeightsError(f"{file}: {D2T} is missing, and the head has {rows} rows for {vocab} tokens")
        return None
    if list(table.shape) != [rows]:
        raise EagleWeightsError(f"{file}: {D2T} is {list(table.shape)}, and the head has {rows} rows")
    ids = table.to(torch.int64) + torch.arange(rows)
    if wrong := ((ids < 0) | (ids >= vocab)).nonzero().flatten().tolist():
        at = wrong[0]
        raise EagleWeightsError(
            f"{file}: {D2T}[{at}] = {int(table[at])} makes token {int(ids[at])} of row {at}, and the target has tokens "
            f"0 to {vocab - 1}"
        )
    if len(set(ids.tolist())) != rows:
        raise EagleWeightsError(f"{file}: {D2T} gives two rows of the head the same token")
    can = tables.get(T2D)
    if can is not None and (list(can.shape) != [vocab] or not torch.equal(can.nonzero().flatten(), ids.sort().values)):
        raise EagleWeightsError(f"{file}: {T2D} and {D2T} name different tokens")
    return None if torch.equal(ids, torch.arange(vocab)) else ids
