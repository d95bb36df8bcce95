"""The command line: quick, light to import, clear when something fails, with the exit codes it documents."""

import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cluster.installed import installed
from launch.commands.cli import app
from launch.commands.eval_show import show_metrics
from launch.commands.flags import as_overrides
from launch.errors import PacelineError
from launch.interrupt import Interrupted
from models.manifest import WeightsManifest  # a module of a lower layer, for its name

Write = Callable[..., Path]
ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers", "plotly", "pandas", "datasets")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_help_imports_nothing_heavy() -> None:
    done = python(
        "import sys\nfrom launch.commands.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0, e.code\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    assert all(command in done.stdout for command in ("train", "config", "warmup", "eval", "report"))


@pytest.mark.parametrize(
    "module", ["launch.config", "launch.config.show", "launch.observe", "launch.report", "launch.report.summary"]
)
def test_light_modules(module: str) -> None:
    done = python(f"import sys, {module}\nprint([m for m in {HEAVY!r} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_module_entry_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch", "config"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 2
    assert "give a configuration file" in done.stderr
    assert "Traceback" not in done.stderr


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_version_says_what_is_installed() -> None:
    code, said, _ = run("--version")
    assert code == 0
    assert dict(line.split(": ", 1) for line in said.splitlines()) == installed()


def test_config_prints_values_with_sources_and_what_would_stop_a_run(write_config: Write) -> None:
    path = write_config()
    code, out, err = run("config", str(path), "run.seed=3")
    assert code == 2
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in out.splitlines()}
    assert lines["seed: 3"] == "override"
    assert lines["steps: 5"] == f"{path}:3"
    assert "error: model.path" in err
    assert "biased" not in err
    _, _, err = run("config", str(path), "rollout.budget.share=0.5", "objective.name=grpo")
    assert "biased: objective.normalize=group" in err


def test_config_schema() -> None:
    code, out, _ = run("config", "--schema")
    assert code == 0
    assert "`rollout.sampling.temperature`" in out


def test_config_errors_exit_2(write_config: Write) -> None:
    code, _, err = run("config", str(write_config()), "run.stpes=3", "run.steps=0")
    assert code == 2
    assert "did you mean run.steps?" in err
    assert ">= 1" in err


@pytest.mark.parametrize("command", ["train", "warmup", "eval"])
def test_missing_inputs_stop_before_any_work(write_config: Write, command: str) -> None:
    code, _, err = run(command, str(write_config()), "data.eval=gone.jsonl", "warmup.data=w.jsonl")
    assert code == 2
    assert "gone.jsonl" in err


def test_sections_a_command_needs(write_config: Write) -> None:
    assert run("warmup", str(write_config()))[0] == 2
    assert run("eval", str(write_config()))[0] == 2
    assert run("eval", str(write_config()), "data.eval=e", "--best")[0] == 2


@pytest.fixture
def ready(write_config: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with which nothing is wrong."""
    monkeypatch.setattr("launch.commands.preflight.preflight", lambda *_: [])
    return write_config()


def fake_train(monkeypatch: pytest.MonkeyPatch, outcome: Callable[..., int]) -> None:
    module = types.ModuleType("launch.run.train")
    module.train = outcome  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "launch.run.train", module)


def test_train_gets_config_source_and_resume(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, str, bool, list[str]]] = []

    def train(config: object, *, config_source: str, resume: bool, allowed: list[str], step: int | None) -> int:
        calls.append((config.run.steps, config_source, resume, allowed))  # type: ignore[attr-defined]
        return 7

    fake_train(monkeypatch, train)
    arguments = ("run.steps=9", "--resume", "--allow", "reward", "reward.terms.0={kind: math}")
    assert run("train", str(ready), *arguments)[0] == 7
    assert calls == [(9, f"{ready} run.steps=9 'reward.terms.0={{kind: math}}'", True, ["reward"])]
    assert run("train", str(ready), "--allow", "reward")[0] == 2


def test_what_starts_runs_by_itself_goes_on_where_it_can_and_starts_where_it_cannot(
    ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed: list[bool] = []

    def train(config: object, *, resume: bool, **_: object) -> int:
        resumed.append(resume)
        return 0

    fake_train(monkeypatch, train)
    arguments = ("train", str(ready), f"run.dir={tmp_path / 'runs'}", "run.name=again", "--resume-or-start")
    assert run(*arguments)[0] == 0
    checkpoint = tmp_path / "runs/again/checkpoints/step_000002"
    checkpoint.mkdir(parents=True)
    assert run(*arguments)[0] == 0  # one that was not finished is none
    (checkpoint / "state.json").write_text("{}")
    assert run(*arguments)[0] == 0
    assert resumed == [False, False, True]


def test_files_that_describe_clusters_are_checked_all_and_each_fault_says_in_which(tmp_path: Path) -> None:
    good, bad = ROOT / "examples/cluster/kuberay-cluster.yaml", tmp_path / "other.yaml"
    bad.write_text(good.read_text().replace("rayVersion: 2.60.0", "rayVersion: 2.9.0"))
    code, out, _ = run("check-cluster", str(good))
    assert (code, out) == (0, f"{good}: no problems found\n")
    code, out, err = run("check-cluster", str(bad), str(good))
    assert (code, out) == (2, f"{good}: no problems found\n")
    assert "spec.rayVersion" in err
    assert "other.yaml" in err
    assert "2.9.0" in err


def test_checking_a_file_for_ray_up_says_nothing_of_ray_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch", "check-cluster", "cluster.yaml"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cluster.yaml: no problems found\n", "")


def raising(error: BaseException) -> Callable[..., int]:
    def train(config: object, **_: object) -> int:
        raise error

    return train


class LowerError(Exception):
    remedy = "convert it"


LowerError.__module__ = WeightsManifest.__module__


@pytest.mark.parametrize(
    ("error", "code", "texts", "traceback"),
    [
        (PacelineError("disk is full", remedy="delete runs/old"), 1, ["disk is full", "delete runs/old"], False),
        (LowerError("unsupported model Foo"), 1, ["unsupported model Foo", "convert it"], False),
        (FileNotFoundError(2, "No such file or directory", "/x/y"), 1, ["No such file or directory: /x/y"], False),
        (ValueError("a bug"), 1, ["a bug", "please report"], True),
        (KeyboardInterrupt(), 130, ["interrupted"], False),
        (Interrupted("SIGTERM"), 130, ["interrupted"], False),
    ],
)
def test_failures(
    ready: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, texts: list[str], traceback: bool
) -> None:
    fake_train(monkeypatch, raising(error))
    got, _, err = run("train", str(ready))
    assert got == code
    assert all(text in err for text in texts), err
    assert ("Traceback" in err) == traceback


def test_debug_shows_the_traceback(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_train(monkeypatch, raising(PacelineError("expected")))
    code, _, err = run("train", str(ready), "--debug")
    assert code == 1
    assert "Traceback" in err


def test_errors_of_ray_tasks_are_unwrapped(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray_error = type("RayTaskError", (Exception,), {"__module__": "ray.exceptions"})("boom")
    ray_error.cause = PacelineError("the model is gone")
    fake_train(monkeypatch, raising(ray_error))
    code, _, err = run("train", str(ready))
    assert code == 1
    assert "the model is gone" in err
    assert "Traceback" not in err


def test_report_of_no_run(tmp_path: Path) -> None:
    code, _, err = run("report", str(tmp_path))
    assert code == 2
    assert "no run in" in err


def test_long_commands_are_not_broken_over_lines(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "paceline train " + "x" * 150 + " --resume"
    fake_train(monkeypatch, raising(PacelineError("a learner rank was lost", remedy=f"go on with: {command}")))
    _, _, err = run("train", str(ready))
    assert f"go on with: {command}\n" in err


def test_a_reader_that_stops_early_is_no_failure(write_config: Write) -> None:
    command = f"set -o pipefail; {sys.executable} -m launch config --schema | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.startswith("### `run`")
    assert done.stderr == ""


def test_flags_of_another_trainer_are_read_as_keys(write_config: Write) -> None:
    """As TRL's scripts and Hydra's launchers write them; an option of ours that is mistyped stays one."""
    path = str(write_config())
    trl = ["--learning_rate", "1e-5", "--num_generations=8", "--top_k", "-1", "--use_vllm", "--config-path=conf"]
    code, _, err = run("config", *trl, path, "run.steps=7")
    assert code == 2
    for words in (
        "learning_rate (override): unknown key use", "config_path (override): unknown key leave it out",
        "learner.optimizer.lr=1e-05 rollout.rollouts_per_prompt=8 rollout.sampling.top_k=0 "
        "rollout.engine.backend=vllm",
    ):  # fmt: skip
        assert words in " ".join(err.replace("\u2502", " ").split()), err
    code, _, err = run("train", path, "--resme")
    assert (code, "--resume" in err) == (2, True), err
    code, _, err = run("config", path, "--", "--beta")
    assert (code, "'--beta' is not an override" in err) == (2, True), err


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["c.yaml", "--allow", "--lr", "--resume"], ["c.yaml", "--allow", "--lr", "--resume"]),  # --lr is a value
        (["c.yaml", "--resume", "--lr", "1"], ["c.yaml", "--resume", "lr=1"]),
        (["--lr", "--seed", "3"], ["lr=true", "seed=3"]),
        (["--flag", "run.steps=3", "-1"], ["run.steps=3", "-1", "flag=true"]),
        (["a=1", "--", "--lr", "1"], ["a=1", "--", "--lr", "1"]),
        (["c.yaml", "--steps", "5", "--step", "5"], ["c.yaml", "--step", "5", "steps=5"]),
        (["c.yaml", "--stpe=5"], ["c.yaml", "--stpe=5"]),
    ],
)
def test_a_flag_takes_what_follows_it_unless_that_is_a_key(given: list[str], wanted: list[str]) -> None:
    assert as_overrides(given, {"--resume": False, "--allow": True, "--step": True}) == wanted


@pytest.mark.parametrize("command", ["train", "config"])
def test_a_word_of_a_key_is_answered_with_the_key_and_not_with_an_option(write_config: Write, command: str) -> None:
    """`--step` of a resume resembles it."""
    code, _, err = run(command, str(write_config()), "--steps", "5")
    assert (code, "did you mean run.steps?" in " ".join(err.split())) == (2, True), err


def test_an_evaluation_is_a_table_of_sets_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    show_metrics(
        {
            "eval/reward": 0.5312,
            "eval/aime/reward": 0.25,
            "eval/aime/pass@8": 0.375,
            "eval/aime/source/2024/reward": 0.125,
            "eval/master_reward": 0.6875,
            "eval/master_aime/reward": 0.8125,
            "eval/failed": 3.0,
        }
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if any(mark.isalnum() for mark in line)]
    assert rows == [
        ["held", "out", "reward", "failed", "pass@8"],
        ["mean", "of", "sets", "0.5312", "3", "-"],
        ["aime", "0.25", "-", "0.375"],
        ["aime/source/2024", "0.125", "-", "-"],
        ["full", "precision", "0.6875", "-", "-"],
        ["full", "precision", "aime", "0.8125", "-", "-"],
    ]


def test_many_metrics_are_whole_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show_metrics({f"eval/pass@{k}": 1 / k for k in range(1, 40)})
    assert "pass@39" in capsys.readouterr().out.splitlines()[1]
