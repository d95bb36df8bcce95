"""How the native engine starts in its process."""

import sys

import torch

from actors.engine.calibrated import calibrated
from actors.engine.native.engine import NativeEngine
from actors.engine.wire import Start
from actors.pacing import Pacer
from config.formats import low_bit_format
from config.model import batch_invariance
from drafter.build import build_drafters
from models.checkpoint import load_model
from models.device import choose_device
from models.dtypes import DTYPES
from models.lora import AdapterBase
from models.ops.triton.low_bit_operators import require_products
from models.ops.triton.operators import installed
from policies.speculation.build import build_budget, build_policy


def build(start: Start) -> NativeEngine:
    """The engine that serves the model at `start.model.path`."""
    torch.manual_seed(start.seed)
    options, key = start.options, "rollout.engine.device"
    device = choose_device(options.device, key)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    invariant = batch_invariance(start.model, device, key, engine=True)
    if invariant and device != "cpu" and not installed():
        raise ValueError(
            "model.batch_invariant=engine needs the Triton kernels on a GPU, and Triton is not installed for this "
            "process: pip install triton, or leave model.batch_invariant unset"
        )
    low_bit = low_bit_format(start.quantization, device)
    if low_bit is not None:
        require_products(low_bit, device)
    dtype = DTYPES[start.model.dtype]
    model = load_model(
        start.model.path,
        dtype=dtype,
        device=device,
        batch_invariant=invariant,
        low_bit=low_bit,
    )
    speculation = start.speculation
    drafters, policy, news = {}, None, None
    if speculation.mode != "off":
        sys.path += [path for path in start.code_paths if path not in sys.path]  # behind ours: nothing hides it
        drafters = build_drafters(speculation, model, options)
        # On a GPU a node of a tree sums its keys in another order than plain decoding would.
        costs, news = calibrated(start, device)
        policy = build_policy(speculation, list(drafters), trees=device == "cpu" or not invariant, costs=costs)
    return NativeEngine(
        model,
        options,
        weights_version=start.weights_version,
        drafters=drafters,
        policy=policy,
        budget=build_budget(speculation, policy, options.max_running),
        verification=speculation.verification,
        hidden_tokens=speculation.eagle.context_tokens,
        recording_bytes=start.recording_bytes,
        recorded_layers=start.recorded_layers,
        news=None if policy is None else news,
        adapter_base=None if start.lora is None else AdapterBase(start.model.path, start.lora, dtype),
        pacer=None if start.pace is None else Pacer(start.pace, "engine"),
    )
