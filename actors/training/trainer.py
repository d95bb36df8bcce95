"""One rank of the learner: the target model, its optimizer, and the steps that change it. No Ray, no files but its own
checkpoint. Callers decide what is trained on, when, and where weights go (actors.training.outgoing).

With N ranks, N of these run the same calls in lockstep (FSDP2). The numbers equal those of one rank within float
tolerance, because every normaliser is computed over the whole mini-batch. On the CPU everything is deterministic: the
same calls in the same order give bitwise the same losses.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.training import batches
from actors.training.checkpoint import CheckpointError
from actors.training.errors import NonFiniteError
from actors.training.network import LogProbModel, build_network, computing_in, fit_out, hidden_size_of
from actors.training.optimizer import Optimizers, clip_gradients, gradient_norm
from actors.training.outgoing import OutgoingWeights
from actors.training.parallel import Rank, frozen_sums, shard
from actors.training.recording import StepRecording
from actors.training.reference import AdaptersBefore, Frozen, Reference
from actors.training.statistics import StepStatistics
from config.formats import FORMATS, Quantization
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions, batch_invariance
from config.objective import ObjectiveOptions
from contracts.training import Demonstration, StepResult, TrainSequence
from models.dtypes import DTYPES
from models.transformer import Transformer
from policies.kl import kl_values
from policies.objectives import LossInputs, sequence_coefficients, token_losses

BASE = "base"  # in a checkpoint of adapters: identifies the weights that they belong to


class Trainer:
    """See the module docstring. Construct, then `begin` a phase, then step."""

    def __init__(
        self,
        model: ModelOptions,
        learner: LearnerOptions,
        objective: ObjectiveOptions,
        *,
        rank: Rank | None = None,
        init: Literal["checkpoint", "random"] = "checkpoint",
        seed: int = 0,
        quantization: Quantization = "none",
        adapters_only: bool = False,
        force_sharding: bool = False,
    ) -> None:
        """Build the network on this rank's device. `quantization`: rollout.quantization, the format of published
        weights, mirrored by the forward pass if learner.quantization says so. Training, checkpoints and exports stay in
        full precision. `adapters_only`: with learner.lora, publish adapters instead of merged weights.
        `force_sharding`: FSDP2 also with one rank (needs a group).

        Raises UnsupportedModelError for a low-bit format, or learner.lora, of an architecture that is not ours,
        ModelConfigError for a format whose groups do not divide the model, AdapterError for learner.lora.path.
        """
        self.options, self.objective, self.model_options = learner, objective, model
        self._form = FORMATS.get(quantization)
        self.rank = rank or Rank()
        self.publish_dtype = DTYPES[model.dtype]
        # bfloat16 compute keeps float32 master weights. Parameters are cast for each micro-batch, so that the learner
        # computes with exactly the engine's numbers. With LoRA only the adapters are masters, always float32: frozen
        # weights have the engine's dtype.
        wide = learner.autocast_bf16 and learner.lora is None
        self._compute_dtype = torch.bfloat16 if wide else None
        self._seed = seed
        invariant = batch_invariance(model, self.rank.device.type, "learner.device")
        self._build_args = {
            "init": init,
            "seed": seed,
            "dtype": torch.float32 if wide else self.publish_dtype,
            "device": self.rank.device,
            "batch_invariant": invariant,
        }
        self._sharded = self.rank.size > 1 or force_sharding
        self.module = self._build()
        self.network = self.module.network
        self.weights = OutgoingWeights(
            self.network, self.rank, model, form=self._form, lora=learner.lora, adapters_only=adapters_only
        )
        self.network.set_activation_checkpointing(learner.activation_checkpointing)
        self.module.entropy_gradient = objective.entropy_coef > 0
        # Common prefixes are computed once. Not on devices, whose attention would unroll them again.
        self.shares_prefixes = isinstance(self.network, Transformer) and self.rank.device.type == "cpu"
        self._trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._reference: Reference | None = None
        if objective.kl != "none" and learner.lora is not None:
            self._reference = AdaptersBefore(self.module)
        elif objective.kl != "none":
            self._reference = Frozen(self.module, self._build() if self._sharded else deepcopy(self.module))
        self._optimizers: Optimizers | None = None

    # Phases -----------------------------------------------------------------------------------------------------

    def begin(self, optimizer: OptimizerOptions, total_steps: int) -> None:
        """Start a phase (warm start, RL): a fresh optimizer and schedule of `total_steps` optimizer steps; the current
        weights become the reference of the KL term."""
        matrices = [p for block in self.network.blocks for p in block.parameters() if p.dim() == 2]
        self._optimizers = Optimizers(self._trained, matrices, optimizer, total_steps)
        if self._reference is not None:
            self._reference.take()

    @property
    def optimizers(self) -> Optimizers:
        """The current phase's optimizers."""
        if self._optimizers is None:
            raise RuntimeError("no phase was begun: call begin(optimizer, total_steps) first")
        return self._optimizers

    def rest(self, *, optimizer: bool) -> None:
        """Free this device for others until the next step: release torch's cached memory, and with `optimizer` move its
        state to the host."""
        if optimizer and self._optimizers is not None:
            self._optimizers.rest()
        if self.rank.device.type == "cuda":
            torch.cuda.empty_cache()

    # Steps ------------------------------------------------------------------------------------------------------

    def rl_step(
        self,
        sequences: Sequence[TrainSequence],
        *,
        temperature: float,
        asked: int | None = None,
        recording: StepRecording | None = None,
    ) -> StepResult:
        """Run one RL step: `mini_batches` optimizer steps over consecutive parts of `sequences`.

        Old log-probs are the learner's own under the weights at the start of this call. `temperature` is the sampler's,
        > 0. `asked`: number of responses that the step requested, trained on or not. A fixed normaliser divides each
        mini-batch by an equal share of it, so that their mean gradient is that of the whole. All ranks pass the same
        sequences. `recording` takes the hidden states under those weights; it changes no number. Raises ValueError for
        bad input, NonFiniteError.
        """
        if not temperature > 0:
            raise ValueError(f"rollout.sampling.temperature is {temperature}: learning needs one above 0")
        batches.check_sequences(sequences, self.module.vocab_size)
        if asked is not None and asked < len(sequences):
            raise ValueError(f"{len(sequences)} sequences to learn from, but only {asked} responses were asked for")
        if not sequences:
            return StepResult(
                losses=(),
                grad_norms=(),
                metrics={"lr": self.optimizers.lr},
                tokens=0,
                seconds={"logprobs": 0.0, "train": 0.0},
            )
        started_s, start_s = time.time(), time.perf_counter()
        statistics = StepStatistics(self.rank.device, (s.sampler for s in sequences))
        parts = batches.split_mini_batches(len(sequences), self.options.mini_batches)
        share = None if asked is None else asked / len(parts)
        minis = [self._mini_batch([sequences[i] for i in part], share, statistics.samplers) for part in parts]
        if recording is not None:
            own = [s for mini in minis for batch in mini.micro for s in batch.sequences]
            recording.choose(own, hidden_size_of(self.network))
        # The first mini-batch uses its detached current ones: no update has happened yet.
        old = [self._old_logprobs(mini, temperature, statistics, recording) for mini in minis[1:]]
        compared = self.objective.needs_reference_in_loss
        reference = [self._reference_logprobs(mini, temperature) if compared else [] for mini in minis]
        trained_s = time.perf_counter()
        values, norms, lr = [], [], 0.0
        for number, mini in enumerate(minis):
            loss = torch.zeros((), dtype=torch.float64, device=self.rank.device)
            for m, batch in enumerate(mini.micro):
                with self._computing(self.module):
                    taken = recording if number == 0 else None
                    logprobs, logprobs_t1, entropy = self._forward(self.module, batch, temperature, taken)
                    if number == 0:
                        statistics.add_gap(*batches.compared_with_sampler(batch, logprobs, logprobs_t1), batch)
                    old_logprobs = logprobs.detach() if number == 0 else old[number - 1][m]
                    inputs = LossInputs(
                        logprobs=logprobs,
                        old_logprobs=old_logprobs,
                        sampler_logprobs=batch.sampler_logprobs,
                        advantages=batch.advantages,
                        segments=batch.segments,
                        reference_logprobs=reference[number][m] if reference[number] else None,
                        entropy=entropy,
                    )
                    losses = token_losses(inputs, self.objective)
                    statistics.add_tokens({"entropy": entropy} | losses.metrics)
                    loss += self._backward(losses.loss, batch)
            value, norm, lr = self._update(loss)
            values.append(value)
            norms.append(norm)
        metrics = statistics.reduce(self.rank) | _means(values, norms, lr)
        if recording is not None:
            metrics |= recording.metrics(self.rank)
        seconds = {"logprobs": trained_s - start_s, "train": time.perf_counter() - trained_s}
        tokens = sum(m.computed_tokens for m in minis)
        return StepResult(
            losses=tuple(values),
            grad_norms=tuple(norms),
            metrics=metrics,
            tokens=tokens,
            seconds=seconds,
            started_s=started_s,
        )

    def sft_step(self, demonstrations: Sequence[Demonstration]) -> StepResult:
        """Run one optimizer step on the mean cross-entropy (nats) of all response tokens."""
        batches.check_sequences(demonstrations, self.module.vocab_size)
        if not demonstrations:
            raise ValueError("sft_step needs at least one demonstration")
        started_s, start_s = time.time(), time.perf_counter()
        mini = self._mini_batch(demonstrations)
        loss = torch.zeros((), dtype=torch.float64, device=self.rank.device)
        for batch in mini.micro:
            with self._computing(self.module):
                logprobs, _, _ = self._forward(self.module, batch, 1.0)
                loss += self._backward(-logprobs, batch)
        value, norm, lr = self._update(loss)
        seconds = {"logprobs": 0.0, "train": time.perf_counter() - start_s}
        return StepResult(
            losses=(value,),
            grad_norms=(norm,),
            metrics=_means([value], [norm], lr),
            tokens=mini.computed_tokens,
            seconds=seconds,
            started_s=started_s,
        )

    @torch.no_grad()
    def reference_kl(self, sequences: Sequence[TrainSequence], *, temperature: float) -> dict[int, NDArray[np.float32]]:
        """Return the estimator `objective.kl` of every response token under the current weights against the reference,
        for this rank's share of the sequences, by index. For KL in the reward: advantages need it before any update.
        All ranks pass the same sequences."""
        if self._reference is None or self.objective.kl == "none":
            raise ValueError("objective.kl is none: there is no reference to compare with")
        batches.check_sequences(sequences, self.module.vocab_size)
        if not sequences:
            return {}
        mini, values = self._mini_batch(sequences, len(sequences)), list[Tensor]()
        reference = self._reference_logprobs(mini, temperature)
        with self._computing(self.module):
            for batch, ref in zip(mini.micro, reference, strict=True):
                logprobs = self._forward(self.module, batch, temperature)[0]
                values.append(kl_values(logprobs, ref, self.objective.kl))
        found = dict[int, NDArray[np.float32]]()
        on_host = torch.cat(values).cpu().numpy()
        lengths = [(i, n) for batch in mini.micro for i, n in zip(batch.indices, batch.response_lengths, strict=True)]
        for (i, length), end in zip(lengths, np.cumsum([n for _, n in lengths]), strict=True):
            found[i] = on_host[end - length : end]
        return found

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence], *, temperature: float) -> list[Tensor]:
        """Return log-probs of this rank's share, a tensor [R] per micro-batch (for tests and benchmarks)."""
        micro = self._mini_batch(sequences, len(sequences)).micro
        with self._computing(self.module):
            return [self._forward(self.module, batch, temperature)[0] for batch in micro]

    # Checkpoint -------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Save weights (with LoRA the adapters), optimizer, schedule, reference and RNG into `directory`, shared by all
        ranks. Not atomic by itself: see actors.training.checkpoint."""
        from actors.training.persistence import save_tensors  # here: a learner need not import it at its start

        save_tensors(self._state(), directory, distributed=self.rank.size > 1)

    def load(self, directory: str | Path) -> None:
        """Continue exactly where `save` was called, in the same phase; the number of ranks may differ."""
        state = self._state()
        self._load(state, directory)
        torch.set_rng_state(state["rng"])
        self.optimizers.steps_done = int(state["steps_done"].item())

    def load_weights(self, directory: str | Path) -> None:
        """Load only the weights of a checkpoint, without a phase: for `export`."""
        self._load(self._weights(), directory)

    def _load(self, state: dict[str, Tensor], directory: str | Path) -> None:
        from actors.training.persistence import load_tensors

        load_tensors(state, directory, distributed=self.rank.size > 1)
        if BASE in state and not torch.equal(state[BASE], frozen_sums(self.module, self.rank)):
            raise CheckpointError(
                f"{directory} holds adapters of other weights than those at {self.model_options.path}: put the model "
                "back that they were trained on"
            )

    def _weights(self) -> dict[str, Tensor]:
        state = {f"model.{name}": p.detach() for name, p in self._trained}
        if self.options.lora is not None:
            state[BASE] = frozen_sums(self.module, self.rank)
        return state | {f"model.{name}": b for name, b in self.module.named_buffers()}

    def _state(self) -> dict[str, Tensor]:
        state = self._weights()
        state |= {f"optimizer.{name}": t for name, t in self.optimizers.state().items()}
        if self._reference is not None:
            state |= {f"reference.{name}": t for name, t in self._reference.state().items()}
        return state | {"rng": torch.get_rng_state(), "steps_done": torch.tensor(self.optimizers.steps_done)}

    # Parts of a step --------------------------------------------------------------------------------------------

    def _mini_batch(
        self,
        sequences: Sequence[TrainSequence | Demonstration],
        asked: float | None = None,
        samplers: Mapping[str, int] | None = None,
    ) -> batches.MiniBatch:
        """`asked`: number of responses that the mini-batch represents. `samplers`: numbers of the rollout workers;
        none: no statistics of them."""
        lengths = [s.drawn_tokens for s in sequences]
        weights = [s.weight if isinstance(s, TrainSequence) else 1.0 for s in sequences]
        learns = isinstance(sequences[0], TrainSequence)
        aggregation = self.objective.aggregation if learns else "token_mean"
        coefficients = sequence_coefficients(lengths, weights, aggregation, self.objective.sum_divisor, asked)
        return batches.build_mini_batch(
            sequences,
            coefficients,
            self.rank,
            budget_tokens=self.options.micro_batch_tokens,
            packing=self.options.packing,
            shared=self.shares_prefixes,
            samplers=samplers,
        )

    def _forward(
        self,
        module: LogProbModel,
        batch: batches.TokenBatch,
        temperature: float,
        recording: StepRecording | None = None,
    ) -> tuple[Tensor, ...]:
        if recording is not None:
            with module.recorded(recording, batch):
                return self._forward(module, batch, temperature)
        outputs: tuple[Tensor, ...] = module(batch.tokens, batch.context, batch.rows, batch.targets, temperature)
        return outputs

    def _computing(self, module: LogProbModel) -> AbstractContextManager[None]:
        """Return the context of forward and backward of `module`; FSDP2 casts by its own policy."""
        return computing_in(module, None if self._sharded else self._compute_dtype)

    def _backward(self, token_losses: Tensor, batch: batches.TokenBatch) -> Tensor:
        """Add this micro-batch's gradient; return its part of the mini-batch's loss."""
        loss = (token_losses * batch.coefficients).sum()
        (loss * self.rank.size).backward()  # type: ignore[no-untyped-call]  # FSDP2 averages over ranks; parts are summed
        return loss.detach().double()

    def _update(self, loss: Tensor) -> tuple[float, float, float]:
        """Clip and apply gradients; return (loss over all ranks, gradient norm, learning rate)."""
        parameters = [p for _, p in self._trained]
        # one wait for both
        value, norm = torch.stack((self.rank.sum(loss[None])[0], gradient_norm(parameters).double())).tolist()
        if not (math.isfinite(value) and math.isfinite(norm)):
            self.optimizers.zero_grad()
            raise NonFiniteError(
                f"optimizer step {self.optimizers.steps_done}: loss {value}, gradient norm {norm}; the weights are "
                "unchanged. Look at learner.optimizer.lr and at the rewards of this step"
            )
        clip_gradients(parameters, norm, self.optimizers.options.max_grad_norm)
        lr = self.optimizers.step()
        self.optimizers.zero_grad()
        return value, norm, lr

    @torch.no_grad()
    def _old_logprobs(
        self, mini: batches.MiniBatch, temperature: float, statistics: StepStatistics, recording: StepRecording | None
    ) -> list[Tensor]:
        old = []
        with self._computing(self.module):
            for batch in mini.micro:
                logprobs, logprobs_t1, _ = self._forward(self.module, batch, temperature, recording)
                statistics.add_gap(*batches.compared_with_sampler(batch, logprobs, logprobs_t1), batch)
                old.append(logprobs)
        return old

    @torch.no_grad()
    def _reference_logprobs(self, mini: batches.MiniBatch, temperature: float) -> list[Tensor]:
        if self._reference is None:
            return []
        with self._reference.computing() as module, self._computing(module):
            return [self._forward(module, batch, temperature)[0] for batch in mini.micro]

    # Building ---------------------------------------------------------------------------------------------------

    def _build(self) -> LogProbModel:
        network = build_network(self.model_options, **self._build_args)  # type: ignore[arg-type]
        # The frozen reference mirrors too, so that its KL is 0 before the first update. Gathered parameters do not
        # count changes.
        mirrors = self.options.quantization == "rollout"
        fit_out(
            network,
            low_bit=self._form,
            mirror_from=self.publish_dtype if mirrors else None,
            cached=not self._sharded,
            lora=self.options.lora,
            seed=self._seed,
        )
        module = LogProbModel(network, self.rank.device)
        module.bf16_gradients = self.options.lora is not None and self.options.lora.bf16_gradients
        if self._sharded:
            shard(module, network.blocks, self.rank, compute_dtype=self._compute_dtype)
        return module


def _means(losses: Sequence[float], norms: Sequence[float], lr: float) -> dict[str, float]:
    return {"loss/mean": sum(losses) / len(losses), "grad_norm/mean": sum(norms) / len(norms), "lr": lr}
