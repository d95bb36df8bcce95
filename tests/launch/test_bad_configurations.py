"""A table of configurations that cannot be meant: each is refused in a line or two that name the key and what to do.

Nothing here may hang, show a traceback, or be accepted. What the inputs hold is tested in test_preflight.py,
contradictions between two keys in test_config_check.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.commands.cli import app
from launch.config import ConfigError, check_environment, load_config
from launch.config.document import MAX_DEPTH, MAX_VALUES
from launch.config.schema import by_name

Write = Callable[..., Path]
TRAINED = ["rollout.workers=2", "drafter.train=true"]

BAD: list[tuple[list[str], str, str]] = [  # overrides, the key, what is said of it
    # names and places
    (["run.name=.."], "run.name", "matching"),
    (["run.name=."], "run.name", "matching"),
    (["run.name=-rf"], "run.name", "matching"),
    (["run.name=.hidden"], "run.name", "matching"),
    (["run.name=''"], "run.name", "matching"),
    (["run.name=a b"], "run.name", "matching"),
    (["run.name=../up"], "run.name", "matching"),
    (["run.name=" + "x" * 201], "run.name", "matching"),
    (["run.name=warm_starts"], "run.name", "choose another name"),
    # numbers
    (["learner.optimizer.lr=.inf"], "learner.optimizer.lr", "expected a finite number"),
    (["learner.optimizer.lr=.nan"], "learner.optimizer.lr", "expected a finite number"),
    (["learner.optimizer.lr=1e999"], "learner.optimizer.lr", "expected a finite number"),
    (["learner.optimizer.lr=100"], "learner.optimizer.lr", "<= 10"),
    (["learner.optimizer.lr=0"], "learner.optimizer.lr", "> 0"),
    (["learner.optimizer.lr=-1e-6"], "learner.optimizer.lr", "> 0"),
    (["learner.optimizer.betas=[0.9, .inf]"], "learner.optimizer.betas.1", "expected a finite number"),
    (["learner.timeout_s=.inf"], "learner.timeout_s", "expected a finite number"),
    (["rollout.stall_timeout_s=.inf"], "rollout.stall_timeout_s", "expected a finite number"),
    (["rollout.max_logprob_gap=.inf"], "rollout.max_logprob_gap", "expected a finite number"),
    (["objective.clip_high=.inf"], "objective.clip_high", "expected a finite number"),
    (["cluster.cpus_per_worker=.inf"], "cluster.cpus_per_worker", "expected a finite number"),
    (["cluster.gpus_per_learner=.inf"], "cluster.gpus_per_learner", "expected a finite number"),
    (["cluster.start_timeout_s=.inf"], "cluster.start_timeout_s", "expected a finite number"),
    (["rollout.workers=1000000"], "rollout.workers", "<= 10000"),
    (["rollout.workers=0"], "rollout.workers", ">= 1"),
    (["rollout.workers={min: 3, max: 2}"], "rollout.workers.max", "2 is less than rollout.workers.min = 3"),
    (["rollout.workers={min: 0, max: 2}"], "rollout.workers.min", ">= 1"),
    (["rollout.workers={min: 2}"], "rollout.workers.max", "required"),
    (["rollout.workers={min: 1, max: 2, most: 3}"], "rollout.workers.most", "unknown key"),
    (["rollout.workers=true"], "rollout.workers", "expected an integer"),
    (["rollout.workers=two"], "rollout.workers", "expected an integer"),
    (["rollout.workers=null"], "rollout.workers", "expected an integer"),
    (["rollout.workers=[1]"], "rollout.workers", "expected an integer"),
    (["rollout.staleness=2"], "rollout.staleness", "<= 1"),
    (["rollout.partial.max_steps=3"], "rollout.partial.max_steps", "tokens_per_step is not"),
    (["rollout.partial={tokens_per_step: 8, max_steps: 1}"], "rollout.partial.max_steps", ">= 2"),
    (["rollout.partial.tokens_per_step=100000"], "rollout.partial.tokens_per_step", "no response would go on"),
    (["rollout.prompts_per_step=1000000000"], "rollout.prompts_per_step", "<= 1000000"),
    (["rollout.rollouts_per_prompt=0"], "rollout.rollouts_per_prompt", ">= 1"),
    (["rollout.rollouts_per_prompt=1"], "rollout.rollouts_per_prompt", "compares responses of a prompt"),
    (
        ["rollout.rollouts_per_prompt=1", "objective.baseline=none", "objective.drop_zero_variance=true"],
        "objective.drop_zero_variance",
        "every group is dropped",
    ),
    (["rollout.engine.kv_tokens=1000000000000"], "rollout.engine.kv_tokens", "<= 10000000000"),
    (["rollout.engine.threads=100000"], "rollout.engine.threads", "<= 4096"),
    (["learner.threads=100000"], "learner.threads", "<= 4096"),
    (["learner.ranks=1000000"], "learner.ranks", "<= 10000"),
    (["reward.workers=1000000"], "reward.workers", "<= 10000"),
    (["run.steps=" + "9" * 5000], "run.steps", "expected an integer"),
    (["run.steps=99999999999"], "run.steps", "<= 1000000000"),
    (["run.seed=-1"], "run.seed", ">= 0"),
    (["rollout.sampling.temperature=-1"], "rollout.sampling.temperature", ">= 0"),
    (["rollout.sampling.top_p=0"], "rollout.sampling.top_p", "> 0"),
    (["rollout.sampling.top_p=1.1"], "rollout.sampling.top_p", "<= 1"),
    (["eval.samples=0"], "eval.samples", ">= 1"),
    # forms
    (["reward.terms=[]"], "reward.terms", "at least 1"),
    (["reward.terms=math"], "reward.terms", "expected a list of sections"),
    (["data=train.jsonl"], "data", "expected a section"),
    (["model.dtype=float16"], "model.dtype", "one of float32, bfloat16"),
    (["run={}"], "run.name", "required and missing"),
    (["run.steps"], "", "write key=value"),
    (["=3"], "", "write key=value"),
    (["run.steps=[1"], "run.steps", "not a YAML value"),
    (["run.steps=" + "[" * 900], "run.steps", "not a YAML value"),
    (["run.steps=" + "[" * 400 + "]" * 400], "run.steps", "nested deeper than"),
    (["data.limit=!!python/object:os.system 1"], "data.limit", "is not allowed"),
    # connections
    (["cluster.address=garbage"], "cluster.address", "is not host:port"),
    (["cluster.address=host:99999"], "cluster.address", "for example 10.0.0.1:6379"),
    (["cluster.address=ray://head:10001"], "cluster.address", "ray job submit"),
    ([*TRAINED, "coordinator.host=0.0.0.0", "coordinator.curve.enabled=false"], "coordinator.host", "open to everyone"),
    (
        [*TRAINED, "coordinator.curve={enabled: false, directory: keys}"],
        "coordinator.curve.enabled",
        "leave one of them out",
    ),
    (
        [*TRAINED, "coordinator.admin_host=10.0.0.5", "coordinator.admin.token=false"],
        "coordinator.admin.token",
        "ssh -L",
    ),
    ([*TRAINED, "coordinator.admin.certificate=a.pem"], "coordinator.admin.key", "set both"),
    # other trainers' names
    (["learning_rate=1e-6"], "learning_rate", "use learner.optimizer.lr=1e-06"),
    (["learner.lr=1e-6"], "learner.lr", "did you mean learner.optimizer.lr=1e-06?"),
    (["algorithm=grpo"], "algorithm", "use objective.name=grpo"),
    (["objective.loss=gspo"], "objective.loss", "expected one of clip, sequence_clip, sequence_band, cispo"),
    (["objective.normalize_std=false"], "objective.normalize_std", "use objective.normalize=none"),
    (["rollout.n=8"], "rollout.n", "use rollout.rollouts_per_prompt"),
    (["num_generations=8"], "num_generations", "use rollout.rollouts_per_prompt"),
    (["lora.rank=8"], "lora.rank", "did you mean learner.lora.rank=8?"),
    (["actor_rollout_ref.rollout.n=4"], "actor_rollout_ref.rollout.n", "use rollout.rollouts_per_prompt=4"),
    (
        ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "cluster.gpus_per_worker=2",
    ),
    (["rollout.ulysses_sequence_parallel_size=2"], "rollout.ulysses_sequence_parallel_size", "is not supported"),
    (["data.max_response_length=9"], "data.max_response_length", "use rollout.sampling.max_new_tokens"),
    (["trainer.total_epochs=3"], "trainer.total_epochs", "run.steps, in RL steps: epochs x prompts"),
    # slips
    (["run.stpes=3"], "run.stpes", "did you mean run.steps?"),
    (["rollout.sampling.temprature=1"], "rollout.sampling.temprature", "did you mean rollout.sampling.temperature?"),
]


@pytest.mark.parametrize(("overrides", "key", "words"), BAD, ids=[" ".join(row[0])[:60] for row in BAD])
def test_what_cannot_be_meant_is_refused(write_config: Write, overrides: list[str], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), overrides)
    issues = [issue for issue in caught.value.issues if issue.key == key]
    assert issues, caught.value.message
    assert words in str(issues[0])
    assert len(caught.value.message) < 600


def test_the_table_is_refused_by_the_command_too(write_config: Write) -> None:
    for overrides, *_ in BAD:
        done = CliRunner().invoke(app, ["config", str(write_config()), "--", *overrides])
        assert done.exit_code == 2, overrides
        assert "Traceback" not in done.output, overrides
        assert "Internal error" not in done.output, overrides


REST = "}\nmodel: {path: m}\ndata: {train: t}"
FILES = {
    "alias bomb": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        "values",
    ),
    "alias bomb of keys": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{a: *a{i - 1}, b: *a{i - 1}}}\n" for i in range(1, 23)),
        "values",
    ),
    "nesting": ("run: " + "[" * 300 + "]" * 300, "nested deeper than"),
    "deep nesting": ("run: " + "[" * 50_000 + "]" * 50_000, "nested deeper than"),
    "deep lists": ("run:\n  " + "- " * 5000, "nested deeper than"),
    "a long integer": ("run: {name: x, steps: " + "9" * 5000 + REST, "an integer"),
    "a long hexadecimal": (
        "run: {name: x, steps: 0x" + "f" * 9999 + REST,
        "integer",
    ),
    "an alias of itself": ("run: &r {name: *r}", "may not contain itself"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_a_few_lines(write_config: Write, name: str) -> None:
    text, words = FILES[name]
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(text))
    assert words in caught.value.message
    assert sum(words in str(issue) for issue in caught.value.issues) == 1


def test_an_honest_file_is_far_from_the_limits(write_config: Write) -> None:
    deepest = max(name.count(".") for name in by_name())
    assert deepest + 1 < MAX_DEPTH / 2
    assert 10 * len(by_name()) < MAX_VALUES
    terms = "".join(f"reward.terms.{i}={{kind: math, name: m{i}}}\n" for i in range(1, 50)).splitlines()
    assert len(load_config(write_config(), terms).config.reward.terms) == 50


def test_an_override_given_as_two_values_is_a_slip(write_config: Write) -> None:
    """On the command line; a program that calls load_config may override its own overrides."""
    path = str(write_config())
    done = CliRunner().invoke(app, ["config", path, "run.steps=3", "run.seed=1", "run.steps=4"])
    assert done.exit_code == 2
    assert "run.steps (override): given as 3 and as 4" in " ".join(done.stderr.split())
    done = CliRunner().invoke(app, ["config", path, "run.steps=3", "run.steps=3"])
    assert "steps: 3" in done.stdout
    assert "given as" not in done.stderr
    assert load_config(path, ["run.steps=3", "run.steps=4"]).config.run.steps == 4


@pytest.mark.parametrize("folder", ["/proc", "/proc/self/runs", "/sys/kernel/x", "/dev", "/dev/null/x"])
def test_no_run_is_written_among_the_kernels_files(write_config: Write, folder: str) -> None:
    config = load_config(write_config(), [f"run.dir={folder}"]).config
    assert [i.remedy for i in check_environment(config) if i.key == "run.dir"] == ["choose another run.dir"]


def test_shared_memory_is_a_place_for_runs(write_config: Write) -> None:
    config = load_config(write_config(), ["run.dir=/dev/shm/runs"]).config
    assert "run.dir" not in [issue.key for issue in check_environment(config)]


def test_a_directory_that_holds_no_drafter_is_refused(write_config: Write, tmp_path: Path) -> None:
    key, head = "rollout.speculation.eagle.path", tmp_path / "head"
    head.mkdir()

    def found() -> list[str]:
        config = load_config(write_config(), [f"{key}=head"]).config
        return [issue.remedy for issue in check_environment(config) if issue.key == key]

    assert "paceline warmup-drafter" in found()[0]
    (head / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (head / "model.safetensors").touch()
    assert "paceline warmup-drafter" in found()[0]
    (head / "config.json").write_text('{"drafter": "eagle"}')
    assert found() == []


def test_a_key_of_an_earlier_version_names_what_took_its_place(write_config: Write) -> None:
    with pytest.raises(ConfigError, match=r"use rollout\.speculation\.suffix\.window_bytes"):
        load_config(write_config(), ["rollout.speculation.suffix.window_rollouts=64"])
