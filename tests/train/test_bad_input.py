"""Bad input and bad luck, through the command line: the message names the culprit and the remedy, nothing is lost.

What needs no Ray fails before Ray is started. Losses of workers and ranks: tests/actors, tests/learner, test_resume.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch.commands.cli import app
from launch.errors import PacelineError
from tests.train.conftest import Runs
from tests.train.test_determinism import learning

Json = dict[str, Any]


def fails(runs: Runs, command: str, *overrides: str) -> tuple[int, str]:
    """Exit code and all that was shown, white space joined."""
    result = CliRunner().invoke(app, [command, str(runs.config), *runs.overrides("bad", *overrides)])
    return result.exit_code, " ".join(result.output.split())


def lines(path: Path, *records: Json | str) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.sampling.temprature=1"],
            ["rollout.sampling.temprature", "did you mean rollout.sampling.temperature"],
        ),
        (["run.steps=many"], ["run.steps", "expected an integer", "'many'"]),
        (["model.path=/nowhere"], ["model.path", "/nowhere", "config.json"]),
        (["data.train=/nowhere.jsonl"], ["data.train", "/nowhere.jsonl"]),
    ],
)
def test_configuration(runs: Runs, overrides: list[str], words: list[str]) -> None:
    code, shown = fails(runs, "train", *overrides)
    assert code == 2
    assert all(word in shown for word in words), shown


def bad_line(root: Path) -> list[str]:
    good = {"prompt": "1", "answer": "1"}
    return ["data.train=" + lines(root / "torn.jsonl", good, good, '{"prompt": "1')]


def empty_file(root: Path) -> list[str]:
    return ["data.train=" + lines(root / "empty.jsonl")]


def empty_line(root: Path) -> list[str]:
    return ["data.train=" + lines(root / "blank.jsonl", {"prompt": "1"}, "")]


def too_long(root: Path) -> list[str]:
    return ["data.train=" + lines(root / "long.jsonl", {"prompt": "1 " * 90}), "data.max_prompt_tokens=64"]


def no_chat_template(root: Path) -> list[str]:
    return ["data.template=chat"]


def vocabulary(root: Path) -> list[str]:
    """The right tokenizer beside a model with fewer embeddings."""
    folder = root / "small_vocabulary"
    shutil.copytree(root / "model", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    return [f"model.path={folder}"]


def no_room(root: Path) -> list[str]:
    """40 tokens, and a model for 16."""
    folder = root / "sixteen"
    shutil.copytree(root / "model", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    data = lines(root / "forty.jsonl", {"prompt": "1 " * 40})
    return [f"model.path={folder}", f"data.train={data}", "data.eval=null"]


def missing_weights(root: Path) -> list[str]:
    """A tensor of the checkpoint is gone."""
    from safetensors.torch import load_file, save_file

    folder = root / "hole"
    shutil.copytree(root / "model", folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return [f"model.path={folder}"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (bad_line, ["torn.jsonl, line 3", "data.on_bad_line=skip"]),
        (empty_file, ["data.train", "empty.jsonl", "nothing to use"]),
        (empty_line, ["blank.jsonl, line 2", "empty line"]),
        (too_long, ["data.train", "1 prompts too long", "data.max_prompt_tokens=64"]),
        (no_chat_template, ["no chat template", "data.template=plain", "data.chat_template"]),
        (vocabulary, ["vocabulary mismatch", "8 embeddings", "model.tokenizer"]),
        (no_room, ["1 of the first 1 prompts", "80 tokens", "data.max_prompt_tokens=15"]),
    ],
)
def test_inputs(runs: Runs, case: Callable[[Path], list[str]], words: list[str]) -> None:
    """Before Ray, and nothing is written: there is nothing to resume."""
    code, shown = fails(runs, "train", *case(runs.root))
    assert code == 2
    assert all(word in shown for word in words), shown
    assert "--resume" not in shown
    assert not (runs.root / "bad").exists()


def test_a_late_bad_line_costs_no_ray_either(runs: Runs) -> None:
    """Beyond the records that `paceline config` looks at."""
    good = {"prompt": "1", "answer": "1"}
    data = lines(runs.root / "late.jsonl", *[good] * 99, "{")
    code, shown = fails(runs, "train", f"data.train={data}", "data.limit=null")
    assert code == 1
    assert "late.jsonl, line 100" in shown
    assert "--resume" not in shown
    assert not (runs.root / "bad").exists()


@pytest.mark.ray
def test_missing_weights_are_named_once_and_no_resume_is_offered(runs: Runs) -> None:
    code, shown = fails(runs, "train", *missing_weights(runs.root))
    assert code == 1
    assert "model.norm.weight" in shown
    assert shown.count("did not start") <= 1
    assert "there is no checkpoint yet" in shown
    assert "--resume" not in shown
    assert "Internal error" not in shown
    assert "Traceback" not in shown


def raises_or_hangs(prompt: str, response: str, record: Json) -> float:
    """A reward function with two bad days: it raises for some responses, and hangs for one."""
    if len(response) % 5 == 0:
        raise ValueError("no verdict on this one")
    if len(response) % 3 == 0:
        while True:
            pass
    return float(len(response))


@pytest.mark.ray
def test_bad_records_and_failing_gradings_cost_only_themselves(runs: Runs) -> None:
    good = [{"prompt": f"{i}", "answer": "1"} for i in range(2)]
    data = lines(runs.root / "mixed.jsonl", *good, "{", {"prompt": "1 " * 90})
    term = "{kind: python, function: 'tests.train.test_bad_input:raises_or_hangs', timeout_s: 0.3}"
    runs.run(
        "moody",
        f"data.train={data}",
        "data.eval=null",
        "data.on_bad_line=skip",
        "data.max_prompt_tokens=64",
        "run.steps=1",
        "rollout.prompts_per_step=2",
        f"reward.terms=[{term}]",
        "reward.max_failures_per_step=12",
    )

    def read(name: str) -> list[Json]:
        return [json.loads(line) for line in (runs.root / f"moody/{name}.jsonl").read_text().splitlines()]

    (said,) = [event["message"] for event in read("events") if event["kind"] == "data"]
    assert said == "data.train: 2 of 4 records used; 1 prompts too long, 1 bad records skipped"
    failed = [sample for sample in read("samples") if sample["error"]]
    assert 0 < runs.steps("moody")[0]["rollouts/failed"] == len(failed) < 12
    for sample in failed:
        raised = len(sample["response"]) % 5 == 0
        assert ("no verdict on this one" if raised else "took more than 0.3 s") in sample["error"]
    assert {"grade", "decode", "train"} <= {span["kind"] for span in read("timeline")}
    assert read("events")[-1]["kind"] == "finished"


def test_a_run_without_a_single_rollout_stops(runs: Runs) -> None:
    """The engine rejects every prompt: 40 tokens, and a model for 16. `paceline train` refuses it before."""
    with pytest.raises(PacelineError, match="step 1: none of 24 rollouts could be sampled and graded") as caught:
        runs.alone(*no_room(runs.root))
    assert "16" in caught.value.message


@pytest.mark.ray
@pytest.mark.long
def test_a_full_disk_leaves_the_checkpoint_before_it_and_the_run_resumes_exactly(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from actors.training import checkpoint

    quick = ["run.steps=2", "checkpoint.every=1", "data.eval=null"]
    whole, writes = checkpoint._sync_tree, []

    def full(directory: Path) -> None:
        writes.append(directory.name)
        if len(writes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        whole(directory)

    monkeypatch.setattr(checkpoint, "_sync_tree", full)
    result = CliRunner().invoke(app, ["train", str(runs.config), *runs.overrides("full", *quick)])
    shown = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "No space left on device" in shown
    assert "step_000001 is intact" in shown
    assert "--resume" in shown
    assert len(writes) == 2  # the failed checkpoint is not tried again
    assert [p.name for p in checkpoint.checkpoints(runs.root / "full/checkpoints")] == ["step_000001"]
    before = learning(runs.steps("full"))
    assert learning(runs.run("full", *quick, resume=True)) == before  # the second step, done again


@pytest.mark.ray
def test_a_run_that_learns_nothing_says_so_where_people_look(runs: Runs) -> None:
    """An untrained model and a format that it never meets; eight RL steps of four groups are enough to be sure."""
    overrides = ("run.steps=9", "reward.terms=[{kind: format, pattern: never}]", "data.eval=null")
    result = CliRunner().invoke(app, ["train", str(runs.config), *runs.overrides("dead", *overrides)])
    assert result.exit_code == 0
    shown = " ".join(result.output.split())
    assert "groups 0/4" in shown
    assert shown.count("no_signal: nothing can be learned from") == 1
    assert "rollout.sampling.max_new_tokens" in shown
    events = [json.loads(line) for line in (runs.root / "dead/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "no_signal"] == [8]
    assert "in each of 36 groups all rewards were equal (0)" in (runs.root / "dead/summary.json").read_text()
    assert "in each of 36 groups all rewards were equal (0)" in (runs.root / "dead/report.html").read_text()
    assert not any(event["kind"] == "flat_reward" for event in events)
