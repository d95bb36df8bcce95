"""Contradictions of low-bit rollouts, speculation and drafter training: a part of launch.config.check.

It needs strategies, drafters and what engines can do. docs/systems/README.md has a table of all that is refused.
"""

from collections.abc import Iterator

from actors.engine.capabilities import Capabilities, capabilities_of, engine_name
from config.catalogue import CATALOGUE, TRAINED, at_hand, weights_path
from config.formats import FORMATS
from config.strategy import PLAIN, Strategy
from config.tree import Config
from launch.config.issues import Issue
from policies.roofline.devices import device_named
from policies.speculation.defaults import default_ladder

_SPECULATION = "rollout.speculation"


def speculation_issues(c: Config) -> Iterator[Issue]:
    """Yield faults of combinations; pure."""
    yield from _quantization(c)
    yield from _speculation(c)
    yield from _drafter(c)
    strategies = [Strategy.parse(text) for text in c.rollout.speculation.strategies or ()]
    if c.rollout.speculation.mode != "off":
        yield from _ladder(c)
        yield from _lengths(c, strategies)
        yield from _networks(c, strategies)
    yield from _device(c)


def _engine(c: Config) -> Capabilities:
    return capabilities_of(c)


def _quantization(c: Config) -> Iterator[Issue]:
    """Check low-bit rollouts. `rejection` fits all formats: it keeps the low-bit model's own distribution, which the
    learner mirrors. learner.quantization is also meaningful without a format, so it contradicts none."""
    form, key, e = c.rollout.quantization, "rollout.quantization", c.rollout.engine
    if form == "none":
        return
    there, devices = sorted(_engine(c).formats), FORMATS[form].devices
    if form not in there:
        remedy = f"it takes {', '.join(there)}; or set {key}=none" if there else f"set {key}=none"
        yield Issue(key, f"the {engine_name(c)} does not compute in {form}", remedy=remedy)
    elif _engine(c).learner_network and (device := _engine_device(c)) not in devices:
        others = ", ".join(name for name in there if device in FORMATS[name].devices)
        message = f"{form} is computed on {' and '.join(devices)} only, and engines are on {device}"
        yield Issue(key, message, remedy=f"set it to one of {others}, or rollout.engine.device={devices[0]}")
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
            f"self drafts with a copy of the target in few bits, and beside {key}={form} that costs as much as the "
            "target",
            remedy=f"name others, such as suffix or ngram, or set {key}=none",
        )


def _engine_device(c: Config) -> str:
    """Return the device on which engines will run."""
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
    """Check the names of the user's own drafters, and the engines that can run them."""
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
    """Check the storage format of the self-drafter's copy."""
    key, form = "rollout.speculation.self.format", c.rollout.speculation.self.format
    named = any(strategy.drafter == "self" for strategy in strategies)
    if form == "auto":
        return
    if form == "none":
        if named:
            yield Issue(key, "is none, but rollout.speculation.strategies names self", remedy="leave one of them out")
    elif "self" not in _engine(c).drafters:
        yield Issue(key, f"is set, but the {engine_name(c)} has no self-drafter", remedy="leave it out")
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
    elif (device := _engine_device(c)) not in FORMATS[form].draft_devices:
        message = f"{form} is computed on {' and '.join(FORMATS[form].draft_devices)} only, and engines are on {device}"
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
    layers = list(d.layers or ()) if d.algorithm == "eagle3" else []
    if layers != sorted({layer for layer in layers if layer >= 0}):
        yield Issue("drafter.layers", f"must be three different layers from 0, ascending, got {layers}")


def _ladder(c: Config) -> Iterator[Issue]:
    """Check mode roofline, which drafts with one drafter. Without strategies, policies.speculation.defaults
    chooses it."""
    s = c.rollout.speculation
    if s.mode != "roofline" or s.strategies is not None:
        return
    lent = _engine(c).lends_cache and c.rollout.quantization == "none"
    name = default_ladder(at_hand(c.speculation, cache_lent=lent))[0].drafter
    if name == TRAINED:
        return
    if c.drafter.train:
        yield Issue(
            f"{_SPECULATION}.mode",
            f"roofline drafts with one drafter, here {name}, so nothing would draft with what drafter.train trains",
            remedy=f"set {_SPECULATION}.strategies=[{TRAINED}:2,{TRAINED}:4,{TRAINED}:8], mode=adaptive, or "
            "drafter.train=false",
        )
    elif s.eagle.path is not None:
        yield Issue(
            f"{_SPECULATION}.eagle.path",
            f"is set, but mode roofline drafts with one drafter, here {name}",
            remedy=f"name eagle in {_SPECULATION}.strategies, or unset it",
        )


def _lengths(c: Config, strategies: list[Strategy]) -> Iterator[Issue]:
    """Check draft budgets, which shorten chains only."""
    budget = c.rollout.speculation.budget
    drafting = [strategy for strategy in strategies if strategy.depth]
    if budget != "none" and drafting and all(strategy.is_tree for strategy in drafting):
        yield Issue(
            f"{_SPECULATION}.budget",
            f"{budget} shortens chains, and all strategies are trees, which are verified whole",
            remedy=f"name a chain too, such as {drafting[0].drafter}:8, or leave it out",
        )


def _networks(c: Config, strategies: list[Strategy]) -> Iterator[Issue]:
    """Check that an engine that is not ours drafts with at most one network."""
    named = {strategy.drafter for strategy in strategies} if strategies else set(at_hand(c.speculation))
    networks = [name for name, entry in CATALOGUE.items() if name in named and entry.is_network]
    if len(networks) > 1 and not capabilities_of(c).learner_network:
        yield Issue(
            f"{_SPECULATION}.strategies",
            f"{' and '.join(networks)} are networks, and the {c.rollout.engine.backend} engine drafts with one at most",
            remedy=f"leave {' or '.join(networks)} out; suffix and ngram go beside either",
        )


def _device(c: Config) -> Iterator[Issue]:
    """Check for a product that the GPU's tensor cores lack."""
    form = FORMATS.get(c.rollout.quantization)
    device = device_named(c.cluster.gpu) if c.cluster.gpu is not None else None
    if form is not None and form.activations.startswith("float8") and device is not None and not device.float8:
        yield Issue(
            "rollout.quantization",
            f"{form.name} needs tensor cores for it (Ada, Hopper), and cluster.gpu={device.name} has none",
            remedy="set it to w8a8, which any of these GPUs has",
        )
