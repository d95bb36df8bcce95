"""Make the scenario of a run's own configuration. Owns the mapping of its keys; the scenario adds what a configuration
lacks (lengths, acceptance, clouds, prices).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from config.catalogue import by_name
from launch.config import Config, ConfigError, load_config
from launch.config.issues import Issue
from launch.config.lookahead import no_lookahead
from launch.config.memory import device_of, drafters_of
from planner.simulate.scenario import Scenario, load_scenario, scenario_of
from planner.simulate.shapes import SHAPES

_NODE = 8  # GPUs per node, unless workers fill fewer
_MODES = {"off": "off", "adaptive": "adaptive", "paper": "adaptive", "fixed": "static", "roofline": "roofline"}


def is_run(path: Path) -> bool:
    """Whether the file is a run's configuration. Raises OSError."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return False
    return isinstance(tree, dict) and {"run", "data"} <= set(tree)


def load(path: Path, overrides: Sequence[str] = ()) -> tuple[Scenario, list[str]]:
    """Load either kind of file. Returns the scenario, and what was assumed of a run. Overrides are assigned by their
    key: `model` (alone) and the scenario's sections are the scenario's, all others the run's. Raises ConfigError,
    OSError."""
    if not is_run(path):
        return load_scenario(path, list(overrides)), []
    own = [text for text in overrides if _is_scenarios(text)]
    config = load_config(path, [text for text in overrides if not _is_scenarios(text)]).config
    tree, assumed = _tree(config, path.stem, {text.partition("=")[0].strip() for text in own})
    return scenario_of(tree, own), assumed


def _is_scenarios(text: str) -> bool:
    key = text.partition("=")[0].strip()
    section = key.partition(".")[0]
    both = {"model", "coordinator"}  # sections of a run; a scenario's model is a name or sizes
    return key == "model" or (section in Scenario.model_fields and section not in both)


def _tree(config: Config, name: str, given: set[str]) -> tuple[dict[str, Any], list[str]]:
    rollout, cluster, learner = config.rollout, config.cluster, config.learner
    gpus = config.engine_ranks if cluster.layout != "embedded" else max(round(cluster.gpus_per_worker), 1)
    workers = rollout.workers.max
    per_node = min(max(_NODE // gpus, 1), workers)
    while workers % per_node:
        per_node -= 1
    limit = rollout.sampling.max_new_tokens
    device = None if cluster.layout == "embedded" else device_of(config)
    spoken, looks = rollout.speculation.strategies, no_lookahead(config) is None
    strategies = list(spoken or [arm for one in by_name(drafters_of(config)).values() for arm in one.arms])
    tree: dict[str, Any] = {
        "name": name,
        "seed": config.run.seed,
        "model": _model(config, given),
        "quantization": rollout.quantization,
        "fleet": {
            "nodes": workers // per_node,
            "gpus_per_node": per_node * gpus,
            "gpus_per_worker": gpus,
            "layout": "disaggregated" if cluster.layout == "disaggregated" else "colocated",
            "learner_nodes": max(-(-learner.ranks // (per_node * gpus)), 1),
            "device": None if device is None else device.name,
        },
        "workload": {
            "steps": min(config.run.steps, 10),
            "prompts_per_step": rollout.prompts_per_step,
            "rollouts_per_prompt": rollout.rollouts_per_prompt,
            "prompt_tokens": max(config.data.max_prompt_tokens // 2, 1),
        },
        "lengths": {"median": max(limit / 4, 1.0), "max_tokens": limit},
        "engine": {
            "max_running": rollout.engine.max_running,
            "kv_tokens": rollout.engine.kv_tokens,
            "progress_every_tokens": rollout.engine.progress_every_tokens,
        },
        "speculation": {
            "mode": _MODES[rollout.speculation.mode] if strategies else "off",
            "strategies": strategies,
            "max_running": rollout.speculation.running_limit,
            "training": {"enabled": config.drafter.train and workers > 1},
        },
        "budget": rollout.budget.model_dump(mode="json"),
        "rounds": rollout.rounds.model_dump(mode="json"),
        "abort": rollout.abort.model_dump(mode="json"),
        "lookahead": {"enabled": looks},
        "learning": {
            "ranks": learner.ranks,
            "checkpointing": learner.activation_checkpointing,
            "checkpoint_every": config.checkpoint.every,
        },
        "coordinator": config.coordinator.model_dump(mode="json"),
    }
    if rollout.workers.elastic and tree["fleet"]["layout"] == "disaggregated":
        tree["fleet"]["min_workers"] = rollout.workers.min
    assumed = {
        "lengths": f"lengths.median={tree['lengths']['median']:g}, sigma 1 (a run's folder: lengths.file=RUN)",
        "speculation": "acceptance of every drafter (speculation.acceptance)" if strategies else "",
        "workload": f"prompts of {tree['workload']['prompt_tokens']} tokens, half of what is allowed",
        "prices": "prices, and no interruptions (prices, spot)",
        "lookahead": "900 early tokens to the first difference (lookahead.differs)" if looks else "",
    }
    sections = {key.partition(".")[0] for key in given}
    return tree, [text for section, text in assumed.items() if text and section not in sections]


def _model(config: Config, given: set[str]) -> str:
    if "model" in given:
        return next(iter(SHAPES))  # a placeholder, which is replaced
    path = Path(config.model.path)
    if (path / "config.json").is_file():
        return str(path / "config.json")
    for name in SHAPES:
        if path.name.startswith(name):
            return name
    raise ConfigError(
        [
            Issue(
                "model.path",
                f"{path} is not here, and its name is no public model's that the simulator knows",
                remedy=f"say model={'|'.join(SHAPES)}, or the path of a config.json",
            )
        ]
    )
