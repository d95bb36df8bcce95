"""The cost model of EfficientRollout (4.2, appendix D): a target, its four-bit drafting copy, and verification.

    T_T = roofline(W_t,         B rows)           + c_T * B
    T_D = roofline(eta * W_d,   B rows)           + c_D * B
    T_V = roofline(W_t,         B * (g + 1) rows) + c_V * B       speed-up = tau * T_T / (g * T_D + T_V)

where a roofline has W + kv_share * kappa * B * S bytes at BW against rows * (C_dense + C_attn * S) operations at F.
Weights, kappa and C follow from the network's shape. The rest is fitted in two stages: F, BW, kv_share, c_T and c_V to
the target's decoding and verification together, then eta and c_D to the drafter.

Two deviations. The paper measures F by a benchmark of matrix products. Decoding alone does not determine F (at 64
requests arithmetic is a quarter of a step), but verification does. And bytes and operations overlap imperfectly: their
norm of order OVERLAP replaces the maximum. It was chosen by leaving out draft lengths and batch sizes of the A100 sweep
in turn (docs/howto/calibrate.md). Owns the fit and the toggle's boundary; reads no file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from config.formats import LowBitFormat
from config.network import Network
from policies.calibration.roofline import Roofline
from policies.calibration.solve import FloatArray, fit_positive

OVERLAP = 1.5
_SPREAD = 0.05  # relative deviation of a usual measurement: outliers lose weight
# Start of fits: the order of magnitude does not matter.
_FLOPS_S, _BYTES_S, _KV_SHARE, _REQUEST_S, _DRAFT_FACTOR = 2e14, 1.5e12, 0.7, 3e-5, 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The properties of a network that determine bytes and operations (appendix D.2)."""

    target_bytes: float  # W_t: bytes that a pass reads of the target
    drafter_bytes: float  # W_d: and of its copy, which shares embedding, head and norms with the target
    kv_token_bytes: float  # kappa in theory
    dense_flops: float  # C_dense, per row
    attention_flops: float  # C_attn, per row and token of context

    @classmethod
    def of(cls, net: Network, low_bits: LowBitFormat) -> "Work":
        """The copy's matrices are in `low_bits`."""
        return cls(
            target_bytes=net.read_bytes,
            drafter_bytes=replace(net, low_bits=low_bits).read_bytes,
            kv_token_bytes=net.kv_token_bytes,
            dense_flops=2.0 * net.read_parameters,
            attention_flops=4.0 * net.num_layers * net.query_size,
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured seconds at `batch` requests of `context` tokens each. `length`: verified draft tokens, 0 for a pass with
    one row per request."""

    batch: int
    context: int
    length: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoStage:
    """The fitted model."""

    work: Work
    flops_s: float  # F
    bytes_s: float  # BW
    kv_share: float  # share of kappa that costs time
    draft_factor: float  # eta: effect of unpacking on the fewer bytes
    target_request_s: float  # c_T
    draft_request_s: float  # c_D
    verify_request_s: float  # c_V
    overlap: float = OVERLAP

    @property
    def target(self) -> Roofline:
        return self._roofline(self.work.target_bytes, self.target_request_s)

    @property
    def drafter(self) -> Roofline:
        return self._roofline(self.draft_factor * self.work.drafter_bytes, self.draft_request_s)

    @property
    def verification(self) -> Roofline:
        return self._roofline(self.work.target_bytes, self.verify_request_s)

    def target_s(self, batch: int, context: int) -> float:
        """Return T_T: a plain decoding step."""
        return self.target.seconds(batch, batch, batch * context)

    def draft_s(self, batch: int, context: int) -> float:
        """Return T_D: one of the passes of a draft."""
        return self.drafter.seconds(batch, batch, batch * context)

    def verify_s(self, batch: int, context: int, length: int) -> float:
        """Return T_V: `length` drafted tokens and the one after them, per request."""
        return self.verification.seconds(batch, batch * (length + 1), batch * context)

    def cycle_s(self, batch: int, context: int, length: int) -> float:
        """Return g * T_D + T_V: a speculative step."""
        return length * self.draft_s(batch, context) + self.verify_s(batch, context, length)

    def speedup(self, batch: int, context: int, length: int, block_efficiency: float | None = None) -> float:
        """Return the speed-up over plain decoding (eq. 1). block_efficiency: tokens per step and request; None: every
        draft is accepted."""
        tokens = length + 1.0 if block_efficiency is None else block_efficiency
        return tokens * self.target_s(batch, context) / self.cycle_s(batch, context, length)

    def boundary(
        self,
        context: int,
        length: int,
        margin: float = 0.0,
        block_efficiency: float | None = None,
        most: int = 1 << 16,
    ) -> int:
        """Return the most requests for which, and for all fewer, the predicted speed-up exceeds 1 + margin (eq. 3); 0:
        for none. `most`: the result's maximum."""
        low, high = 0, 1
        while high < most and self.speedup(high, context, length, block_efficiency) > 1 + margin:
            low, high = high, 2 * high
        if high >= most:
            return most
        while high - low > 1:
            middle = (low + high) // 2
            on = self.speedup(middle, context, length, block_efficiency) > 1 + margin
            low, high = (middle, high) if on else (low, middle)
        return low

    def _roofline(self, weight_bytes: float, request_s: float) -> Roofline:
        return Roofline(
            fixed_s=weight_bytes / self.bytes_s,
            context_s=self.kv_share * self.work.kv_token_bytes / self.bytes_s,
            row_s=self.work.dense_flops / self.flops_s,
            pair_s=self.work.attention_flops / self.flops_s,
            request_s=request_s,
            overlap=self.overlap,
        )


def fit_two_stage(
    work: Work,
    decoding: Sequence[Timing],
    verification: Sequence[Timing],
    drafting: Sequence[Timing],
    overlap: float = OVERLAP,
) -> TwoStage:
    """Fit by least relative errors. Both kinds of the first stage have equal weight, whatever their numbers of cells.

    Raises ValueError if one of the three has no cell.
    """
    if not (decoding and verification and drafting):
        raise ValueError("a fit needs timings of decoding, of verification and of drafting")
    share = math.sqrt(len(verification) / len(decoding))

    def first(at: FloatArray) -> TwoStage:
        flops_s, bytes_s, kv_share, target_s, verify_s = (float(value) for value in np.exp(at))
        return TwoStage(
            work=work,
            flops_s=flops_s,
            bytes_s=bytes_s,
            kv_share=kv_share,
            draft_factor=_DRAFT_FACTOR,
            target_request_s=target_s,
            draft_request_s=target_s,
            verify_request_s=verify_s,
            overlap=overlap,
        )

    def of_target(at: FloatArray) -> FloatArray:
        model = first(at)
        return np.concatenate((share * _errors(model.target, decoding), _errors(model.verification, verification)))

    start = np.log([_FLOPS_S, _BYTES_S, _KV_SHARE, _REQUEST_S, _REQUEST_S])
    model = first(fit_positive(of_target, start, rounds=100))

    def second(at: FloatArray) -> TwoStage:
        return replace(model, draft_factor=float(np.exp(at[0])), draft_request_s=float(np.exp(at[1])))

    def of_drafter(at: FloatArray) -> FloatArray:
        return _errors(second(at).drafter, drafting)

    return second(fit_positive(of_drafter, np.log([_DRAFT_FACTOR, _REQUEST_S]), rounds=100))


def _errors(roofline: Roofline, timings: Sequence[Timing]) -> FloatArray:
    """Return logarithms of predicted over measured, in units of the spread."""
    return np.array(
        [
            math.log(roofline.seconds(one.batch, one.batch * (one.length + 1), one.batch * one.context) / one.seconds)
            / _SPREAD
            for one in timings
        ]
    )
