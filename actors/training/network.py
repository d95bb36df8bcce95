"""The target model as the learner uses it: tokens in, log-probs of the response tokens out.

Owns which implementation is built, and the log-softmax over the vocabulary, which is computed in chunks of rows so
that the logits of all tokens never exist together. Knows nothing of losses, optimizers or ranks.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actors.training.automodel import AutoModelNetwork
from models.checkpoint import hf_state_dict, init_model, load_model, read_config
from models.config import ModelConfig, UnsupportedModelError
from models.options import ModelOptions
from models.packed import PackedContext
from models.transformer import Transformer

LOGITS_CHUNK_BYTES = 64 * 2**20  # float32 logits that exist at once; with fewer rows nothing is recomputed
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_network(
    options: ModelOptions,
    *,
    init: Literal["checkpoint", "random"],
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> Transformer | AutoModelNetwork:
    """The network of `model.path`, with its weights or with fresh ones from `seed`.

    implementation=auto is our own transformer where it supports the architecture, transformers' AutoModel otherwise.
    """
    implementation = options.implementation
    if implementation == "auto":
        try:
            ModelConfig.from_hf(read_config(options.path))
            implementation = "native"
        except UnsupportedModelError:
            implementation = "transformers"
    if implementation == "transformers":
        return AutoModelNetwork.build(options.path, init=init, seed=seed, dtype=dtype, device=device)
    if init == "random":
        return init_model(options.path, seed, dtype=dtype, device=device, batch_invariant=batch_invariant)
    return load_model(options.path, dtype=dtype, device=device, batch_invariant=batch_invariant)


def blocks_of(network: Transformer | AutoModelNetwork) -> list[nn.Module]:
    """The decoder layers: units of sharding, and where Muon's matrices are."""
    return list(network.blocks)


def vocab_size_of(network: Transformer | AutoModelNetwork) -> int:
    """Columns of the logits."""
    return network.vocab_size if isinstance(network, AutoModelNetwork) else network.config.vocab_size


def full_state(network: Transformer | AutoModelNetwork) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors under their Hugging Face names), whole also if the model is sharded: all ranks call it."""
    if isinstance(network, AutoModelNetwork):
        return network.hf_config(), network.hf_state_dict()
    return network.config.to_hf(), hf_state_dict(network)


class LogProbModel(nn.Module):
    """Network and chunked head in one module, so that one forward call is one unit for sharding."""

    def __init__(self, network: Transformer | AutoModelNetwork, chunk_bytes: int = LOGITS_CHUNK_BYTES) -> None:
        super().__init__()
        self.network = network
        self.vocab_size = vocab_size_of(network)
        self.chunk_rows = max(1, chunk_bytes // (4 * self.vocab_size))

    def forward(
        self, tokens: Tensor, cu_seqlens: Tensor, rows: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of `targets` [R], predicted by the hidden states at `rows` [R] of `tokens` [T].

        Returns float32 [R] each: log-softmax(logits / temperature) (differentiable), log-softmax(logits), and the
        entropy of softmax(logits / temperature) in nats; the last two without gradient.
        """
        hidden = self.network(tokens, PackedContext(cu_seqlens)).index_select(0, rows)
        if rows.numel() <= self.chunk_rows:
            return chunk_logprobs(self.network.logits, hidden, targets, temperature)
        parts = []
        for h, t in zip(torch.split(hidden, self.chunk_rows), torch.split(targets, self.chunk_rows), strict=True):
            if torch.is_grad_enabled():
                part = checkpoint(chunk_logprobs, self.network.logits, h, t, temperature, use_reentrant=False)
            else:
                part = chunk_logprobs(self.network.logits, h, t, temperature)
            parts.append(part)
        logprobs, logprobs_t1, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        return logprobs, logprobs_t1, entropy


def chunk_logprobs(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See LogProbModel.forward; of one chunk of rows."""
    logits = head(hidden).float()
    scaled = logits if temperature == 1.0 else logits / temperature
    table = F.log_softmax(scaled, dim=-1)
    logprobs = table.gather(1, targets[:, None])[:, 0]
    with torch.no_grad():
        entropy = -(table.exp() * table).sum(-1)
        if temperature == 1.0:
            return logprobs, logprobs.detach(), entropy
        logprobs_t1 = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    return logprobs, logprobs_t1, entropy
