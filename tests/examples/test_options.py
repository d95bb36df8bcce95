"""Each example of an option: its configuration says what its comments promise, and two RL steps of a tiny model in one
process show that the option acts."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from examples.guess_and_check import make_data as guess_and_check
from examples.options.make_data import SOLVED, write_sets
from launch.config import Config, load_config
from models.checkpoint import init_model, save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = EXAMPLES / "options"
NAMES = sorted(path.stem for path in OPTIONS.glob("*.yaml"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's data, and an untrained network of a tenth of its size."""
    root = tmp_path_factory.mktemp("options")
    guess_and_check.write_all(root / "data", seed=0, demonstrations=8)
    write_sets(root / "data/train.jsonl", root / "sets")
    shape = json.loads((root / "data/model/config.json").read_text())
    shape |= {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "head_dim": 32}
    (root / "shape").mkdir()
    (root / "shape/config.json").write_text(json.dumps(shape))
    model = init_model(root / "shape", seed=0, dtype=torch.float32, device="cpu", batch_invariant=True)
    save_model(model, root / "model", tokenizer_dir=root / "data/model")
    return root


def trained(folder: Path, example: str, *overrides: str) -> paceline.Run:
    """Two RL steps of an example on the tiny model, at a temperature at which it repeats itself."""
    data = [f"data.train={folder}/data/train.jsonl"]
    if load_config(EXAMPLES / f"{example}.yaml").config.data.sets:
        data = [f"data.sets.{i}.path={folder}/sets/{name}.jsonl" for i, name in enumerate(("small", "large"))]
    return paceline.train(
        EXAMPLES / f"{example}.yaml",
        *(f"run.dir={folder}/runs", "run.steps=2", f"model.path={folder}/model", "warmup=null", "data.eval=null"),
        *("rollout.prompts_per_step=4", "rollout.rollouts_per_prompt=4", "rollout.sampling.temperature=0.3"),
        *("rollout.sampling.max_new_tokens=24", "learner.threads=1", "observe.tensorboard=false"),
        *data,
        *overrides,
        backend="local",
    )


def example(name: str) -> Config:
    return load_config(OPTIONS / f"{name}.yaml").config


def test_every_option_is_on_in_its_own_example_and_listed() -> None:
    on = {
        "partial_rollouts": lambda c: c.rollout.partial.tokens_per_step is not None,
        "curriculum": lambda c: c.rollout.skip.target is not None and c.data.success.known and len(c.data.sets) == 2,
        "dapo": lambda c: c.objective.dynamic_sampling.max_rounds > 1,
        "judge": lambda c: "judge" in [term.kind for term in c.reward.terms],
        "tlt_as_printed": lambda c: c.rollout.speculation.mode == "paper" and c.drafter.algorithm == "hass",
    }
    assert sorted(on) == NAMES
    for name in NAMES:
        assert [other for other in on if on[other](example(name))] == [name]
        assert f"({name}.yaml)" in (OPTIONS / "README.md").read_text(encoding="utf-8")
    shaped = example("dapo").objective
    assert shaped.overlong.buffer_tokens == 40
    assert shaped.length_penalty > 0


def test_partial_rollouts_go_on_in_the_next_step(folder: Path) -> None:
    first, last = trained(folder, "options/partial_rollouts", "rollout.partial.tokens_per_step=10").steps()
    assert first["partial/responses"] > 0
    assert last["partial/groups"] == 0
    assert last["staleness/max"] == 1


def test_a_curriculum_passes_over_what_is_known_and_draws_of_both_sets(folder: Path) -> None:
    run = trained(folder, "options/curriculum", "rollout.skip.keep=0.05", "run.steps=3")
    rows = run.steps()
    assert {"data/small/prompts", "data/large/prompts"} <= {name for row in rows for name in row}
    assert sum(row["skip/passed_over"] for row in rows) > 0
    easiest = [p for p, solved in SOLVED.items() if solved > 0.95]
    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert not any(f"(mod {p})" in sample["prompt"] for sample in samples for p in easiest)


def test_dapo_samples_groups_without_signal_anew_and_shapes_by_length(folder: Path) -> None:
    pattern = 'reward.terms=[{kind: format, pattern: "off|so x"}]'
    rows = trained(folder, "options/dapo", pattern, "objective.overlong.buffer_tokens=8").steps()
    assert max(row["groups/rounds"] for row in rows) > 1
    assert all({"overlong/share", "overlong/reward", "length_penalty/reward"} <= row.keys() for row in rows)


class _Judge(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _Judge.asked.append(body)
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Fine. Score: 7"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_judge_is_asked_and_its_score_counts(folder: Path, endpoint: str) -> None:
    rows = trained(folder, "options/judge", f"reward.terms.1.url={endpoint}", "run.steps=1").steps()
    assert [row["reward/clear"] for row in rows] == [pytest.approx(7.0)]
    assert rows[0]["reward/mean"] == pytest.approx(0.14 + rows[0]["reward/math"])
    (message,) = _Judge.asked[0]["messages"]
    assert "Problem: find x: " in message["content"]
    assert _Judge.asked[0]["max_tokens"] == 64


def test_the_papers_selector_drafts(folder: Path) -> None:
    run = trained(folder, "options/tlt_as_printed", "run.steps=1")
    (record,) = (json.loads(line) for line in (run.path / "speculation.jsonl").read_text().splitlines())
    used = set(record["strategies"])
    assert any(strategy.startswith("eagle:4") for strategy in used), used


def test_own_parts_train_and_their_metrics_and_names_are_in_the_run(folder: Path) -> None:
    """And no token and no loss depends on the drafter."""
    pattern, key = 'reward.terms=[{kind: format, pattern: "off|so x"}]', "rollout.speculation"
    run = trained(folder, "own_parts/config", pattern, f"{key}.strategies=[echo:4]", f"{key}.mode=fixed")
    rows = run.steps()
    assert any(row["groups/used"] for row in rows)
    assert all(0 < row["own_loss/weight"] <= 1 for row in rows if row["groups/used"])
    assert "echo" in (run.path / "speculation.jsonl").read_text()
    assert "drafter_failed" not in (run.path / "events.jsonl").read_text()
    own = json.loads((run.path / "summary.json").read_text())["own_code"]
    assert own.startswith("loss examples.own_parts.loss:tapered; advantages ")
    off = (f"{key}.mode=off", f"{key}.drafters=[]", f"{key}.strategies=null", "run.name=plain")
    plain = trained(folder, "own_parts/config", pattern, *off).steps()
    compared = ("loss/mean", "grad_norm/mean", "reward/mean", "tokens/generated", "own_loss/weight")
    assert [{name: row.get(name) for name in compared} for row in plain] == [
        {name: row.get(name) for name in compared} for row in rows
    ]
