"""A configuration that cannot fit its GPU is refused with the sum, wherever the GPU is known; the shipped ones fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.tools.qwen import LARGE, network, qwen
from config.tree import Config
from launch.config import ConfigError, check_environment, load_config
from launch.config.memory import (
    device_of,
    driver_names,
    fitted,
    fitting,
    memory_plans,
    misfit,
    network_of,
    phase_fits,
    self_format,
)
from policies.roofline.devices import DEVICES
from tests.policies.networks import NETWORKS

Write = Callable[..., Path]
EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED = sorted(path for path in EXAMPLES.rglob("*.yaml") if "dtype: bfloat16" in path.read_text(encoding="utf-8"))
SIZES = NETWORKS | {size: network(qwen(size)) for size in LARGE}
COLOCATED = ("cluster.layout=colocated", "model.dtype=bfloat16", "learner.autocast_bf16=true")


def write_model(directory: Path, size: str) -> Path:
    net = SIZES[size]
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": net.vocab_size,
        "hidden_size": net.hidden_size,
        "intermediate_size": net.intermediate_size,
        "num_hidden_layers": net.num_layers,
        "num_attention_heads": net.num_heads,
        "num_key_value_heads": net.num_kv_heads,
        "tie_word_embeddings": net.tied,
        "max_position_embeddings": 32_768,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def shipped(path: Path, tmp_path: Path) -> Config:
    """The example with the config.json of its model."""
    config = Config.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    size = next(size for size in SIZES if f"-{size}" in config.model.path.lower())
    model = config.model.model_copy(update={"path": str(write_model(tmp_path / size, size))})
    return config.model_copy(update={"model": model})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_gpu_configuration_fits_its_stated_gpu(path: Path, tmp_path: Path) -> None:
    config = shipped(path, tmp_path)
    device, net = device_of(config), network_of(config)
    assert device is not None, "the configuration names no GPU (cluster.gpu)"
    assert net is not None
    assert misfit(config, device) is None
    sleeping = {"engines_sleep": True, "optimizer_away": True}
    assert phase_fits(config, device.memory_bytes, **sleeping)
    for plan in memory_plans(config, net, device.memory_bytes, **sleeping):
        assert all(phase.total_bytes < 0.95 * device.memory_bytes for phase in plan.phases), plan.worst.text()


def test_what_cannot_fit_is_refused_with_the_sum_and_what_to_change(write_config: Write, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "7b")
    overrides = [*COLOCATED, "cluster.gpu=A10G", "learner.activation_checkpointing=true"]
    (issue,) = [i for i in check_environment(load_config(write_config(), overrides).config) if "GiB" in i.message]
    assert issue.key == "learner.ranks"
    assert "A10G has 22.5 GiB" in issue.message
    assert "optimizer 56.7" in issue.message
    assert "plan-step" in issue.remedy
    sharded = [*overrides, "learner.ranks=8", "rollout.workers=8"]
    (issue,) = [i for i in check_environment(load_config(write_config(), sharded).config) if "GiB" in i.message]
    assert issue.key != "learner.ranks"


def test_the_largest_item_names_the_key(write_config: Write, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "1.5b")
    faults = {
        "learner.micro_batch_tokens=65536": "learner.micro_batch_tokens",
        "rollout.engine.kv_tokens=4000000": "rollout.engine.kv_tokens",
    }
    for override, key in faults.items():
        config = load_config(write_config(), [*COLOCATED, override]).config
        issue = misfit(config, DEVICES["A100"])
        assert issue is not None
        assert issue.key == key


def test_a_job_asks_rays_nodes_and_a_named_gpu_comes_first(write_config: Write, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "7b")
    config = load_config(write_config(), [*COLOCATED, "learner.ranks=8", "rollout.workers=8"]).config
    node = {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A10G": 1.0}}
    large = {"Alive": True, "Resources": {"accelerator_type:H200": 1.0}}
    dead = large | {"Alive": False}
    with pytest.raises(ConfigError, match="a colocated A10G has"):
        fitted(config, [node, dead])
    fitted(config, [node, large])
    fitted(config, [{"Alive": True, "Resources": {"CPU": 8.0}}])
    named = load_config(write_config(), [*COLOCATED, "cluster.gpu=L40S"]).config
    with pytest.raises(ConfigError, match="a colocated L40S has"):
        fitted(named, [large])


def test_an_unknown_gpu_and_one_for_a_cpu_layout_are_faults(write_config: Write) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.gpu.*'B9000' is not known"):
        load_config(write_config(), ["cluster.layout=colocated", "cluster.gpu=B9000"])
    with pytest.raises(ConfigError, match=r"cluster\.gpu.*embedded"):
        load_config(write_config(), ["cluster.gpu=H100"])


def test_the_driver_names_this_machines_gpus(tmp_path: Path) -> None:
    for number, model in enumerate(("NVIDIA A10G", "NVIDIA H100 80GB HBM3")):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 16\n")
    assert driver_names(tmp_path) == ["NVIDIA A10G", "NVIDIA H100 80GB HBM3"]
    assert driver_names(tmp_path / "nothing") == []


def test_without_a_known_model_or_gpus_nothing_is_refused(write_config: Write, tmp_path: Path) -> None:
    config = load_config(write_config(), [*COLOCATED]).config
    assert misfit(config, DEVICES["A10G"]) is None
    assert not phase_fits(config, 1 << 40, engines_sleep=True, optimizer_away=True), "the careful way"
    write_model(tmp_path / "model", "7b")
    embedded = load_config(write_config(), []).config
    assert misfit(embedded, DEVICES["A10G"]) is None
    learner_only = load_config(write_config(), [*COLOCATED, "rollout.engine.device=cpu"]).config
    net = network_of(learner_only)
    assert net is not None
    (plan,) = memory_plans(learner_only, net, 1 << 36, engines_sleep=False, optimizer_away=False)
    assert plan.place == "learner"


def worst_bytes(config: Config) -> int:
    """What a GPU needs at least, with nobody asleep."""
    net = network_of(config)
    assert net is not None
    plans = memory_plans(config, net, DEVICES["H100"].memory_bytes, engines_sleep=False, optimizer_away=False)
    return max(plan.worst.total_bytes for plan in plans)


def test_a_self_drafters_copy_that_does_not_fit_has_fewer_bits_or_is_left_out(
    write_config: Write, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", "7b")
    # Engines on GPUs of their own, which need the most.
    sizes = ["cluster.layout=disaggregated", "cluster.gpus_per_worker=1", "rollout.engine.kv_tokens=800000"]
    sizes += ["learner.ranks=8", "learner.activation_checkpointing=true"]
    key = "rollout.speculation.self.format"
    formats = ("w8a8", "w4a16", "none")
    needed = {
        name: worst_bytes(load_config(write_config(), [*COLOCATED, *sizes, f"{key}={name}"]).config) for name in formats
    }
    assert needed["none"] < needed["w4a16"] < needed["w8a8"]
    config = load_config(write_config(), [*COLOCATED, *sizes]).config
    for name in formats:
        device = replace(DEVICES["H100"], memory_bytes=needed[name] + 1)
        found, note = fitting(config, device)
        assert misfit(found, device) is None
        form = self_format(found)
        assert (form.name if form is not None else "none") == name
        assert (note == "") == (name == "w8a8"), note
        assert ("draft without self" in note) == (name == "none")
    small = replace(DEVICES["H100"], memory_bytes=needed["none"] - 1)
    assert fitting(config, small) == (config, ""), "that is not the copy's fault"
    assert misfit(config, small) is not None


def test_a_self_drafter_that_is_named_and_does_not_fit_is_a_fault(write_config: Write, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "7b")
    sizes = ["learner.ranks=8", "rollout.workers=8", "cluster.offload=never", "rollout.engine.kv_tokens=65536"]
    wanted = ["rollout.speculation.strategies=[self:5]", "rollout.speculation.self.format=w8a8"]
    config = load_config(write_config(), [*COLOCATED, *sizes, *wanted]).config
    device = replace(DEVICES["H100"], memory_bytes=worst_bytes(config) - 1)
    assert fitting(config, device) == (config, "")
    assert misfit(config, device) is not None


@pytest.mark.parametrize(
    "overrides",
    [("rollout.speculation.mode=off",), ("rollout.quantization=w8a8",), ("rollout.speculation.strategies=[suffix:8]",)],
)
def test_no_copy_is_counted_where_nobody_drafts_with_one(
    overrides: tuple[str, ...], write_config: Write, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", "7b")
    assert self_format(load_config(write_config(), [*COLOCATED, *overrides]).config) is None
