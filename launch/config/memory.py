"""Whether a configuration fits its GPUs' memory: from the tree and the model's config.json to a plan in bytes.

Owns what the configuration places on which GPU; `policies.roofline.memory` has the arithmetic. Imports neither torch
nor ray and queries no device. A GPU is known by its name (`cluster.gpu`), from this machine's driver, or from the
caller.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from actors.engine.capabilities import capabilities_of
from config.catalogue import at_hand
from config.formats import FORMATS, LowBitFormat
from config.network import Network
from config.strategy import Strategy
from config.tree import Config
from launch.config.issues import ConfigError, Issue
from models.config import ModelConfig, ModelConfigError, read_config
from models.peft import adapter_shapes
from policies.calibration.costs import CostModel
from policies.calibration.roofline import UNKNOWN_GPU, FreeRows
from policies.roofline.devices import Device, device_named
from policies.roofline.graphs import NOTHING_CAPTURED, predict
from policies.roofline.memory import (
    GIB,
    EngineShape,
    LearnerShape,
    MemoryPlan,
    plan_colocated,
    plan_learner,
    plan_rollout,
)
from policies.speculation.build import build_policy
from policies.speculation.graph_plan import batch_buckets, bucketed_plan

_CHOICES = ((False, False), (True, False), (False, True), (True, True))  # the cheapest first
_FEWER_BITS = "w4a16"  # a self-drafter's copy takes these bits if its format is open and the usual one does not fit
_DRIVER = Path("/proc/driver/nvidia/gpus")


def network_at(path: Path | str) -> Network:
    """Read the network from a config.json or its directory, in 16 bits. Raises ModelConfigError, OSError."""
    return ModelConfig.from_hf(read_config(path))


def network_of(config: Config) -> Network | None:
    """Return the model's shape; None if there is no usable config.json, or its architecture is not ours."""
    try:
        shape = network_at(config.model.path)
    except (ModelConfigError, OSError):
        return None
    return replace(
        shape,
        item_bytes=4 if config.model.dtype == "float32" else 2,
        low_bits=FORMATS.get(config.rollout.quantization),
    )


def drafters_of(config: Config) -> tuple[str, ...]:
    """Return the drafters of this configuration's engine on a GPU, unless strategies name others."""
    rollout = config.rollout
    native = rollout.engine.backend == "native"
    lent = capabilities_of(config).lends_cache and rollout.quantization == "none"
    found = at_hand(config.speculation, cache_lent=lent)
    if native:
        return found
    named = map(Strategy.parse, config.speculation.strategies or ())  # vLLM makes the named drafters
    return tuple(dict.fromkeys((*found, *(strategy.drafter for strategy in named if strategy.depth))))


def self_format(config: Config) -> LowBitFormat | None:
    """Return the storage format of the self-drafter's copy on a GPU; None if the target does not draft for itself."""
    options, rollout = config.speculation, config.rollout
    named = [Strategy.parse(text).drafter for text in options.strategies or ()]
    if options.mode == "off" or "self" not in (named if options.strategies is not None else drafters_of(config)):
        return None
    return FORMATS.get((options.self.on("cuda") or "") if rollout.engine.backend == "native" else "w8a8")


def fitting(config: Config, device: Device) -> tuple[Config, str]:
    """Fit the self-drafter to the device. Returns the configuration, and a note if it changed: fewer bits if the format
    is open, no self-drafter if no strategy names it. A configuration that fits neither way is returned unchanged."""
    form = self_format(config)
    if form is None or misfit(config, device) is None:
        return config, ""
    given, network = config.speculation, network_of(config)
    assert network is not None, "else nothing is a misfit"
    size = f"the copy that self drafts with ({form.name}) takes {network.copied(form).copy_bytes / GIB:.1f} GiB"
    fewer = given.self.format == "auto" and config.rollout.engine.backend == "native"
    fewer = fewer and all(inputs % (FORMATS[_FEWER_BITS].group or 1) == 0 for _, inputs in network.matrices)
    for name in (*((_FEWER_BITS,) if fewer else ()), *(("none",) if given.strategies is None else ())):
        changed = _with_self(config, name)
        if misfit(changed, device) is None:
            then = "rollouts draft without self" if name == "none" else f"it is stored in {name}"
            return changed, f"{size}, and does not fit beside the rest on one {device.name}: {then}"
    return config, ""


def _with_self(config: Config, form: str) -> Config:
    speculation = config.rollout.speculation
    own = speculation.self.model_copy(update={"format": form})
    rollout = config.rollout.model_copy(update={"speculation": speculation.model_copy(update={"self": own})})
    return config.model_copy(update={"rollout": rollout})


def device_of(config: Config) -> Device | None:
    """Return the GPU that the configuration names, or the largest of this machine's; None if unknown."""
    if config.cluster.gpu is not None:
        return device_named(config.cluster.gpu)
    if config.cluster.address is not None or "RAY_ADDRESS" in os.environ:
        return None  # engines run on other machines
    return largest(driver_names())


def gpu_costs(config: Config) -> CostModel:
    """Return the cost model of an engine on the configuration's GPU before its first pass.

    It holds the number of free rows, which bounds the tokens to verify."""
    device = device_of(config)
    return CostModel(free=UNKNOWN_GPU if device is None else FreeRows(device.free_rows))


def largest(names: Iterable[str]) -> Device | None:
    """Return the known device with the most memory: what does not fit it fits none."""
    found = [device for name in names if (device := device_named(name)) is not None]
    return max(found, key=attrgetter("memory_bytes"), default=None)


def driver_names(folder: Path = _DRIVER) -> list[str]:
    """Return the names that NVIDIA's driver gives this machine's GPUs; empty without a driver."""
    names = []
    for file in sorted(folder.glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    return names


def memory_plans(
    config: Config, net: Network, device_bytes: int, *, engines_sleep: bool, optimizer_away: bool
) -> tuple[MemoryPlan, ...]:
    """Return one plan for each kind of GPU that the layout has; none without GPUs."""
    engine, learner = engine_shape(config, net), learner_shape(config)
    trainer_tokens = config.drafter.micro_step_tokens if config.drafter.train else None
    if config.cluster.layout == "colocated" and engine is not None and learner is not None:
        plan = plan_colocated(
            net,
            engine,
            learner,
            trainer_tokens,
            device_bytes,
            engines_sleep=engines_sleep,
            optimizer_away=optimizer_away,
        )
        return (plan,)
    plans = [] if engine is None else [plan_rollout(net, engine, trainer_tokens)]
    return (*plans, *([] if learner is None else [plan_learner(net, learner, device_bytes)]))


def engine_shape(config: Config, net: Network) -> EngineShape | None:
    """Return the engine's shape for the plan; None if engines run on the CPU."""
    cluster, engine = config.cluster, config.rollout.engine
    if cluster.layout == "embedded" or engine.device == "cpu" or not cluster.gpus_per_worker:
        return None
    policy = build_policy(config.speculation, drafters_of(config), costs=gpu_costs(config))
    reached = {n: list(policy.arms_at(n)) if policy else [] for n in range(1, engine.max_running + 1)}
    batches = batch_buckets(engine.max_running)
    plan = bucketed_plan(reached.__getitem__, batches, chunk_tokens=engine.prefill_chunk_tokens)
    verified = [n * (1 + arm.tokens_to_verify) for n, arms in reached.items() for arm in arms]
    gpus = config.engine_ranks
    own_ranks = gpus > 1 and engine.backend == "native"
    context = min(engine.max_model_tokens or engine.kv_tokens, engine.kv_tokens)
    captured = predict(plan, net, drawing=True, context_tokens=context, shards=gpus)
    drafts = any(arm.drafter == "eagle" for arms in reached.values() for arm in arms)
    return EngineShape(
        max_running=engine.max_running,
        kv_tokens=engine.kv_tokens,
        prefill_tokens=engine.prefill_chunk_tokens,
        most_rows=max([engine.max_running, *verified]),
        gpus=gpus,
        own_ranks=own_ranks,
        copies=max(1, int(1 / cluster.gpus_per_worker)),
        captured=captured if engine.cuda_graphs and not own_ranks else NOTHING_CAPTURED,
        drafter=drafts,
        self_copy=self_format(config),
        copy_apart=engine.backend == "vllm",
        recording_bytes=config.drafter.recording.max_bytes_per_step if config.drafter.train else 0,
    )


def learner_shape(config: Config) -> LearnerShape | None:
    """Return the learner's shape for the plan; None if it runs on the CPU."""
    cluster, learner = config.cluster, config.learner
    if cluster.layout == "embedded" or learner.device == "cpu" or not cluster.gpus_per_learner:
        return None
    wide = config.model.dtype == "float32"
    masters = wide or (learner.autocast_bf16 and learner.lora is None)
    return LearnerShape(
        ranks=learner.ranks,
        micro_batch_tokens=learner.micro_batch_tokens,
        checkpointing=learner.activation_checkpointing,
        master_bytes=4 if masters else 2,
        compute_bytes=4 if wide and not learner.autocast_bf16 else 2,
        reference=config.objective.kl != "none",
        entropy_gradient=config.objective.entropy_coef > 0,
        adapters=adapter_parameters(config),
        mirrored=config.learner.quantization == "rollout" and config.rollout.quantization != "none",
    )


def adapter_parameters(config: Config) -> int | None:
    """Return the number of parameters that learner.lora trains; None without it, or if the model is unknown."""
    if config.learner.lora is None:
        return None
    try:
        model = ModelConfig.from_hf(read_config(config.model.path))
    except (ModelConfigError, OSError):
        return None
    return sum(rows * columns for rows, columns in adapter_shapes(model, config.learner.lora).values())


def phase_fits(config: Config, device_bytes: int, *, engines_sleep: bool, optimizer_away: bool) -> bool:
    """Whether every phase fits every GPU of this memory, by the plan. False if the model's shape is unknown, so that
    callers take the safe way."""
    net = network_of(config)
    if net is None:
        return False
    plans = memory_plans(config, net, device_bytes, engines_sleep=engines_sleep, optimizer_away=optimizer_away)
    return all(plan.fits(device_bytes) for plan in plans)


def residency(config: Config, net: Network, device_bytes: int) -> tuple[bool, bool]:
    """Return (engines asleep, optimizer away): the least offloading that fits, within `cluster.offload`. If nothing
    fits, the most that it allows."""
    choices = {"never": _CHOICES[:1], "always": _CHOICES[-1:], "auto": _CHOICES}[config.cluster.offload]
    for sleep, away in choices:
        plans = memory_plans(config, net, device_bytes, engines_sleep=sleep, optimizer_away=away)
        if all(plan.fits(device_bytes) for plan in plans):
            return sleep, away
    return choices[-1]


def fitted(config: Config, nodes: Sequence[Mapping[str, Any]]) -> tuple[Config, str]:
    """Apply `fitting` for the GPUs of these nodes, as Ray lists them. Raises ConfigError if the configuration fits
    none."""
    resources = [name for node in nodes if node.get("Alive") for name in node.get("Resources", ())]
    prefix = "accelerator_type:"
    device = device_of(config) or largest(name.removeprefix(prefix) for name in resources if name.startswith(prefix))
    if device is None:
        return config, ""
    config, note = fitting(config, device)
    if (issue := misfit(config, device)) is not None:
        raise ConfigError([issue])
    return config, note


def misfit(config: Config, device: Device) -> Issue | None:
    """Return the fault of a configuration that cannot fit the device, whatever `cluster.offload` releases. None if it
    fits, or if the model is unknown."""
    net = network_of(config)
    if net is None:
        return None
    total = device.memory_bytes
    sleep, away = residency(config, net, total)
    plans = memory_plans(config, net, total, engines_sleep=sleep, optimizer_away=away)
    plan = max(plans, key=attrgetter("worst.total_bytes"), default=None)
    if plan is None or plan.fits(total):
        return None
    key, remedy = _lever(config, plan.worst.items)
    message = f"a {plan.place} {device.name} has {total / GIB:.1f} GiB, and needs for {plan.worst.text()}"
    return Issue(key, message, remedy=f"{remedy}; `paceline plan-step` shows every phase")


_LEARNER_STATE = (
    "learner weights",
    "gradients",
    "optimizer",
    "update's temporaries",
    "reference weights",
    "weights cast",
    "adapters",
    "a matrix merged",
)
_QUANTISED = ("quantised matrices", "a matrix quantised")
_LEARNER_STEP = ("activations", "activations kept", "layer computed again", "backward of a layer", "head")
_TRAINER = ("trainer's drafter", "target's tables", "trainer's step")


def _lever(config: Config, items: Mapping[str, int]) -> tuple[str, str]:
    """Return the key that determines most of the memory, and its remedy."""
    smaller = "lower it" + ("" if config.learner.activation_checkpointing else ", or checkpoint activations")
    levers = {
        ("rollout.engine.kv_tokens", "lower it"): ("KV cache",),
        ("rollout.speculation.strategies", "leave self out"): ("self-drafter's copy",),
        ("model.path", "take a smaller model, or set cluster.layout=disaggregated"): ("engine weights",),
        ("learner.micro_batch_tokens", smaller): _LEARNER_STEP,
        ("learner.ranks", "raise it: ranks share weights, gradients and the optimizer"): _LEARNER_STATE,
        ("rollout.engine.prefill_chunk_tokens", "lower it, or rollout.engine.max_running"): ("engine step", "graphs"),
        ("learner.quantization", "set it to none: engine and learner then differ by the rounding"): _QUANTISED,
        ("drafter.micro_step_tokens", "lower it, or set drafter.train=false"): _TRAINER,
    }
    return max(levers, key=lambda lever: sum(items.get(name, 0) for name in levers[lever]))
