"""The self-drafter: the target drafts with a low-bit copy of itself (EfficientRollout, section 4.1, Appendix C).

Owns the copy and its refresh. It is made at the first draft after the target changed, so that an engine that never
drafts with it pays nothing. There is nothing to train, save or load, since it follows every update. The sharper RL
makes a policy, the more often both agree.

The copy computes over the target's own KV cache (`drafter.protocol.TargetPasses`). Its draws have the same noise as the
target's, so where logits differ little, tokens agree at any temperature. Deviations from the paper: it draws
independently and verifies by rejection, as this does with `verification: rejection` only. Its format is W4A16 (Marlin).
Here CPUs multiply in int8, W4A8, and GPUs use the fastest format of our kernels (`SelfOptions.on`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from config.formats import FORMATS, LowBitFormat
from config.speculation import SelfOptions, SpeculationOptions
from config.strategy import Strategy
from drafter.protocol import BatchView, Drafter, Drafts, GraphCapture, TargetPasses
from models.config import ModelConfigError, require_low_bit
from models.low_bit_copy import copy_bytes, low_bit_copy, round_again
from models.transformer import Transformer


class SelfDrafter(Drafter):
    """Drafts chains with a copy of `model` in `form`; also where a strategy names a tree.

    `sampled`: drafts come with the distributions they were drawn from, for rejection sampling. Raises ModelConfigError
    if the groups of the format do not divide the model's matrices.
    """

    name = "self"
    shares_kv = True

    def __init__(self, model: Transformer, form: LowBitFormat, *, sampled: bool = False) -> None:
        require_low_bit(model.config, form)
        self._model, self._form, self._sampled = model, form, sampled
        self._copy: Transformer | None = None
        self._stale = True
        self._target: TargetPasses | None = None

    @property
    def bytes(self) -> int:
        """Memory of the copy; 0 until it has drafted."""
        return 0 if self._copy is None else copy_bytes(self._copy)

    def attach(self, target: TargetPasses) -> None:
        self._target = target

    def plan_graphs(
        self, drafts: Sequence[tuple[int, Strategy]], graph_capture: GraphCapture, truncated: bool = False
    ) -> None:
        """Capture chains, on the target's device."""
        if self._target is not None and drafts:
            self._target.plan_graphs(self.refresh(), drafts, graph_capture, truncated)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """Draft chains of min(room, depth) tokens. `caught_up`: the copy had to be made first."""
        if self._target is None:
            raise RuntimeError("the engine lends no KV cache")
        was_stale, copy = self._stale, self.refresh()
        tokens, logits = self._target.chain(copy, batch, strategy.depth, logits=self._sampled)
        self.captured = self._target.captured
        drawn_from = None if logits is None else _distributions(logits, tokens, batch.temperatures)
        return Drafts(tokens, np.minimum(batch.room, strategy.depth), distributions=drawn_from, caught_up=was_stale)

    def refresh(self) -> Transformer:
        """Return the copy, made from the target's present weights."""
        if self._copy is None:
            self._copy = low_bit_copy(self._model, self._form)
        if self._stale:
            with torch.inference_mode():
                round_again(self._copy, self._model)
            self._stale = False
        return self._copy

    def new_target(self, version: int) -> None:
        self._stale = True


def build(options: SpeculationOptions, model: Transformer, engine: object) -> SelfDrafter:
    """See `drafter.build.build_drafters`. Raises ValueError, naming the key, for what the model or device does not
    allow."""
    if model.low_bit is not None:
        raise ValueError(
            f"rollout.speculation.strategies names self beside rollout.quantization={model.low_bit.name}: a copy in "
            "few bits is no cheaper than such a target; name suffix, ngram or eagle, or set rollout.quantization=none"
        )
    form = format_of(options.self, model)
    return SelfDrafter(model, form, sampled=options.verification == "rejection")


def format_of(options: SelfOptions, model: Transformer) -> LowBitFormat:
    """Return the format of rollout.speculation.self.format for this model. auto: eight bits if groups do not divide its
    matrices. Raises ValueError, naming the key, for an impossible format."""
    device, key = model.embed_tokens.weight.device.type, "rollout.speculation.self.format"
    name = options.on(device)
    if name is None:
        raise ValueError(f"rollout.speculation.strategies names self, and {key}=none: leave one of them out")
    form = FORMATS[name]
    if device not in form.draft_devices:
        raise ValueError(
            f"{key}={name} is computed on {' and '.join(form.draft_devices)} only, and this engine is on {device}: "
            "use auto"
        )
    try:
        require_low_bit(model.config, form)
    except ModelConfigError as error:
        if options.format == "auto":
            return FORMATS["w8a8"]
        raise ValueError(f"{key}={name} does not fit the model ({error}): use auto") from error
    return form


def _distributions(logits: Tensor, tokens: NDArray[np.int64], temperatures: NDArray[np.float32]) -> Tensor:
    """Return what tokens [R, K] were drawn from, float32 [R, K, V]; one-hot at temperature 0."""
    device = logits.device
    temperature = torch.tensor(temperatures, device=device)[:, None, None]  # a copy: they are read-only
    greedy = temperature == 0
    soft = torch.softmax(logits.float() / torch.where(greedy, 1.0, temperature), dim=-1)
    chosen = torch.from_numpy(tokens.clip(min=0)).to(device)[..., None]
    return torch.where(greedy, torch.zeros_like(soft).scatter_(2, chosen, 1.0), soft)
