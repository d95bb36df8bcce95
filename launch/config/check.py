"""Faults that one key alone does not show. Looks at the tree only; this machine is launch.config.environment's.

A setting that would be ignored silently is a fault too: whoever wrote it expected something from it.
"""

import re
from collections.abc import Iterator

from actors.engine.capabilities import BACKENDS, Capabilities
from config.catalogue import CATALOGUE, TRAINED, weights_path
from config.formats import FORMATS
from config.learner import OptimizerOptions
from config.strategy import PLAIN, Strategy
from config.tree import Config
from launch.config.check_abort import abort_issues
from launch.config.check_data import set_issues
from launch.config.check_eval import eval_issues, response_limits
from launch.config.check_lora import lora_issues
from launch.config.check_reward import reward_issues
from launch.config.check_staleness import staleness_issues
from launch.config.check_systems import system_issues
from launch.config.check_token_budget import budget_issues
from launch.config.check_turns import turn_issues
from launch.config.issues import Issue
from policies.roofline.devices import DEVICES, device_named

MISSING_TRAIN = Issue("data.train", "required and missing", remedy="set it, data.sets or data.reasoning_gym")
RESERVED_NAMES = ("warm_starts", "calibrations", "reward_functions", "models", "reasoning_gym")


def check_values(config: Config, *, training: bool = True) -> list[Issue]:
    """Contradictions between keys; pure. `training`: whether something will be trained."""
    rules = (
        *(_run, _objective, _rollout, _quantization, _speculation, _drafter),
        *(_data, _coordinator, _learner, _layout, abort_issues, system_issues, budget_issues, eval_issues),
        *(reward_issues, staleness_issues, turn_issues, lora_issues),
    )
    missing = [MISSING_TRAIN] if training and not config.train_sets else []
    return [*missing, *(issue for rule in rules for issue in rule(config))]


def _engine(c: Config) -> Capabilities:
    return BACKENDS[c.rollout.engine.backend]


def _run(c: Config) -> Iterator[Issue]:
    if c.run.name in RESERVED_NAMES:
        yield Issue("run.name", f"{c.run.name} is a folder that runs share", remedy="choose another name")


def _objective(c: Config) -> Iterator[Issue]:
    for fault in c.objective.contradictions():
        yield Issue(f"objective.{fault.key}", fault.message, remedy=fault.remedy)
    sampling, buffer = c.rollout.sampling, c.objective.overlong.buffer_tokens
    if buffer is not None and buffer > sampling.max_new_tokens:
        yield Issue(
            "objective.overlong.buffer_tokens",
            f"{buffer} is more than rollout.sampling.max_new_tokens = {sampling.max_new_tokens}",
            remedy="lower it",
        )
    restricted = sampling.top_k > 0 or sampling.top_p < 1
    if c.objective.sampler_correction.active and restricted and _engine(c).logprobs_t1:  # else refused altogether
        yield Issue(
            "objective.sampler_correction",
            "compares log-probs of the whole vocabulary, but rollout.sampling.top_k or top_p leaves tokens out",
            remedy="set top_k=0 and top_p=1, or objective.sampler_correction.weights and mask to none",
        )
    if c.objective.loss == "sequence_band" and c.learner.mini_batches == 1:
        yield Issue(
            "learner.mini_batches",
            "1, so the ratio of every response is 1, and the bands of objective.loss=sequence_band (tbpo) do nothing",
            remedy="set it to 2 or more, or objective.name=grpo",
        )


def _rollout(c: Config) -> Iterator[Issue]:
    r, e = c.rollout, c.rollout.engine
    if r.workers.min > r.workers.max:
        message = f"{r.workers.max} is less than rollout.workers.min = {r.workers.min}"
        yield Issue("rollout.workers.max", message, remedy="raise it, or lower min")
    if r.sampling.temperature == 0:
        yield Issue(
            "rollout.sampling.temperature",
            "0 draws equal responses, which teach nothing",
            remedy="set it above 0; evaluations have eval.temperature",
        )
    if r.rollouts_per_prompt == 1 and c.objective.baseline in ("group", "leave_one_out"):
        yield Issue(
            "rollout.rollouts_per_prompt",
            f"1 response has no others to be compared with, as objective.baseline={c.objective.baseline} asks",
            remedy="set it to 2 or more, or another baseline, as objective.name=reinforce_pp has",
        )
    elif r.rollouts_per_prompt == 1 and c.objective.drop_zero_variance:
        yield Issue(
            "objective.drop_zero_variance",
            "with rollout.rollouts_per_prompt=1 all rewards of every group are equal, and every group is dropped",
            remedy="set it to false, or rollouts_per_prompt to 2 or more",
        )
    each: float = r.rollouts_per_prompt
    if r.budget.share is not None:
        each = max(r.budget.min_rollouts, r.budget.share * each)
    if r.prompts_per_step * each < c.learner.mini_batches:
        yield Issue(
            "learner.mini_batches",
            f"{c.learner.mini_batches} mini-batches, but only {r.prompts_per_step} x {each:g} = "
            f"{r.prompts_per_step * each:g} rollouts per RL step",
            remedy="lower it, or raise rollout.prompts_per_step",
        )
    for key, limit in response_limits(c):
        longest = c.data.max_prompt_tokens + limit
        needed = f"data.max_prompt_tokens + {key} = {longest}"
        if e.max_model_tokens is not None and e.max_model_tokens < longest:
            yield Issue("rollout.engine.max_model_tokens", f"{e.max_model_tokens} is less than {needed}")
        if e.kv_tokens < longest:
            yield Issue("rollout.engine.kv_tokens", f"{e.kv_tokens} does not hold one request: {needed}")
    if c.model.batch_invariant and not _engine(c).batch_invariant:
        message = f"the {e.backend} engine has no batch-invariant mode: its tokens depend on what it decodes together"
        yield Issue("model.batch_invariant", message, remedy="leave it out, or set model.batch_invariant=null")
    hottest = _engine(c).max_temperature
    drawn = [("rollout.sampling.temperature", r.sampling.temperature), ("eval.temperature", c.eval.temperature)]
    drawn += [(f"eval.sets.{i}.temperature", one.temperature) for i, one in enumerate(c.eval.sets) if one.temperature]
    for key, temperature in drawn:
        if temperature > hottest:
            message = f"{temperature:g} is more than the {e.backend} engine samples at"
            yield Issue(key, message, remedy=f"set it to {hottest:g} at most")
    for name, off in (("top_k", 0), ("top_p", 1)):
        if getattr(r.sampling, name) != off and not _engine(c).logprobs_t1:
            yield Issue(
                f"rollout.sampling.{name}",
                f"the {e.backend} engine gives log-probs of the restricted distribution only, and the learner has none "
                "to compare them with",
                remedy=f"set it to {off}",
            )

    yield from _others_settings(c)


def _others_settings(c: Config) -> Iterator[Issue]:
    """Of rollout.engine, what only another backend obeys."""
    e, key = c.rollout.engine, "rollout.engine"
    fields = type(e).model_fields
    if e.backend == "native":
        for name in ("seeded_requests", "vllm_arguments"):
            if getattr(e, name) != fields[name].default:
                yield Issue(f"{key}.{name}", "only backend vllm uses it, this is native", remedy="leave it out")
    elif e.block_tokens != fields["block_tokens"].default:
        yield Issue(
            f"{key}.block_tokens",
            "vLLM chooses the size of its KV blocks by what its kernels take",
            remedy=f"leave it out; {key}.vllm_arguments={{block_size: {e.block_tokens}}} insists",
        )


def _quantization(c: Config) -> Iterator[Issue]:
    """Low-bit rollouts. `rejection` fits them all: it keeps the low-bit model's own distribution, which the learner
    mirrors. learner.quantization says what holds without a format too, so it contradicts none."""
    form, key, e = c.rollout.quantization, "rollout.quantization", c.rollout.engine
    if form == "none":
        return
    there, devices = sorted(_engine(c).formats), FORMATS[form].devices
    if form not in there:
        remedy = f"it takes {', '.join(there)}; or set {key}=none" if there else f"set {key}=none"
        yield Issue(key, f"the {e.backend} engine does not compute in {form}", remedy=remedy)
    elif _engine(c).learner_network and (device := _engine_device(c)) not in devices:
        others = ", ".join(name for name in there if device in FORMATS[name].devices)
        message = f"{form} is computed on {' and '.join(devices)} only, and engines are on {device}"
        yield Issue(key, message, remedy=f"set it to one of {others}, or rollout.engine.device={devices[0]}")
    if c.model.implementation == "transformers":
        yield Issue(
            "model.implementation",
            f"transformers, whose layers the learner cannot round as {key}={form} does",
            remedy=f"leave it out (our own Llama, Mistral, Qwen2, Qwen3), or set {key}=none",
        )
    if c.learner.quantization == "rollout" and c.learner.autocast_bf16 and c.model.dtype == "float32":
        yield Issue(
            "learner.autocast_bf16",
            f"rounds to bfloat16 what engines have in float32 (model.dtype), so {key}={form} is not mirrored",
            remedy="set model.dtype=bfloat16, or learner.quantization=none",
        )
    if e.backend == "vllm" and "quantization" in e.vllm_arguments:
        message = f"names a quantization beside {key}={form}"
        yield Issue("rollout.engine.vllm_arguments", message, remedy=f"name it in one place: {key}")
    drafted = {Strategy.parse(text).drafter for text in c.rollout.speculation.strategies or ()}
    if c.rollout.speculation.mode != "off" and "self" in drafted:
        yield Issue(
            "rollout.speculation.strategies",
            f"self drafts with a copy of the target in few bits, and beside {key}={form} that is no cheaper than the "
            "target",
            remedy=f"name others, such as suffix or ngram, or set {key}=none",
        )


def _engine_device(c: Config) -> str:
    """Where engines will run."""
    if c.rollout.engine.device != "auto":
        return c.rollout.engine.device
    return "cpu" if c.cluster.layout == "embedded" or not c.cluster.gpus_per_worker else "cuda"


def _speculation(c: Config) -> Iterator[Issue]:
    s, key = c.rollout.speculation, "rollout.speculation"
    if s.mode == "off":
        return
    can, backend = _engine(c), c.rollout.engine.backend
    if not can.drafters and s != type(s)():
        message = f"is set, but the {backend} engine does not speculate"
        yield Issue(key, message, remedy=f"leave it out, or set {key}.mode=off")
        return
    strategies = [Strategy.parse(text) for text in s.strategies or ()]
    yield from _own_drafters(c, strategies)
    own = [one.name for one in s.drafters]
    for drafter in dict.fromkeys(strategy.drafter for strategy in strategies if strategy != PLAIN):
        if drafter in own:
            continue
        if drafter not in CATALOGUE:
            known = ", ".join([*CATALOGUE, *own])
            yield Issue(f"{key}.strategies", f"unknown drafter {drafter!r}", remedy=f"there are {known}, and 'plain'")
        elif drafter not in can.drafters:
            message = f"the {backend} engine has no drafter {drafter!r}"
            yield Issue(f"{key}.strategies", message, remedy=f"it has {', '.join(sorted(can.drafters))}, and 'plain'")
        elif (
            CATALOGUE[drafter].needs_weights
            and weights_path(drafter, s) is None
            and not (CATALOGUE[drafter].trained and c.drafter.train)
        ):
            yield Issue(
                f"{key}.{drafter}.path",
                f"is not set, but rollout.speculation.strategies names the drafter {drafter}",
                remedy=f"set {key}.{drafter}.path to a directory of drafter weights, or to random",
            )
    yield from _self_format(c, strategies)
    trees = [str(strategy) for strategy in strategies if strategy.is_tree]
    on_gpu = c.rollout.engine.device == "cuda" or (c.rollout.engine.device == "auto" and c.cluster.layout != "embedded")
    if trees and c.model.batch_invariant == "engine" and can.batch_invariant and on_gpu:
        yield Issue(
            f"{key}.strategies",
            f"{', '.join(trees)}: on a GPU a tree's rows are summed in another order than plain decoding, and "
            "model.batch_invariant=engine asks for the same bits",
            remedy="name chains only, or set model.batch_invariant=null",
        )
    if not can.trees and trees:
        message = f"{', '.join(trees)}: the {backend} engine verifies no trees"
        yield Issue(f"{key}.strategies", message, remedy="leave out what has a branching factor (x)")
    if s.mode == "fixed" and len(strategies) != 1:
        yield Issue(
            f"{key}.strategies",
            f"mode fixed needs exactly one strategy, got {len(strategies)}",
            remedy=f"for example {key}.strategies=[suffix:8], or {key}.mode=adaptive",
        )
    if (
        s.mode == "roofline"
        and strategies
        and (trees or len({strategy.drafter for strategy in strategies if strategy.depth}) != 1)
    ):
        yield Issue(
            f"{key}.strategies",
            "mode roofline goes up and down the draft lengths of one drafter, and takes no trees",
            remedy=f"for example {key}.strategies=[self:3,self:5,self:7], or leave it out",
        )
    for name, entry in CATALOGUE.items():
        if can.drafters and name not in can.drafters and weights_path(name, s) is not None and not strategies:
            message = f"is set, but the {backend} engine has no drafter {name!r}"
            yield Issue(f"{key}.{name}.path", message, remedy="unset it")
        unnamed = strategies and not any(strategy.drafter == name for strategy in strategies)
        if unnamed and entry.needs_weights and weights_path(name, s) is not None:
            said = f"is set, but {key}.strategies names no {name}"
            yield Issue(f"{key}.{name}.path", said, remedy="name one, or unset it")
    used_by = {"batch_thresholds": "paper", "epsilon": "paper", "seed": "paper", "exploration": "adaptive"}
    used_by |= {"roofline": "roofline", "budget": "adaptive"}
    for name, mode in used_by.items():
        if s.mode != mode and getattr(s, name) != type(s).model_fields[name].default:
            yield Issue(f"{key}.{name}", f"is only used with mode {mode}", remedy=f"set {key}.mode={mode}")
    if s.budget != "none" and backend == "vllm":
        message = f"{s.budget} is not known to the vllm engine, which drafts as much for every request"
        yield Issue(f"{key}.budget", message, remedy="leave it out")
    thresholds = s.batch_thresholds
    groups = len({strategy.tokens_to_verify for strategy in strategies})
    if s.mode == "paper" and thresholds and 0 < groups < len(thresholds):
        yield Issue(
            f"{key}.batch_thresholds",
            f"names {len(thresholds)} buckets for {groups} groups of strategies with equal tokens to verify",
            remedy="leave thresholds out, or add strategies",
        )
    if thresholds and (thresholds[0] != 1 or list(thresholds) != sorted(set(thresholds))):
        yield Issue(f"{key}.batch_thresholds", f"must ascend from 1, got {list(thresholds)}")
    if s.verification == "coupled" and not can.batch_invariant:
        yield Issue(
            f"{key}.verification",
            f"coupled accepts the very tokens of plain decoding; the {backend} engine draws them without their noise, "
            "and keeps their distribution only",
            remedy="leave it out",
        )
    elif s.verification == "rejection" and c.model.batch_invariant and can.batch_invariant:
        yield Issue(
            f"{key}.verification",
            "rejection keeps the tokens' distribution, not the tokens, which model.batch_invariant asks for",
            remedy=f"set {key}.verification=coupled, or model.batch_invariant=null",
        )


def _own_drafters(c: Config, strategies: list[Strategy]) -> Iterator[Issue]:
    """Drafters of the user's own: their names, and where they can run."""
    s, key = c.rollout.speculation, "rollout.speculation.drafters"
    if s.drafters and not _engine(c).own_drafters:
        message = f"the {c.rollout.engine.backend} engine drafts with its own drafters only"
        yield Issue(key, message, remedy="leave it out, or set rollout.engine.backend=native")
        return
    for index, one in enumerate(s.drafters):
        if one.name in CATALOGUE or one.name in ("none", "plain"):
            yield Issue(f"{key}.{index}.name", f"{one.name} is taken", remedy="choose another name")
        elif one.name in [other.name for other in s.drafters[:index]]:
            yield Issue(f"{key}.{index}.name", f"two drafters are called {one.name}", remedy="choose another name")
        elif strategies and one.name not in {strategy.drafter for strategy in strategies}:
            said = f"rollout.speculation.strategies names no {one.name}"
            yield Issue(f"{key}.{index}", said, remedy=f"name one, such as {one.name}:4, or leave the drafter out")


def _self_format(c: Config, strategies: list[Strategy]) -> Iterator[Issue]:
    """What the self-drafter's copy is stored in."""
    key, form = "rollout.speculation.self.format", c.rollout.speculation.self.format
    named = any(strategy.drafter == "self" for strategy in strategies)
    if form == "auto":
        return
    if form == "none":
        if named:
            yield Issue(key, "is none, but rollout.speculation.strategies names self", remedy="leave one of them out")
    elif not _engine(c).learner_network:
        message = f"is set, but the {c.rollout.engine.backend} engine drafts with an eight-bit copy always"
        yield Issue(key, message, remedy="leave it out")
    elif c.rollout.quantization != "none":
        message = f"is set, but beside rollout.quantization={c.rollout.quantization} there is no self-drafter"
        yield Issue(key, message, remedy="leave it out")
    elif strategies and not named:
        yield Issue(
            key, "is set, but rollout.speculation.strategies names no self", remedy="name one, for example self:5"
        )
    elif (device := _engine_device(c)) not in FORMATS[form].devices:
        message = f"{form} is computed on {' and '.join(FORMATS[form].devices)} only, and engines are on {device}"
        yield Issue(key, message, remedy="leave it out: auto")


def _drafter(c: Config) -> Iterator[Issue]:
    d, s = c.drafter, c.rollout.speculation
    if not d.train:
        return
    can, backend = _engine(c), c.rollout.engine.backend
    if "eagle" not in can.drafters:
        message = f"the {backend} engine does not draft with what it trains"
        yield Issue("drafter.train", message, remedy="set it to false, or rollout.engine.backend=native")
    elif s.mode == "off":
        yield Issue(
            "rollout.speculation.mode",
            "is off, so nothing would draft with what drafter.train trains",
            remedy="set it to adaptive, or drafter.train=false",
        )
    elif s.strategies is not None and TRAINED not in {Strategy.parse(text).drafter for text in s.strategies}:
        yield Issue(
            "rollout.speculation.strategies",
            f"names no strategy of the drafter {TRAINED}, which drafter.train trains",
            remedy="add one, for example eagle:4, leave the list out, or set drafter.train=false",
        )
    if d.recording.source == "engine" and can.drafters and not can.hidden_states:
        message = f"engine, but the {backend} engine records no hidden states"
        yield Issue("drafter.recording.source", message, remedy="leave it out, or set it to learner")
    if c.rollout.workers.max < 2:
        yield Issue(
            "drafter.train",
            "a drafter is trained on rollout workers that are idle while others decode, and there is 1 at most",
            remedy="set rollout.workers=2 or more, or drafter.train=false",
        )
    if d.algorithm != "eagle3" and d.layers is not None:
        yield Issue("drafter.layers", f"only algorithm eagle3 uses it, this is {d.algorithm}", remedy="leave it out")
    elif d.layers is not None and list(d.layers) != sorted({layer for layer in d.layers if layer >= 0}):
        yield Issue("drafter.layers", f"must be three different layers from 0, ascending, got {list(d.layers)}")
    if not all(0 <= beta < 1 for beta in d.betas):
        yield Issue("drafter.betas", f"each must be in [0, 1), got {list(d.betas)}")


def _data(c: Config) -> Iterator[Issue]:
    yield from set_issues(c)
    if c.data.template == "plain" and c.data.chat_template is not None:
        yield Issue("data.chat_template", "is not used when data.template is plain")
    if c.data.template == "plain" and c.data.system_prompt is not None:
        yield Issue("data.system_prompt", "is not used when data.template is plain")


def _coordinator(c: Config) -> Iterator[Issue]:
    for key, fault, remedy in c.coordinator.contradictions():
        if c.drafter.train or key == "lease_s":
            yield Issue(f"coordinator.{key}", fault, remedy=remedy)


def _learner(c: Config) -> Iterator[Issue]:
    optimizers: list[tuple[str, OptimizerOptions]] = [("learner.optimizer", c.learner.optimizer)]
    if c.warmup is not None:
        optimizers.append(("warmup.optimizer", c.warmup.optimizer))
    for key, options in optimizers:
        if not all(0 <= beta < 1 for beta in options.betas):
            yield Issue(f"{key}.betas", f"each must be in [0, 1), got {list(options.betas)}")


def _layout(c: Config) -> Iterator[Issue]:
    embedded = c.cluster.layout == "embedded"
    devices = (("rollout.engine.device", c.rollout.engine.device), ("learner.device", c.learner.device))
    for key, device in devices:
        if embedded and device == "cuda":
            yield Issue(key, "cuda, but cluster.layout is embedded (CPU only)", remedy="set cluster.layout=colocated")
    on_gpu = [key for key, device in devices if device == "cuda" or (device == "auto" and not embedded)]
    if c.model.batch_invariant is True and on_gpu:
        yield Issue(
            "model.batch_invariant",
            f"holds on CPU only; with cluster.layout={c.cluster.layout} a GPU is used by {' and '.join(on_gpu)}",
            remedy="set model.batch_invariant=engine, leave it unset, or set these to cpu",
        )
    if c.cluster.gpu is not None:
        if embedded:
            yield Issue(
                "cluster.gpu",
                "is set, but cluster.layout is embedded (CPU only)",
                remedy="leave it out, or set cluster.gpu=null",
            )
        elif device_named(c.cluster.gpu) is None:
            yield Issue("cluster.gpu", f"{c.cluster.gpu!r} is not known", remedy=f"one of {', '.join(DEVICES)}")
    if c.cluster.weights in ("ipc", "broadcast") and not _engine(c).pieces:
        message = (
            f"{c.cluster.weights}, but the {c.rollout.engine.backend} engine takes weights from the object store only"
        )
        yield Issue("cluster.weights", message, remedy="leave it out")
    if c.cluster.gpus_per_worker > 1:
        yield from _tensor_parallel(c)
    if fault := _address_fault(c.cluster.address):
        yield Issue("cluster.address", fault, remedy="give the GCS address, for example 10.0.0.1:6379, or auto")
    for key in ("rollout_resource", "learner_resource"):
        if getattr(c.cluster, key) is not None and c.cluster.layout != "disaggregated":
            yield Issue(f"cluster.{key}", "is only used with cluster.layout=disaggregated")
    if c.cluster.layout == "colocated":
        yield from _colocated(c)


def _tensor_parallel(c: Config) -> Iterator[Issue]:
    """One engine on several GPUs."""
    key, gpus, backend = "cluster.gpus_per_worker", c.cluster.gpus_per_worker, c.rollout.engine.backend
    if c.cluster.layout == "embedded" or c.rollout.engine.device == "cpu":
        why = "cluster.layout is embedded" if c.cluster.layout == "embedded" else "rollout.engine.device is cpu"
        yield Issue(key, f"{gpus:g}, but {why}: engines use no GPU", remedy="leave it out")
    elif not _engine(c).tensor_parallel:
        yield Issue(
            key,
            f"{gpus:g}, but the {backend} engine uses one GPU: the others would idle",
            remedy="set it to 1 and raise rollout.workers",
        )
    elif gpus != int(gpus):
        yield Issue(key, f"{gpus:g}, but an engine on several GPUs uses whole ones", remedy="set it to a whole number")


def _address_fault(address: str | None) -> str:
    if address is None or address in ("auto", "local"):
        return ""
    if address.startswith("ray://"):
        return f"{address!r}: Ray Client is not supported; submit a job (ray job submit)"
    host, _, port = address.rpartition(":")
    good = re.fullmatch(r"[\w.\-\[\]:]+", host) and port.isdigit() and 0 < int(port[:6]) < 65536
    return "" if good else f"{address!r} is not host:port"


def _colocated(c: Config) -> Iterator[Issue]:
    """What actors.placement_plan needs to pair each learner rank with a rollout worker's GPU."""
    worker, learner = c.cluster.gpus_per_worker, c.cluster.gpus_per_learner
    if worker < 1 or worker != int(worker):
        yield Issue(
            "cluster.gpus_per_worker",
            f"{worker:g}, but colocated workers use whole GPUs (and share each with a learner rank)",
            remedy="set it to 1",
        )
    elif c.learner.ranks > c.rollout.workers.min * worker:
        yield Issue(
            "learner.ranks",
            f"{c.learner.ranks} ranks do not fit on the GPUs of {c.rollout.workers.min} rollout workers",
            remedy="lower it, or raise rollout.workers",
        )
    if learner != 1:
        yield Issue(
            "cluster.gpus_per_learner",
            f"{learner:g}, but a colocated learner rank belongs to one GPU (and shares it with a rollout worker)",
            remedy="set it to 1",
        )
