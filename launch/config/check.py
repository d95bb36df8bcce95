"""Faults that show only in several keys together. Looks at the tree only; launch.config.environment checks this
machine.

A setting that would be ignored silently is also a fault: its author expected an effect. Rules between two keys are
declared at the key (config.rules). Rules that need more are here and in check_*.py.
"""

import re
from collections.abc import Iterator

from actors.engine.capabilities import Capabilities, capabilities_of, engine_name
from config.tree import Config
from launch.config.check_data import data_issues, response_limits
from launch.config.check_lengths import length_issues
from launch.config.check_lora import lora_issues
from launch.config.check_speculation import speculation_issues
from launch.config.issues import Issue
from launch.config.lookahead import lookahead_issues
from launch.config.rules import rule_issues
from policies.roofline.devices import DEVICES, device_named

MISSING_TRAIN = Issue("data.train", "required and missing", remedy="set it, data.sets or data.reasoning_gym")
_LEAST_GAP = 1e-5  # mean over tokens, float32: ten times what another order of sums gives
RESERVED_NAMES = ("warm_starts", "calibrations", "reward_functions", "models", "reasoning_gym")


def check_values(config: Config, *, training: bool = True) -> list[Issue]:
    """Return contradictions between keys; pure. `training`: whether the command trains anything."""
    rules = (
        *(rule_issues, _run, _objective, _rollout, speculation_issues, data_issues, _coordinator, _layout),
        *(length_issues, lora_issues, lookahead_issues),
    )
    missing = [MISSING_TRAIN] if training and not config.train_sets else []
    return [*missing, *(issue for rule in rules for issue in rule(config))]


def _engine(c: Config) -> Capabilities:
    return capabilities_of(c)


def _run(c: Config) -> Iterator[Issue]:
    if c.run.name in RESERVED_NAMES:
        yield Issue("run.name", f"{c.run.name} is a folder that all runs use", remedy="choose another name")


def _objective(c: Config) -> Iterator[Issue]:
    for fault in c.objective.contradictions():
        yield Issue(f"objective.{fault.key}", fault.message, remedy=fault.remedy)
    sampling = c.rollout.sampling
    restricted = sampling.top_k > 0 or sampling.top_p < 1
    if c.objective.sampler_correction.active and restricted and _engine(c).logprobs_t1:  # else refused as a whole
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
    if r.sampling.temperature == 0:
        yield Issue(
            "rollout.sampling.temperature",
            "0 draws equal responses, which teach nothing",
            remedy="set it above 0; evaluations have eval.temperature",
        )
    if r.rollouts_per_prompt == 1 and c.objective.baseline in ("group", "leave_one_out"):
        yield Issue(
            "rollout.rollouts_per_prompt",
            f"objective.baseline={c.objective.baseline} compares responses of a prompt, and there is only 1",
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
        message = f"the {e.backend} engine has no batch-invariant mode: its tokens depend on the batch"
        yield Issue("model.batch_invariant", message, remedy="leave it out, or set model.batch_invariant=null")
    hottest = _engine(c).max_temperature
    drawn = [("rollout.sampling.temperature", r.sampling.temperature), ("eval.temperature", c.eval.temperature)]
    drawn += [(f"eval.sets.{i}.temperature", one.temperature) for i, one in enumerate(c.eval.sets) if one.temperature]
    for key, temperature in drawn:
        if temperature > hottest:
            message = f"{temperature:g} is above the limit of the {e.backend} engine"
            yield Issue(key, message, remedy=f"set it to {hottest:g} at most")
    for name, off in (("top_k", 0), ("top_p", 1)):
        if getattr(r.sampling, name) != off and not _engine(c).logprobs_t1:
            yield Issue(
                f"rollout.sampling.{name}",
                f"the {e.backend} engine gives log-probs of the restricted distribution only, and the learner has none "
                "to compare them with",
                remedy=f"set it to {off}",
            )


def _coordinator(c: Config) -> Iterator[Issue]:
    for key, fault, remedy in c.coordinator.contradictions():
        if c.drafter.train or key == "lease_s":
            yield Issue(f"coordinator.{key}", fault, remedy=remedy)


def _layout(c: Config) -> Iterator[Issue]:
    embedded = c.cluster.layout == "embedded"
    devices = (("rollout.engine.device", c.rollout.engine.device), ("learner.device", c.learner.device))
    on_gpu = [key for key, device in devices if device == "cuda" or (device == "auto" and not embedded)]
    if c.model.batch_invariant is True and on_gpu:
        yield Issue(
            "model.batch_invariant",
            f"holds on CPU only; with cluster.layout={c.cluster.layout} a GPU is used by {' and '.join(on_gpu)}",
            remedy="set model.batch_invariant=engine, leave it unset, or set these to cpu",
        )
    if c.cluster.gpu is not None and not embedded and device_named(c.cluster.gpu) is None:
        yield Issue("cluster.gpu", f"{c.cluster.gpu!r} is not known", remedy=f"one of {', '.join(DEVICES)}")
    if c.cluster.weights in ("ipc", "broadcast") and not _engine(c).pieces:
        message = f"{c.cluster.weights}, but the {engine_name(c)} loads weights from the object store only"
        yield Issue("cluster.weights", message, remedy="leave it out")
    yield from _ranks(c)
    if fault := _address_fault(c.cluster.address):
        yield Issue("cluster.address", fault, remedy="give the GCS address, for example 10.0.0.1:6379, or auto")
    if c.cluster.layout == "colocated":
        yield from _colocated(c)


def _ranks(c: Config) -> Iterator[Issue]:
    """Check an engine over several GPUs, or over several processes without a GPU."""
    key, gpus, engine = "cluster.gpus_per_worker", c.cluster.gpus_per_worker, c.rollout.engine
    own, given, most = "rollout.engine.tensor_parallel", engine.tensor_parallel, _engine(c).most_ranks
    on_cpu = c.cluster.layout == "embedded" or engine.device == "cpu"
    why = "cluster.layout is embedded" if c.cluster.layout == "embedded" else "rollout.engine.device is cpu"
    if gpus > 1 and on_cpu:
        yield Issue(key, f"{gpus:g}, but engines use no GPU: {why}", remedy="leave it out")
    elif gpus > 1 and gpus != int(gpus):
        yield Issue(key, f"{gpus:g}, but an engine on several GPUs uses whole ones", remedy="set it to a whole number")
    elif given is not None and not on_cpu and given != max(1, gpus):
        message = f"{given}, but each rank has a GPU of its own, and a worker has {gpus:g} ({key})"
        yield Issue(own, message, remedy=f"leave it out, or set {key}={given}")
    if c.engine_ranks == 1:
        return
    named = own if given is not None else key
    if c.engine_ranks > most:
        message = f"{c.engine_ranks}, but the {engine.backend} engine has {most} ranks at most"
        yield Issue(named, message, remedy=f"lower it to {most}, and raise rollout.workers")
    if on_cpu and not _engine(c).ranks_on_cpu:
        yield Issue(
            own, f"{given}, but the {engine.backend} engine has ranks on GPUs only: {why}", remedy="leave it out"
        )
    limit = c.rollout.max_logprob_gap
    if limit is not None and limit < _LEAST_GAP:
        yield Issue(
            "rollout.max_logprob_gap",
            f"{limit:g}, but over {c.engine_ranks} ranks an engine adds in another order than the learner: their "
            "log-probs agree to rounding only",
            remedy=f"set it to {_LEAST_GAP:g} or more, or leave it out",
        )


def _address_fault(address: str | None) -> str:
    if address is None or address in ("auto", "local"):
        return ""
    if address.startswith("ray://"):
        return f"{address!r}: Ray Client is not supported; submit a job (ray job submit)"
    host, _, port = address.rpartition(":")
    good = re.fullmatch(r"[\w.\-\[\]:]+", host) and port.isdigit() and 0 < int(port[:6]) < 65536
    return "" if good else f"{address!r} is not host:port"


def _colocated(c: Config) -> Iterator[Issue]:
    """Check what actors.placement_plan needs to pair each learner rank with a rollout worker's GPU."""
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
