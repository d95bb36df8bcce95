"""The Observer: files, resuming, thread-safety, live view, the end of a run."""

import json
import logging
import os
import re
import socket
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.config import Config
from launch.errors import PacelineError
from launch.observe import Observer, Sample, Span, StepRecord, length_metrics
from launch.observe.journal import read
from launch.observe.live import duration, render, sparkline, step_line
from launch.observe.state import RunState, WorkerState


def make_config(**observe: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "demo", "steps": 10},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "observe": {"live": False, "tensorboard": False, **observe},
        }
    )


def record(step: int, reward: float = 0.5) -> StepRecord:
    return StepRecord(
        step=step, metrics={"reward/mean": reward}, seconds={"rollout": 1.0, "step": 2.0}, lengths=[1, 2, 9]
    )


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read(path)]


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    with Observer(tmp_path, make_config(), clock=lambda: 5.0) as observer:
        observer.evaluation(0, {"eval/reward": 0.1}, 0.5)
        assert observer.current_step == 1
        observer.span(Span("rollout-0", "decode", 1.0, 1.2, 1))
        observer.step(record(1, 0.25))
        observer.event("worker_lost", "rollout-0 died", worker="rollout-0")
        observer.samples(
            1, [Sample(prompt="p", response="r", reward=1.0, tokens=3, finish_reason="stop", parts={"math": 1.0})]
        )
        assert observer.current_step == 2
    evaluation, step = read(tmp_path / "metrics.jsonl")
    assert evaluation == {"step": 0, "kind": "eval", "at_s": 5.0, "eval/reward": 0.1, "seconds/eval": 0.5}
    assert step["reward/mean"] == 0.25
    assert (step["length/p50"], step["length/max"], step["seconds/rollout"]) == (2.0, 9.0, 1.0)
    assert read(tmp_path / "lengths.jsonl") == [{"step": 1, "lengths": [1, 2, 9]}]
    assert [(e["kind"], e["step"]) for e in read(tmp_path / "events.jsonl")] == [("started", 0), ("worker_lost", 1)]
    assert read(tmp_path / "events.jsonl")[1]["worker"] == "rollout-0"
    assert read(tmp_path / "samples.jsonl")[0]["parts"] == {"math": 1.0}
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert names == ["thread_name", "decode"]
    assert "name: demo" in (tmp_path / "config.yaml").read_text()


def test_the_run_log_has_what_the_driver_said_and_what_libraries_warned_of(tmp_path: Path) -> None:
    with Observer(tmp_path, make_config(), clock=lambda: 5.0) as observer:
        observer.evaluation(0, {"eval/reward": 0.1})
        observer.step(record(1, 0.25))
        observer.event("checkpoint", "quiet on the terminal")
        logging.getLogger("a.library").warning("first line\nsecond line")
        logging.getLogger("a.library").info("chatter")
    logging.getLogger("a.library").warning("after the run")
    with Observer(tmp_path, make_config(), resume_from=1):
        pass
    lines = (tmp_path / "run.log").read_text(encoding="utf-8").splitlines()
    said = [line[len("2026-01-01 00:00:00  ") :] for line in lines]
    driver = f"driver is process {os.getpid()} on {socket.gethostname()}"
    assert said.count(driver) == 2  # a line of each start
    said = [line for line in said if line != driver]
    assert said[0] == f"started: {tmp_path} from step 0"
    assert said[1] == "held-out after step 0: eval/reward 0.1"
    assert said[2].startswith("step  1/10  reward 0.250")
    assert said[3:6] == ["checkpoint: quiet on the terminal", "WARNING a.library: first line", "second line"]
    assert said[6].startswith("resumed: ")
    assert len(said) == 7


class Gauges:
    """In the place of RaySink."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], dict[str, str]]] = []

    def set(self, values: dict[str, float], **tags: str) -> None:
        self.seen.append((values, tags))


def test_gauges_change_within_an_rl_step_but_not_with_every_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, gauges = 100.0, Gauges()
    with Observer(tmp_path, make_config(), clock=lambda: now_s) as observer:
        monkeypatch.setattr(observer, "_gauges", gauges)
        for window in range(21):  # one every 0.2 s, the last without requests
            observer.load("rollout-0", running=20 - window, waiting=1, kv_tokens=window)
            observer.load("rollout-1", running=5, waiting=0, kv_tokens=0)
            observer.progress("rollout", window, 20)
            now_s += 0.2
    first = [values["worker/running"] for values, tags in gauges.seen if tags == {"worker": "rollout-0"}]
    assert first == [20.0, 10.0, 0.0]
    assert gauges.seen[0][0]["worker/busy"] == 1.0
    assert [values["worker/busy"] for values, tags in gauges.seen if tags == {"worker": "rollout-0"}][-1] == 0.0
    assert len([tags for _, tags in gauges.seen if tags == {"worker": "rollout-1"}]) == 2 + 1
    phases = [values["phase/done"] for values, tags in gauges.seen if tags == {"phase": "rollout"}]
    assert phases == [0.0, 10.0, 20.0]


def test_a_worker_that_is_away_is_shown_as_such_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from launch.run.reactions import show_worker

    gauges = Gauges()
    with Observer(tmp_path, make_config()) as observer:
        monkeypatch.setattr(observer, "_gauges", gauges)
        observer.worker("rollout-0", "decode", "12 running")
        observer.load("rollout-0", running=12, waiting=0, kv_tokens=9)
        show_worker(observer, "worker_lost", "rollout-0", f"engine killed: {'x' * 200}; 7 requests are re-issued")
        text = shown(observer._state, 0.0)
        assert "restart" in text
        assert len([line for line in text.splitlines() if "engine killed" in line or "xxx" in line]) == 1
        show_worker(observer, "worker_dead", "rollout-0", "3 restarts are used up")
        assert observer._state.workers["rollout-0"].state == "lost"
        show_worker(observer, "request_failed", "requests [3]", "no")
        assert set(observer._state.workers) == {"rollout-0"}
    assert [values["worker/running"] for values, _ in gauges.seen] == [12.0, 0.0, 0.0]


def test_resume_cuts_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with Observer(tmp_path, make_config()) as observer:
        for step in (1, 2, 3, 4):
            observer.span(Span("learner", "train", float(step), step + 0.5, step))
            observer.samples(step, [Sample(prompt="p", response="r", reward=1.0, tokens=3, finish_reason="stop")])
            observer.step(record(step, 0.1 * step))
        observer.evaluation(4, {"eval/reward": 0.9})
        observer.event("worker_lost", "history stays")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":5,"torn')
    with Observer(tmp_path, make_config(), resume_from=2) as observer:
        assert observer.current_step == 3
        observer.step(record(3, 0.7))
    for name in ("metrics", "lengths"):
        assert steps_of(tmp_path / f"{name}.jsonl") == [1, 2, 3]
    assert steps_of(tmp_path / "timeline.jsonl") == steps_of(tmp_path / "samples.jsonl") == [1, 2]
    assert read(tmp_path / "metrics.jsonl")[-1]["reward/mean"] == 0.7
    assert [e["kind"] for e in read(tmp_path / "events.jsonl")] == ["started", "worker_lost", "resumed"]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with Observer(tmp_path, make_config()) as observer:
        observer.step(record(1))
    with pytest.raises(PacelineError, match="already holds a run") as caught:
        Observer(tmp_path, make_config())
    assert "--resume" in (caught.value.remedy or "")
    assert steps_of(tmp_path / "metrics.jsonl") == [1]


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (RuntimeError("boom"), ["started", "failed"]),
        (KeyboardInterrupt(), ["started", "interrupted"]),
        (None, ["started"]),
    ],
)
def test_how_a_run_ended_is_recorded(tmp_path: Path, error: BaseException | None, kinds: list[str]) -> None:
    observer = Observer(tmp_path, make_config())
    observer.__enter__()
    observer.__exit__(type(error) if error else None, error, None)
    assert [e["kind"] for e in read(tmp_path / "events.jsonl")] == kinds


def test_an_end_that_was_reported_is_not_reported_twice(tmp_path: Path) -> None:
    observer = Observer(tmp_path, make_config())
    observer.event("failed", "with a better message")
    observer.__exit__(RuntimeError, RuntimeError(), None)
    assert [e["kind"] for e in read(tmp_path / "events.jsonl")] == ["started", "failed"]


def test_samples_span_best_to_worst(tmp_path: Path) -> None:
    with Observer(tmp_path, make_config(samples_per_step=3)) as observer:
        observer.samples(
            1,
            [
                Sample(prompt="p", response="r", reward=reward, tokens=3, finish_reason="stop")
                for reward in (0.2, 0.9, 0.0, 0.5, 0.7)
            ],
        )
        observer.samples(2, [Sample(prompt="p", response="r", reward=0.4, tokens=3, finish_reason="stop")])
        observer.samples(3, [])
    assert [(r["step"], r["reward"]) for r in read(tmp_path / "samples.jsonl")] == [
        (1, 0.9),
        (1, 0.5),
        (1, 0.0),
        (2, 0.4),
    ]


def test_calls_from_many_threads(tmp_path: Path) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=80)
    with Observer(tmp_path, make_config(live=True), console=console) as observer:

        def work(n: int) -> None:
            for i in range(100):
                observer.span(Span(f"w{n}", "decode" if i % 2 else "idle", i, i + 1.0, 1))
                observer.worker(f"w{n}", "decode", f"{i} running")
                observer.progress("rollout", i, 100)
                observer.event("note", f"{n}-{i}")

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for step in range(1, 11):
            observer.step(record(step))
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    observer.close()
    assert len(read(tmp_path / "timeline.jsonl")) == 400
    assert len(read(tmp_path / "events.jsonl")) == 401


def test_one_line_per_step_without_a_terminal(tmp_path: Path) -> None:
    out = StringIO()
    with Observer(tmp_path, make_config(live=True), console=Console(file=out, width=80)) as observer:
        observer.evaluation(0, {"eval/reward": 0.125})
        metrics = {"reward/mean": 0.25, "tokens_per_s": 6812.0, "logprob_gap/mean": 3e-7}
        observer.step(
            StepRecord(
                step=1, metrics=metrics, seconds={"rollout": 1.5, "learn": 0.5, "step": 2.0}, lengths=[10, 20, 30]
            )
        )
        observer.event("worker_lost", "rollout-0")
        observer.event("checkpoint", "quiet")
    lines = out.getvalue().splitlines()
    assert lines[1] == "held-out after step 0: eval/reward 0.125"
    assert lines[2] == (
        "step  1/10  reward 0.250  held-out 0.125  6,812 tok/s  len 20/28/30  2.00s (rollout 1.50 learn 0.50)  "
        "gap 3e-07  eta 18s"
    )
    assert lines[3:] == ["worker_lost: rollout-0"]


def test_live_panel_shows_the_run() -> None:
    state = RunState(name="demo", steps=10, started_s=0.0)
    for step, reward in ((1, 0.1), (2, 0.9)):
        state.take(record(step), {"reward/mean": reward, "tokens_per_s": 1234.0, **length_metrics([5, 10, 15])})
    state.take_eval({"eval/reward": 0.2})
    state.take_eval({"eval/reward": 0.6})
    state.phase, state.done, state.total = "rollout", 87, 128
    state.workers = {f"rollout-{n:02}": WorkerState("decode", 0.0) for n in range(12)}
    state.workers["rollout-11"] = WorkerState("restart", 50.0, "engine died")
    console = Console(file=StringIO(), width=100, force_terminal=False)
    console.print(render(state, now_s=65.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        "RL step 2/10", "1:05", "eta 16s", "rollout", "87/128", "0.900", sparkline([0.1, 0.9]), "0.200 -> 0.600",
        "1,234 tokens/s", "10/14/15", "rollout 1.00", "rollout-11", "restart", "engine died", "and 4 more",
    ):  # fmt: skip
        assert part in text, part
    assert "gap" not in step_line(state)


def test_games_that_ended_by_max_turns_are_not_called_cut() -> None:
    state = RunState(name="demo", steps=10, started_s=0.0)
    metrics = {"groups/total": 8.0, "groups/used": 7.0, "rollouts/truncated_share": 0.0}
    state.take(record(1), metrics | {"turns/mean": 6.25, "turns/limited_share": 0.67})
    assert "0 % of responses cut at the length limit" in shown(state, 1.0)
    assert "6.2 on average, 67 % of episodes ended at environment.max_turns" in shown(state, 1.0)
    assert "cut 0 %  turns 6.2  at max_turns 67 %" in step_line(state)


def test_the_live_panel_says_in_which_precision_rollouts_are_where_it_is_a_low_one() -> None:
    assert "rollouts in w4a8" in shown(RunState(name="demo", steps=10, started_s=0.0, precision="w4a8"), 1.0)
    assert "rollouts in" not in shown(RunState(name="demo", steps=10, started_s=0.0), 1.0)


def shown(state: RunState, now_s: float, width: int = 100) -> str:
    out = StringIO()
    Console(file=out, width=width).print(render(state, now_s))
    return out.getvalue()


def test_phases_have_names_and_a_warm_start_says_how_long_it_takes() -> None:
    state = RunState(name="demo", steps=10, started_s=0.0)
    state.enter("warm start", 0, 0, 100.0)
    assert "left" not in shown(state, 100.0)
    for done in (1, 350):
        state.enter("warm start", done, 1400, 100.0 + done / 10)
    assert "350/1400  1:45 left" in shown(state, 135.0)
    state.enter("fitting the drafter", 0, 0, 300.0)
    assert "fitting the drafter" in shown(state, 300.0)
    assert "1400" not in shown(state, 300.0)
    state.enter("rollout", 64, 128, 400.0)  # its last responses are its longest: nobody knows how long they take
    assert "left" not in shown(state, 500.0)


def test_held_out_reward_is_a_course_only_from_the_second_evaluation_on() -> None:
    state = RunState(name="demo", steps=10, started_s=0.0)
    state.take_eval({"eval/reward": 0.465})
    assert "0.465" in shown(state, 0.0)
    assert "->" not in shown(state, 0.0)
    state.take_eval({"eval/reward": 0.465})
    assert "0.465 -> 0.465" in shown(state, 0.0)


def test_the_panel_shows_what_tells_a_collapse() -> None:
    state = RunState(name="demo", steps=10, started_s=0.0)
    metrics = {"entropy": 1.2345, "clip_fraction": 0.0312, "grad_norm/mean": 0.876, "loss/mean": -0.0123}
    state.take(record(1), metrics)
    assert "entropy 1.234, clipped 3.12%, gradient norm 0.876, loss -0.0123" in shown(state, 0.0)
    state.take(record(2), {"kl": 0.00123})
    assert "KL 0.0012" in shown(state, 0.0)


def test_a_step_that_trained_nothing_shows_nothing_of_the_step_before() -> None:
    state = RunState(name="demo", steps=10, started_s=0.0)
    groups = {"groups/total": 8.0, "reward/mean": 0.5}
    learned = {"entropy": 0.23, "clip_fraction": 0.01, "grad_norm/mean": 2.4, "loss/mean": 0.1, "kl": 0.2}
    state.take(record(1), groups | learned | {"groups/used": 3.0})
    assert "entropy 0.23  KL 0.2000  clipped 1.0%  grad 2.4" in step_line(state)
    state.take(record(2), groups | {"groups/used": 0.0})
    assert not any(word in step_line(state) for word in ("entropy", "KL", "clipped", "grad"))
    assert "groups 0/8" in step_line(state)
    assert "gradient norm" not in shown(state, 0.0)


@pytest.mark.parametrize("printed", [True, False])
def test_an_evaluation_that_the_command_shows_is_in_the_log_only(tmp_path: Path, printed: bool) -> None:
    out = StringIO()
    with Observer(tmp_path, make_config(live=True), console=Console(file=out, width=200)) as observer:
        observer.evaluation(0, {"eval/reward": 0.25}, printed=printed)
    line = "held-out after step 0: eval/reward 0.25"
    assert (line in out.getvalue()) is printed
    assert line in (tmp_path / "run.log").read_text()
    assert [row["eval/reward"] for row in read(tmp_path / "metrics.jsonl")] == [0.25]


def test_lost_seconds_are_lost_and_nothing_accepted_is_said() -> None:
    state = RunState(name="demo", steps=10, started_s=0.0)
    metrics = {"speculation/share": 0.5, "speculation/suffix/steps": 3.0, "speculation/accept_length": 1.2}
    state.take(record(1), metrics | {"speculation/acceptance": 0.1, "speculation/saved_s": -0.32})
    assert "suffix, accept length 1.20, 0.32 s lost" in shown(state, 0.0)
    state.take(record(2), metrics | {"speculation/acceptance": 0.0, "speculation/saved_s": 0.018})
    assert "suffix: no drafts accepted" in shown(state, 0.0)


def test_a_request_to_stop_is_told_at_once(tmp_path: Path) -> None:
    out = StringIO()
    with Observer(tmp_path, make_config(live=True), console=Console(file=out, width=80)) as observer:
        observer.progress("rollout", 3, 128)
        observer.stopping("SIGINT")
        assert "stopping (rollout)" in shown(observer._state, 0.0)
    observer.stopping("SIGINT")  # too late to matter
    assert "stopping: SIGINT: saving the last complete RL step first; press Ctrl-C again" in out.getvalue()
    assert [event["kind"] for event in read(tmp_path / "events.jsonl")] == ["started", "stopping"]


def test_long_events_break_between_words_on_a_terminal(tmp_path: Path) -> None:
    out = StringIO()
    console = Console(file=out, width=40, force_terminal=True, color_system=None, legacy_windows=False)
    words = [f"word{i}" for i in range(30)]
    with Observer(tmp_path, make_config(live=True), console=console) as observer:
        observer.event("data", " ".join(words))
        observer.event("interrupted", f"go on with: paceline train {'x' * 60} --resume")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert [word for word in words if re.search(rf"\b{word}\b", text) is None] == []
    assert f"paceline train {'x' * 60} --resume" in text  # whole, to be copied


def test_sparkline_and_duration() -> None:
    nan = float("nan")
    assert sparkline([0, 7, nan, 3.5]) == "\u2581\u2588 \u2585"
    assert sparkline([nan]) == " "
    assert sparkline([2.0, 2.0]) == "\u2581\u2581"
    assert [duration(s) for s in (0.4, 45, 200, 3723)] == ["0s", "45s", "3:20", "1:02:03"]


def test_length_metrics() -> None:
    assert length_metrics([]) == {}
    values = length_metrics(list(range(1, 102)))
    assert (values["length/mean"], values["length/p50"], values["length/p90"], values["length/p99"]) == (
        51,
        51,
        91,
        100,
    )


def test_steps_without_a_row_are_said_on_resume(tmp_path: Path) -> None:
    """As after a power cut; and a line that is not ours neither counts nor stops the run."""
    with Observer(tmp_path, make_config()) as observer:
        for step in (1, 2, 3, 4):
            observer.step(record(step))
        observer.sync()
    metrics = tmp_path / "metrics.jsonl"
    first, second, _, fourth = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(first + '{"step":null,"kind":"step"}\n' + second + fourth)
    with Observer(tmp_path, make_config(), resume_from=3):
        pass
    assert steps_of(metrics) == [1, 2]
    (said,) = [event["message"] for event in read(tmp_path / "events.jsonl") if event["kind"] == "rows_missing"]
    assert said.startswith("metrics.jsonl has no row of step 3:")
    with Observer(tmp_path, make_config(), resume_from=2):
        pass
    assert len([event for event in read(tmp_path / "events.jsonl") if event["kind"] == "rows_missing"]) == 1
