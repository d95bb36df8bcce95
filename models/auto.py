"""Any other architecture, for the learner: `AutoModelForCausalLM` behind the interface of our Transformer.

Translates packed segments to padded batches, which every transformers model computes correctly. Never used by the
native engine, and never bitwise batch-invariant.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from models.config import UnsupportedModelError
from models.layout import Slice
from models.packed import PackedContext


class AutoTransformer(nn.Module):
    """The network of a transformers causal language model: tokens -> hidden -> logits over packed segments.

    For the learner: `fully_shard` each of `model.blocks`, the model, and register "logits" as a forward method, as for
    Transformer. Segments are padded to the longest: correct for every architecture, slower than packing.
    """

    def __init__(self, model: nn.Module) -> None:
        """model: a transformers causal LM whose logits are its output embedding applied to its last hidden state (a
        final soft cap or scale included). Raises UnsupportedModelError for any other. All weights are loaded."""
        super().__init__()
        self.model: Any = model
        self._check_head()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "AutoTransformer":
        """Load a Hugging Face directory; never downloads, never runs code from the checkpoint."""
        from transformers import AutoConfig, AutoModelForCausalLM  # slow import, unused by the engine

        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, attn_implementation=attention_of(config)
        )
        return cls(model.to(device))

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers: the units of sharding."""
        layers = self.model.config.get_text_config().num_hidden_layers
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == layers:
                return module
        raise _unsupported(self.model, f"has no list of {layers} layers")

    def forward(self, tokens: Tensor, context: PackedContext) -> Tensor:
        """tokens int64 [T] -> hidden states before the head [T, H]."""
        lengths, known = context.cu_seqlens.diff().long(), context.segments
        segments = torch.arange(lengths.numel(), device=tokens.device)
        rows = torch.repeat_interleave(segments, lengths, output_size=tokens.numel()), context.positions
        shape = lengths.numel(), int(lengths.max()) if known is None else known.longest
        padded = tokens.new_zeros(shape).index_put(rows, tokens)
        mask = tokens.new_zeros(shape).index_put(rows, torch.ones_like(tokens))
        output = self.model.base_model(
            input_ids=padded,
            attention_mask=mask,
            position_ids=torch.arange(shape[1], device=tokens.device).expand(shape),
            use_cache=False,
        )
        hidden: Tensor = output.last_hidden_state[rows]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T, V]"""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        config = self.model.config.get_text_config()
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare three tokens' logits with the model's own: an unsupported head must not train on wrong logits."""
        was_training = self.model.training
        self.model.eval()
        device = next(self.model.parameters()).device
        tokens = torch.arange(3, device=device)
        theirs = self.model(input_ids=tokens[None], use_cache=False).logits[0].float()
        ours = self.logits(self(tokens, PackedContext.from_lengths([3], device))).float()
        self.model.train(was_training)
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
            raise _unsupported(self.model, "computes more than head(hidden) for its logits")

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding's weights."""
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    def layout(self) -> list[Slice]:
        """Return every parameter and persistent buffer under transformers' own name, tied ones once."""
        kept = self.model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, tensor in kept.items():
            first.setdefault(id(tensor), name)
        return [Slice(name, f"model.{name}") for name in first.values()]

    @property
    def converts(self) -> bool:
        """Whether transformers converts the checkpoint's tensors to others."""
        names = self.model.state_dict(keep_vars=True)
        empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in names.items()}
        stored = self.as_stored(dict(empty))
        return {n: t.shape for n, t in stored.items()} != {n: t.shape for n, t in empty.items()}

    def as_stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors in the checkpoint's format (transformers 5 fuses some, such as experts, in memory)."""
        from transformers.core_model_loading import revert_weight_conversion

        stored: dict[str, Tensor] = revert_weight_conversion(self.model, tensors)
        return stored

    def hf_config(self) -> dict[str, Any]:
        """config.json"""
        config: dict[str, Any] = self.model.config.to_dict()
        return config | {"architectures": [type(self.model).__name__]}

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """Recompute each layer in the backward pass."""
        # "gradient checkpointing" until transformers renamed it in 5.x
        verb = "enable" if enabled else "disable"
        switch = getattr(self.model, f"activation_checkpointing_{verb}", None)
        switch = switch or getattr(self.model, f"gradient_checkpointing_{verb}")
        switch({"use_reentrant": False}) if enabled else switch()


def attention_of(config: Any) -> str | None:
    """Return transformers' attention for a model of that configuration; None: its own choice.

    Torch's fused attention cannot cap attention scores (Gemma 2): transformers 5.19 chooses it anyway, and silently
    omits the cap.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None else None


def _unsupported(model: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__}, which {why},", "models.auto.AutoTransformer", "train another model"
    )
