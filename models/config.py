"""The shape of a decoder-only transformer, read from and written to Hugging Face's config.json.

Defines which architectures and options the native transformer supports; never reads weights, never imports torch.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from config.formats import DEEPEST, LowBitFormat
from config.network import Network

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

ARCHITECTURES: Mapping[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",  # Llama without biases, if its window covers all positions
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_MAX_POSITIONS: Mapping[Family, int] = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_MISTRAL_WINDOW, _MISTRAL_KV_HEADS = 4096, 8  # transformers' defaults for absent keys


class ModelConfigError(ValueError):
    """config.json is not a usable model configuration; the message names the key."""


class UnsupportedModelError(ModelConfigError):
    """The model is valid but not supported by this implementation; the message lists the supported ones."""

    def __init__(
        self,
        what: str,
        limits: str = "this version",
        remedy: str = f"rollouts need one of {', '.join(ARCHITECTURES)} with full attention",
    ) -> None:
        super().__init__(f"{what} is not supported by {limits}: {remedy}")


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return config.json of a model directory (or the file itself). Raises ModelConfigError if it is missing or not
    JSON."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{file} does not exist: model.path must be a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise ModelConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelConfigError(f"{file} does not hold a JSON object")
    return config


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency-dependent stretching of RoPE, as released with Llama 3.1 (see models/rope.py)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Network):
    """Every number that determines what the network computes.

    `qk_norm` (RMSNorm over each query and key head before RoPE) follows from the family: Qwen3 has it. `source` keeps
    the original config.json, so that unused keys (token ids, ...) survive a round trip.
    """

    family: Family
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3RopeScaling | None = None
    output_bias: bool = False  # on o_proj
    mlp_bias: bool = False
    initializer_range: float = 0.02
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "qk_norm", self.family == "qwen3")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ModelConfigError(f"head_dim must be even and positive for RoPE, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a config.json, in the spelling of transformers 4 or 5.

        Raises UnsupportedModelError for options that this transformer would compute differently, ModelConfigError for a
        missing or impossible value.
        """
        if config.get("quantization_config"):
            raise ModelConfigError(
                "a quantized checkpoint (quantization_config) is not supported as model.path: training needs master "
                "weights in float32 or bfloat16; give the checkpoint that it was made from, and let engines quantise "
                "it (rollout.quantization)"
            )
        family = _family(config)
        _reject_what_is_not_computed(config, family)
        rope_theta, rope_scaling = _rope(config)
        hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        if heads < 1:
            raise ModelConfigError(f"num_attention_heads must be at least 1, got {heads}")
        if config.get("head_dim") is None and hidden % heads:
            raise ModelConfigError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; set head_dim"
            )
        default_head_dim = 128 if family == "qwen3" else hidden // heads
        attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
        kv_heads = _MISTRAL_KV_HEADS if family == "mistral" and "num_key_value_heads" not in config else heads
        return cls(
            family=family,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_integer(config, "num_key_value_heads", kv_heads),
            head_dim=_integer(config, "head_dim", default_head_dim),
            max_position_embeddings=_integer(config, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[family]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else attention_bias,
            output_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            initializer_range=float(config.get("initializer_range", 0.02)),
            source=dict(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 loads as the same network; unknown keys of `source` are kept."""
        stale = {"rope_theta", "rope_scaling", "rope_parameters", "layer_types", "torch_dtype", "num_hidden_layers"}
        kept = {key: value for key, value in self.source.items() if key not in stale}
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if (scaling := self.rope_scaling) is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
        written: dict[str, Any] = {
            "architectures": [next(name for name, family in ARCHITECTURES.items() if family == self.family)],
            "model_type": self.family,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tied,
            "initializer_range": self.initializer_range,
        }
        if self.family in ("llama", "qwen3"):
            written["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            written["mlp_bias"] = self.mlp_bias
        if self.family == "mistral":
            written["sliding_window"] = self.source.get("sliding_window")  # an absent key would mean 4096
        return kept | written


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """Return the positions, in tokens, of a model of any architecture, from its config.json; None: it does not say.
    Raises ModelConfigError for an unusable one of a native architecture."""
    ours = _native(config)
    return _count(config, "max_position_embeddings") if ours is None else ours.max_position_embeddings


def attention_heads(config: Mapping[str, Any]) -> int | None:
    """Return the number of attention heads, as `longest_sequence`."""
    ours = _native(config)
    return _count(config, "num_attention_heads") if ours is None else ours.num_heads


def _native(config: Mapping[str, Any]) -> ModelConfig | None:
    try:
        return ModelConfig.from_hf(config)
    except UnsupportedModelError:
        return None


def _count(config: Mapping[str, Any], key: str) -> int | None:
    found = (config.get("text_config") or config).get(key)
    return found if isinstance(found, int) else None


def require_low_bit(config: ModelConfig, form: LowBitFormat) -> None:
    """Raise ModelConfigError if the model's matrices cannot be stored in this format; the message names the first."""
    hidden = "hidden_size", config.hidden_size
    inputs = {
        "self_attn.q_proj": hidden,
        "self_attn.o_proj": ("num_attention_heads x head_dim", config.query_size),
        "mlp.gate_proj": hidden,
        "mlp.down_proj": ("intermediate_size", config.intermediate_size),
    }
    for tensor, (dimension, depth) in inputs.items():
        matrix = f"the {depth} inputs of model.layers.*.{tensor}.weight ({dimension})"
        sizes = form.group_sizes
        if sizes and all(depth % size for size in sizes):
            raise ModelConfigError(
                f"rollout.quantization={form.name} has groups of {' or '.join(map(str, sizes))} inputs, which do not "
                f"divide {matrix}: "
                "use w8a8 or fp8, which have one scale per output, or none"
            )
        if depth > DEEPEST:
            raise ModelConfigError(
                f"rollout.quantization={form.name} sums products in 32 bits, which may not hold {matrix}: use none"
            )


MOST_RANKS = 8  # of one engine, on one node


def ranks_of(model: ModelConfig) -> tuple[int, ...]:
    """Return the possible rank counts of one engine (models.tensor_parallel).

    Query heads and inner dimension are divided evenly. Key heads are too, or each is on all ranks that hold its query
    heads."""
    heads, keys, inner = model.num_heads, model.num_kv_heads, model.intermediate_size
    evenly = [n for n in range(1, MOST_RANKS + 1) if not heads % n and not inner % n]
    return tuple(ranks for ranks in evenly if not keys % ranks or not ranks % keys)


def ranks_fault(model: ModelConfig, ranks: int) -> str:
    """Return why the model cannot be divided among this many ranks; "" if it can."""
    if ranks in (fitting := ranks_of(model)):
        return ""
    return (
        f"{ranks} ranks cannot share the model's {model.num_heads} heads, {model.num_kv_heads} of keys, and its "
        f"intermediate_size of {model.intermediate_size} evenly; {', '.join(map(str, fitting))} can"
    )


def _family(config: Mapping[str, Any]) -> Family:
    architectures = config.get("architectures") or []
    if not architectures:
        by_model_type = {family: family for family in ARCHITECTURES.values()}
        if config.get("model_type") in by_model_type:
            return by_model_type[config["model_type"]]
        raise UnsupportedModelError(f"model_type {config.get('model_type')!r}")
    if architectures[0] not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {architectures[0]}")
    return ARCHITECTURES[architectures[0]]


def _reject_what_is_not_computed(config: Mapping[str, Any], family: Family) -> None:
    if family == "mistral":
        _reject_a_window_of_every_layer(config)
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={act!r}")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if other := sorted(set(layer_types) - {"full_attention"}):
            raise UnsupportedModelError(f"layer_types with {other[0]!r}")
        return
    windowed = config.get("use_sliding_window") and config.get("sliding_window") is not None
    # transformers: layers from max_window_layers on use the window; none if that is the number of layers.
    if windowed and _integer(config, "max_window_layers", 28) < _integer(config, "num_hidden_layers"):
        raise UnsupportedModelError("sliding-window attention (use_sliding_window=true)")


def _reject_a_window_of_every_layer(config: Mapping[str, Any]) -> None:
    """Reject a window that hides tokens. Mistral's applies to every layer and has no off switch; sequences within it
    are unaffected."""
    if config.get("sliding_window", _MISTRAL_WINDOW) is None:
        return
    window = _integer(config, "sliding_window", _MISTRAL_WINDOW)
    if window < (positions := _integer(config, "max_position_embeddings", _DEFAULT_MAX_POSITIONS["mistral"])):
        raise UnsupportedModelError(
            f"sliding_window={window}, shorter than max_position_embeddings={positions},",
            remedy=f"it changes nothing of sequences (prompt and response) of at most {window} tokens: if yours are no "
            f"longer, set max_position_embeddings to {window} in config.json",
        )


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3RopeScaling | None]:
    """(rope_theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (4)."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedModelError("partial rotary embedding (partial_rotary_factor)")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"RoPE scaling {kind!r} (only 'default' and 'llama3' are)")
    try:
        return theta, Llama3RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelConfigError(f"llama3 RoPE scaling lacks {error.args[0]!r}") from None


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelConfigError(f"{key} must be an integer, got {value!r}")
    return value
