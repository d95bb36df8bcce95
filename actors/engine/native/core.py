"""Start of the native engine in its process."""

import sys

import torch

from actors.engine.calibrated import calibrated
from actors.engine.native.engine import NativeEngine
from actors.engine.native.ranks.join import require_devices
from actors.engine.native.ranks.leader import Followers
from actors.engine.wire import Start
from actors.pacing import Pacer
from config.formats import low_bit_format
from config.model import batch_invariance
from config.strategy import Strategy
from drafter.build import build_drafters
from models.checkpoint import load_model
from models.device import choose_device
from models.dtypes import DTYPES
from models.lora import AdapterBase
from models.ops.triton.low_bit_operators import require_products
from models.ops.triton.operators import installed
from models.tensor_parallel import RankTransformer, load_rank
from models.transformer import Transformer
from policies.speculation.build import build_budget, build_policy


def build(start: Start) -> NativeEngine:
    """Build the engine that serves the model at `start.model.path`."""
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
    dtype, path = DTYPES[start.model.dtype], start.model.path
    followers: Followers | None = None
    if (ranks := options.tensor_parallel or 1) > 1:
        require_devices(ranks, device)
        _require_whole_weights(start)
        followers = Followers(start, ranks, device)
        model: Transformer = load_rank(path, followers.join(), dtype=dtype, device=device, batch_invariant=invariant)
    else:
        model = load_model(path, dtype=dtype, device=device, batch_invariant=invariant, low_bit=low_bit)
    speculation = start.speculation
    drafters, policy, news = {}, None, None
    if speculation.mode != "off":
        sys.path += [path for path in start.code_paths if path not in sys.path]  # last: hides none of ours
        target = model.tables() if isinstance(model, RankTransformer) else model
        drafters = build_drafters(speculation, target, options)
        # On a GPU a tree node sums its keys in another order than plain decoding.
        costs, news = calibrated(start, device)
        policy = build_policy(speculation, list(drafters), trees=device == "cpu" or not invariant, costs=costs)
    engine = NativeEngine(
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
        adapter_base=None
        if start.lora is None or followers is not None
        else AdapterBase(start.model.path, start.lora, dtype),
        pacer=None if start.pace is None else Pacer(start.pace, "engine"),
        followers=followers,
        truncated=start.truncated,
    )
    if followers is not None:
        followers.wait()
    return engine


def _require_whole_weights(start: Start) -> None:
    """Raise ValueError for options that need whole weights on one rank (`launch.config.check` finds them earlier)."""
    key = f"rollout.engine.tensor_parallel={start.options.tensor_parallel}"
    if start.quantization != "none":
        raise ValueError(
            f"{key} does not go with rollout.quantization={start.quantization}: each rank would round its own part of "
            "the activations, which no learner mirrors; set one of them to its default"
        )
    named = [Strategy.parse(text).drafter for text in start.speculation.strategies or ()]
    if start.speculation.mode != "off" and "self" in named:
        raise ValueError(
            f"{key} does not go with the drafter self (rollout.speculation.strategies), whose chains run over one "
            "rank's KV cache: use ngram, suffix or eagle"
        )
