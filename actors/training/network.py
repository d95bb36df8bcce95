"""The learner's target model: tokens in, log-probs of the response tokens out.

Chooses the implementation, and computes log-softmax over the vocabulary in chunks of rows, so that the logits of all
tokens never exist together (on CUDA and with a frozen head: `actors.training.head`). Independent of losses, optimizers
and ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from actors.training.batches import TokenBatch
from actors.training.head import chunk_bytes_on, chunk_rows_of, frozen_head_logprobs, head_logprobs
from actors.training.recording import StepRecording
from config.formats import LowBitFormat
from config.model import LoraOptions, ModelOptions
from models import ops
from models.auto import AutoTransformer, attention_of
from models.checkpoint import CausalModel, init_model, load_causal_model
from models.config import UnsupportedModelError
from models.lora import attach
from models.ops.native import takes
from models.packed import PackedContext
from models.transformer import MASTER, Transformer, final_states


def build_network(
    options: ModelOptions,
    *,
    init: Literal["checkpoint", "random"],
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> CausalModel:
    """Build the network of `model.path`, with its weights or with fresh ones from `seed`.

    Dropout is switched off, because two passes over one sequence must agree. Raises the errors of models.checkpoint.
    """
    if init == "random":
        network = _fresh(options, seed, dtype=dtype, device=device, batch_invariant=batch_invariant)
    else:
        network = load_causal_model(
            options.path,
            implementation=options.implementation,
            dtype=dtype,
            device=device,
            batch_invariant=batch_invariant,
        )
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 (not a declared attribute)
    return network


def fit_out(
    network: CausalModel,
    *,
    low_bit: LowBitFormat | None,
    mirror_from: torch.dtype | None,
    cached: bool,
    lora: LoraOptions | None,
    seed: int,
) -> None:
    """Prepare the network for low-bit rollouts and LoRA.

    With `mirror_from` (the engines' dtype), it computes as the engines do. With `lora`, it is frozen and gets adapters.
    Raises UnsupportedModelError for a network of transformers, and the errors of Transformer.mirror and
    models.lora.attach."""
    asked = {}
    if low_bit is not None:
        asked[f"rollout.quantization={low_bit.name}"] = "set rollout.quantization=none"
    if lora is not None:
        asked["learner.lora"] = "leave learner.lora out"
    if isinstance(network, Transformer):
        if low_bit is not None and mirror_from is not None:
            network.mirror(low_bit, mirror_from, cached=cached)
        if lora is not None:
            attach(network, lora, seed)
    elif asked:
        raise UnsupportedModelError(
            f"{' and '.join(asked)} of a network of transformers",
            "the learner, which knows the projections of our own architectures only",
            " and ".join(asked.values()),
        )


def _fresh(
    options: ModelOptions, seed: int, *, dtype: torch.dtype, device: torch.device, batch_invariant: bool
) -> CausalModel:
    if options.implementation != "transformers":
        try:
            return init_model(options.path, seed, dtype=dtype, device=device, batch_invariant=batch_invariant)
        except UnsupportedModelError:
            if options.implementation == "native":
                raise
    from transformers import AutoConfig, AutoModelForCausalLM  # slow import, unused for our own families

    config = AutoConfig.from_pretrained(options.path, local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(config))
    return AutoTransformer(model.to(device))


def vocab_size_of(network: CausalModel) -> int:
    """Return the number of columns of the logits."""
    if isinstance(network, Transformer):
        return network.config.vocab_size
    return int(network.model.get_output_embeddings().weight.shape[0])


def hidden_size_of(network: CausalModel) -> int:
    """Return the number of columns of the states before the head."""
    if isinstance(network, Transformer):
        return network.config.hidden_size
    return int(network.model.get_output_embeddings().weight.shape[1])


class LogProbModel(nn.Module):
    """Network and chunked head in one module, so that one forward call is one unit for sharding."""

    _recording: tuple[StepRecording, TokenBatch] | None = None  # see `recorded`
    written_out = False  # use the explicit gradient of `actors.training.head`: on devices, for the native network
    bf16_gradients = False  # of a frozen head, see LoraOptions
    entropy_gradient = False  # whether entropies carry gradient; needs a second table of [R, vocabulary]

    def __init__(self, network: CausalModel, device: torch.device) -> None:
        """`device`: determines the number of logit rows per chunk."""
        super().__init__()
        self.network = network
        self.vocab_size = vocab_size_of(network)
        self.chunk_rows = chunk_rows_of(self.vocab_size, chunk_bytes_on(device))
        self.written_out = device.type == "cuda" and isinstance(network, Transformer)

    @property
    def frozen_head(self) -> bool:
        """Whether the head has no gradient, and the kernels compute its log-probs' gradients with them."""
        if not isinstance(self.network, Transformer) or self.entropy_gradient:
            return False
        weight = self.network.head_weight
        return takes(weight) and not weight.requires_grad

    @contextmanager
    def recorded(self, recording: StepRecording, batch: TokenBatch) -> Iterator[None]:
        """Record the states of the forward of `batch` inside the block, detached: [T, W], the outputs of the
        recording's layers (from 0) before the final state. Raises ValueError for layers of a network that cannot record
        them."""
        if recording.layers and not isinstance(self.network, Transformer):
            raise ValueError("outputs of layers are recorded by model.implementation=native only")
        self._recording = recording, batch
        try:
            yield
        finally:
            self._recording = None

    def forward(
        self, tokens: Tensor, context: PackedContext, rows: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs of `targets` [R], predicted by the hidden states at `rows` [R] of `tokens` [T] in `context`.

        float32 [R] each: log-softmax(logits / temperature) (differentiable), log-softmax(logits), and the entropy of
        softmax(logits / temperature) in nats; the last two without gradient (see `entropy_gradient`).
        """
        states = self._states(tokens, context)
        if self.frozen_head and rows.numel():
            assert isinstance(self.network, Transformer)
            return frozen_head_logprobs(
                states,
                self.network.head_weight,
                rows,
                targets,
                temperature,
                chunk_rows=self.chunk_rows,
                invariant=self.network.batch_invariant,
                bf16_gradients=self.bf16_gradients,
            )
        hidden = states.index_select(0, rows)
        if self.written_out:
            assert isinstance(self.network, Transformer)
            return head_logprobs(
                hidden,
                self.network.head_weight,
                targets,
                temperature,
                chunk_rows=self.chunk_rows,
                entropy_gradient=self.entropy_gradient,
            )
        if rows.numel() <= self.chunk_rows:
            return chunk_logprobs(self.network.logits, hidden, targets, temperature, self.entropy_gradient)
        parts = []
        for h, t in zip(torch.split(hidden, self.chunk_rows), torch.split(targets, self.chunk_rows), strict=True):
            if torch.is_grad_enabled():
                part = checkpoint(
                    chunk_logprobs, self.network.logits, h, t, temperature, self.entropy_gradient, use_reentrant=False
                )
            else:
                part = chunk_logprobs(self.network.logits, h, t, temperature)
            parts.append(part)
        logprobs, logprobs_t1, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        return logprobs, logprobs_t1, entropy

    def _states(self, tokens: Tensor, context: PackedContext) -> Tensor:
        """Return the hidden states, [T, H]."""
        recording, batch = self._recording or (None, None)
        if recording is not None and recording.layers:
            assert isinstance(self.network, Transformer)
            computed = self.network(tokens, context, recording.layers)
            states = final_states(self.network, computed)
        else:
            computed = states = self.network(tokens, context)
        if recording is not None and batch is not None:
            recording.take(computed.detach(), batch)
        return states


@contextmanager
def computing_in(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Replace the parameters of `module` inside the block by copies in `dtype`, with gradients to the parameters. None:
    no change.

    The block must include the backward pass, which recomputes some parts from the module's present parameters (the
    head's chunks, activation checkpointing).
    """
    if dtype is None:
        yield
        return
    held = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if p is not None]
    copies = {p: p.to(dtype) for _, _, p in held}  # tied parameters stay tied
    for p, copy in copies.items():
        if copy is not p:
            setattr(copy, MASTER, p)
    try:
        for part, name, p in held:
            part._parameters[name] = copies[p]  # type: ignore[assignment]  # a parameter is a leaf, this is not
        yield
    finally:
        for part, name, p in held:
            part._parameters[name] = p


def chunk_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as LogProbModel.forward, for one chunk of rows."""
    logits = head(hidden).float()
    scaled = logits if temperature == 1.0 else logits / temperature
    table = ops.log_softmax(scaled)  # summed as in the engine's sampler
    logprobs = -F.nll_loss(table, targets, reduction="none")  # a gather, but no view: FSDP2 hooks the output
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(table.exp() * table).sum(-1)
    with torch.no_grad():
        if temperature == 1.0:
            return logprobs, logprobs.detach(), entropy
        logprobs_t1 = ops.log_softmax(logits).gather(1, targets[:, None])[:, 0]
    return logprobs, logprobs_t1, entropy
