"""Any causal language model of `transformers` behind the learner's network protocol, for families that models/ lacks.

Correct before fast: sequences are padded on the right inside, which is exact for every causal architecture, attention
or recurrent, whether or not its implementation knows packed batches. The head must be the model's output embedding
alone; models that scale or cap their logits are refused, since the learner would compute other log-probs than the
engine.
"""

import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from models.config import UnsupportedModelError
from models.packed import PackedContext


class AutoModelNetwork(nn.Module):
    """Owns an AutoModelForCausalLM; see models.transformer.Transformer for the same protocol."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.decoder = [model.get_decoder()]  # in a list: it is a part of `model`, not a second child
        lists = [m for m in self.decoder[0].modules() if isinstance(m, nn.ModuleList)]
        self.blocks: list[nn.Module] = list(max(lists, key=lambda blocks: len(list(blocks)))) if lists else []
        self._check_head()

    @classmethod
    def build(
        cls, path: str, *, init: Literal["checkpoint", "random"], seed: int, dtype: torch.dtype, device: torch.device
    ) -> "AutoModelNetwork":
        """From a Hugging Face directory; raises what transformers raises if it cannot be loaded."""
        if init == "checkpoint":
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        else:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)
        for module in model.modules():  # Dropout would make two passes over one sequence differ.
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "attention_dropout", None), float):
                module.attention_dropout = 0.0
        return cls(model.to(device))

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def forward(self, tokens: Tensor, context: PackedContext) -> Tensor:
        """tokens int64 [T] -> hidden states of the decoder [T, H]."""
        lengths = context.cu_seqlens.diff().long()
        sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=tokens.device), lengths)
        shape = (lengths.numel(), int(lengths.max()))
        padded = tokens.new_zeros(shape)
        padded[sequence, context.positions] = tokens
        mask = torch.zeros(shape, dtype=torch.int64, device=tokens.device)
        mask[sequence, context.positions] = 1
        output = self.decoder[0](input_ids=padded, attention_mask=mask, use_cache=False)
        hidden: Tensor = output.last_hidden_state[sequence, context.positions]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V]"""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits

    def set_activation_checkpointing(self, enabled: bool) -> None:
        """transformers' own, without re-entrant autograd."""
        if enabled:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def hf_config(self) -> dict[str, Any]:
        """config.json"""
        config: dict[str, Any] = self.model.config.to_dict()
        return config

    def hf_state_dict(self) -> dict[str, Tensor]:
        """Detached tensors under their Hugging Face names, tied ones once. If sharded: whole, and all ranks call it."""
        whole: dict[str, Tensor] = {}
        for name, value in (dict(self.model.named_parameters()) | self._persistent_buffers()).items():
            tensor = value.detach()
            whole[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole

    def _persistent_buffers(self) -> dict[str, Tensor]:
        kept = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    def _check_head(self) -> None:
        """logits(hidden) must be the model's own logits: asked of two tokens, on the device and dtype of the model."""
        head = self.model.get_output_embeddings()
        tokens = torch.tensor([[1, 0]], device=head.weight.device)
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            theirs = self.model(input_ids=tokens, use_cache=False).logits
            ours = head(self.decoder[0](input_ids=tokens, use_cache=False).last_hidden_state)
        self.model.train(was_training)
        if not torch.allclose(theirs.float(), ours.float(), rtol=1e-3, atol=1e-3):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}, whose logits are more than a projection of its hidden states,"
            )
