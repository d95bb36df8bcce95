"""Paces of GPUs: the time of a 7B model's pass, draft, micro-step and hand-over on an A100 or an H100.

The A100's passes and self-drafts are the two-stage fit to EfficientRollout's sweep of Qwen2.5-7B
(benchmarks/results/roofline_sweep.json: its engine, a copy in four bits). The rest is from `policies.roofline`: for the
H100 passes and the W8A8 copy that the product makes there; EAGLE's levels on both. Rooflines are fitted to its grid,
since an engine queries one per pass. Owns these choices; measures nothing.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Literal

from benchmarks.harness import ROOT
from benchmarks.tools.qwen import network, qwen
from benchmarks.tools.two_stage import TwoStage, Work
from config.drafter import DrafterOptions
from config.formats import FORMATS, LowBitFormat
from config.network import Network
from config.strategy import Strategy
from policies.calibration.roofline import UNKNOWN_GPU, MeasuredPass, Roofline, fit_roofline
from policies.roofline.devices import DEVICES, Device
from policies.roofline.kernels import draft_kernels
from policies.roofline.learning import MFU, QUANTISING_BYTES, hand_over_s
from policies.roofline.memory import LearnerShape
from policies.roofline.pace import Pace
from policies.roofline.timing import DEFAULT, SWEEP, DeviceRates, step_time, time_of

DeviceName = Literal["A100", "H100"]
SWEEP_RECORD = ROOT / "benchmarks/results/roofline_sweep.json"
CONTEXT_SCALE = 20.0  # so that 200 tokens represent 4,000
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_ROWS = (1, 3, 6, 11, 17)  # per request: plain decoding, and verifications
_CONTEXTS = (300, 1000, 2000, 4000)
_LEVELS = 6  # depth of the drafts from which a level's price is taken


def pace_of(
    device: DeviceName,
    *,
    scale: float,
    model: str = "7b",
    context_scale: float = CONTEXT_SCALE,
    learner_token_s: float = 0.0,
    micro_step_tokens: int = DrafterOptions().micro_step_tokens,
    tally_dir: str = "",
) -> Pace:
    """Return the pace of Qwen2.5 of that size on `device`. `learner_token_s`: seconds there of an RL step's update, per
    response token. `micro_step_tokens`: of the drafter's trainer.

    Raises ValueError for a model on the A100 that its sweep did not have.
    """
    gpu, net = DEVICES[device], network(qwen(model))
    if device == "A100":
        if model != "7b":
            raise ValueError(f"the A100's sweep is of the 7b model, not of {model}: use --device H100")
        fitted = sweep_fit()
        target, copied, eagle = fitted.target, fitted.drafter, _level("eagle", net, gpu, SWEEP)
    else:
        target = fit_roofline(list(_passes(net, gpu, DEFAULT)), free=UNKNOWN_GPU)
        copied = _level("self", net, gpu, DEFAULT, FORMATS["w8a8"])
        eagle = _level("eagle", net, gpu, DEFAULT)
    one = LearnerShape(ranks=1, micro_batch_tokens=0, checkpointing=False, master_bytes=4, compute_bytes=2)
    return Pace(
        device=f"{device}, Qwen2.5-{model}",
        scale=scale,
        target=target,
        levels={"eagle": eagle, "self": copied},
        context_scale=context_scale,
        copy_s=QUANTISING_BYTES * net.num_layers * net.matrix_parameters / gpu.bandwidth_bytes_s,
        micro_step_s=micro_step_s(net, gpu, micro_step_tokens),
        learner_token_s=learner_token_s,
        hand_over_s=hand_over_s(net, one, gpu, same_gpu=True)["direct"],
        tally_dir=tally_dir,
    )


def sweep_fit() -> TwoStage:
    """Return the fit to the A100's sweep."""
    sweep = json.loads(SWEEP_RECORD.read_text(encoding="utf-8"))["sweeps"][0]
    return TwoStage(work=Work(**sweep["work"]), **sweep["fitted"])


def micro_step_s(net: Network, gpu: Device, tokens: int) -> float:
    """Return the seconds of a micro-step of the drafter's trainer on `tokens` tokens. Forward and backward of its layer
    and its input fusion take 6 flops per weight and token; the target's head, which is not trained, takes 4."""
    own = net.layer_parameters + 2 * net.hidden_size**2
    flops = 6.0 * own + 4.0 * net.embedding_parameters
    return tokens * flops / (MFU * gpu.bf16_flops_s)


def _passes(net: Network, gpu: Device, rates: DeviceRates) -> Iterator[MeasuredPass]:
    for requests in _REQUESTS:
        for rows in _ROWS:
            for context in _CONTEXTS:
                seconds = step_time(net, gpu, requests, rows, context, rates).ms / 1e3
                yield MeasuredPass(requests, requests * rows, requests * context, seconds)


def _level(drafter: str, net: Network, gpu: Device, rates: DeviceRates, form: LowBitFormat | None = None) -> Roofline:
    """Return the cost of one drafted token per request, without the step's host work, which counts with the pass."""

    def levels() -> Iterable[MeasuredPass]:
        for requests in _REQUESTS:
            for context in _CONTEXTS:
                kernels = draft_kernels(net, requests, Strategy(drafter, _LEVELS), context, form)
                seconds = (time_of(kernels, gpu, rates).ms / 1e3 - rates.host_s) / _LEVELS
                yield MeasuredPass(requests, requests, requests * context, seconds)

    return fit_roofline(list(levels()), free=UNKNOWN_GPU)
