"""The EAGLE network: a fusing projection and one decoder block of the target's kind. Owns its weights and their files.

At position t the input is (embedding of token t+1, hidden state h_t after the target's final norm); the output predicts
token t+2 through the target's own LM head, and stands for h_{t+1}. As in the original, and in the checkpoints that vLLM
loads as method `eagle`, the block has no input norm and nothing norms its output; embedding and head are the target's.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.config import ModelConfig
from models.rope import Rotation
from models.transformer import AttentionContext, Block, Projection

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "config.json"
_SHAPE_KEYS = (
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "qk_norm",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
)


class EagleWeightsError(ValueError):
    """A drafter directory that is unreadable or does not fit the target."""


class EagleBlock(Block):
    """A decoder block that takes the residual stream as it comes."""

    def __init__(self, config: ModelConfig, *, invariant: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, 0, invariant=invariant, dtype=dtype, device=device)
        del self.input_norm

    def project(self, x: Tensor) -> Tensor:
        """Residual stream [T, H] -> queries, keys and values before norm and RoPE [T, (Hq + 2 Hkv) D]."""
        qkv: Tensor = self.qkv_proj(x)
        return qkv


class EagleModel(nn.Module):
    """Parameters are uninitialised: use `init_eagle` or `load_eagle`."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, batch_invariant: bool
    ) -> None:
        super().__init__()
        self.config = config
        hidden, place = config.hidden_size, str(device)
        self.fuse = Projection(2 * hidden, hidden, False, batch_invariant, dtype=dtype, device=place)
        self.block = EagleBlock(config, invariant=batch_invariant, dtype=dtype, device=place)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Embeddings of tokens t+1 [T, H] and states h_t [T, H] -> states that stand for h_{t+1} [T, H]."""
        fused: Tensor = self.fuse(torch.cat((embedded, hidden), dim=-1))
        out: Tensor = self.block(fused, rotation, context)
        return out


def init_eagle(
    config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device | str, batch_invariant: bool
) -> EagleModel:
    """Fresh weights. The fusion starts as the mean of its two inputs and the block's outputs near zero, so that an
    untrained drafter says something finite and training starts from the identity."""
    model = EagleModel(config, dtype=dtype, device=device, batch_invariant=batch_invariant)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.copy_(noise.to(dtype))
        half = 0.5 * torch.eye(config.hidden_size)
        model.fuse.weight.add_(torch.cat((half, half), dim=1).to(model.fuse.weight))
    return model


def save_eagle(model: EagleModel, directory: str | Path) -> None:
    """Write weights and the shape they need; a directory that exists keeps its other files."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, path / WEIGHTS_FILE)
    shape = {"drafter": "eagle", **_shape(model.config)}
    (path / CONFIG_FILE).write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")


def load_eagle(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    batch_invariant: bool,
) -> EagleModel:
    """The drafter in `directory` for a target of `config`. Raises EagleWeightsError naming what does not fit."""
    path = Path(directory)
    try:
        found: dict[str, Any] = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        state = load_file(path / WEIGHTS_FILE)
    except Exception as error:
        raise EagleWeightsError(
            f"{path} holds no EAGLE drafter ({error}): rollout.speculation.eagle.path must name a directory with "
            f"{CONFIG_FILE} and {WEIGHTS_FILE}, or be 'random'"
        ) from error
    for key, value in _shape(config).items():
        if found.get(key) != value:
            raise EagleWeightsError(f"{path} was made for another target: its {key} is {found.get(key)}, not {value}")
    model = EagleModel(config, dtype=dtype, device=device, batch_invariant=batch_invariant)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise EagleWeightsError(f"{path}: {error}") from error
    return model


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {key: getattr(config, key) for key in _SHAPE_KEYS}
