"""The report: complete, self-contained, safe against what responses contain, and honest about partial runs."""

import json
import re
import shutil
from pathlib import Path

import pytest

from config.spot import METADATA_URL
from contracts.environments import Said
from contracts.rollout import StrategyUse
from launch.errors import UsageError
from launch.observe import Observer, Sample, Span, SpeculationMeter, StepRecord
from launch.observe.journal import read
from launch.report import render, write_report
from launch.report.collect import chart_data
from launch.report.page import NAV, OPTIONAL
from tests.report.page import CHARTS, CHROMIUM, Page, drawn_by_a_browser, window
from tests.report.synthetic import config, write_run


def test_every_section_and_chart_is_there(run_dir: Path) -> None:
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    sections = {name for name, _ in NAV} - {"against"}  # of two runs: test_against
    assert sections | {"summary", "data"} <= set(page.ids)
    assert {f"chart-{name}" for name in CHARTS} <= set(page.ids)
    assert {link.removeprefix("#") for link in page.links} == sections
    assert {"learner-0", "reward-0", "rollout-0", "rollout-1"} == set(page.data["timeline"]["actors"])
    assert (run_dir / "trace.json").is_file()


def test_nothing_is_loaded_from_elsewhere(run_dir: Path) -> None:
    text = render(run_dir)
    shown = {"http://www.w3.org/2000/svg", METADATA_URL}  # a name, and a value of the configuration: not fetched
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", text)) - shown
    assert outside == set()
    assert "@import" not in text
    assert "url(" not in text


def test_embedded_data_is_what_was_recorded(run_dir: Path) -> None:
    data = Page(render(run_dir)).data
    rows = [row for row in read(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert data["steps"] == list(range(1, 21))
    assert data["series"]["reward/mean"] == [row["reward/mean"] for row in rows]
    assert data["evals"]["x"] == [0, 10, 20]
    for index, row in enumerate(rows):
        shown = sum(phase["values"][index] for phase in data["phases"])
        assert shown == pytest.approx(row["seconds/step"], abs=1e-3)
    lengths = read(run_dir / "lengths.jsonl")
    assert sum(data["lengths"]["first"]["counts"]) == len(lengths[0]["lengths"])
    edges, counts = data["lengths"]["edges"], data["lengths"]["last"]["counts"]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        assert count == sum(low <= n < high for n in lengths[-1]["lengths"])
    spans = read(run_dir / "timeline.jsonl")
    assert len(data["timeline"]["spans"]) == len(spans)
    total_ms = sum(span[3] for span in data["timeline"]["spans"])
    assert total_ms == pytest.approx(1000 * sum(s["end_s"] - s["start_s"] for s in spans), rel=1e-3)


def test_what_a_model_writes_cannot_break_the_page(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>&amp;<!--"
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        observer.samples(1, [Sample(prompt=evil, response=evil, reward=1.0, tokens=3, finish_reason=evil, answer=evil)])
        observer.event(evil, evil)
        observer.span(Span(evil, evil, 0.0, 1.0, 1))
        meter = SpeculationMeter()
        meter.window(
            evil,
            window(
                StrategyUse(
                    strategy=evil,
                    engine_steps=1,
                    request_steps=1,
                    drafted=1,
                    accepted=1,
                    seconds=1.0,
                    draft_s=0.0,
                    saved_s=0.0,
                    offered=(1,),
                    taken=(1,),
                ),
                (0.0, 1, evil),
            ),
        )
        record = StepRecord(
            step=1, metrics={"reward/mean": 0.5, f"reward/{evil}": 1.0}, seconds={"step": 1.0}, speculation=meter.take()
        )
        observer.step(record)
    text = render(tmp_path)
    page = Page(text)
    assert len(page.scripts) == 2
    assert "alert(1)</script>" not in text
    assert page.data["timeline"]["actors"] == [evil]
    assert evil in page.data["speculation"]["drafters"]
    assert "".join(page.text).count(evil) == 7


def test_a_partial_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "partial", steps=7, planned=20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step":8,"kind":"st')
    text = render(run)
    assert "7 of 20 RL steps" in text
    assert '<span class="badge incomplete">' in text
    assert Page(text).data["steps"] == list(range(1, 8))


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.jsonl", "events.jsonl"])
def test_any_one_file_is_enough(run_dir: Path, tmp_path: Path, kept: str) -> None:
    shutil.copy(run_dir / kept, tmp_path / kept)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert {name for name, _ in NAV} - set(OPTIONAL) <= set(page.ids)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nan_metrics_are_gaps(tmp_path: Path) -> None:
    with Observer(tmp_path, config(tmp_path, steps=3)) as observer:
        observer.step(StepRecord(step=1, metrics={"loss/mean": float("nan")}, seconds={"step": 1.0}))
        observer.step(StepRecord(step=2, metrics={"loss/mean": 0.5}, seconds={"step": 1.0}))
        observer.step(StepRecord(step=3, metrics={}, seconds={"step": 1.0}))
    assert Page(render(tmp_path)).data["series"]["loss/mean"] == [None, 0.5, None]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("steps", [0, 1, 20])
def test_a_browser_draws_every_chart_without_an_error(tmp_path: Path, steps: int) -> None:
    dom = drawn_by_a_browser(write_run(tmp_path / "run", steps=steps, planned=20), tmp_path)
    drawn = len(re.findall(r"<svg[^>]*role=\"img\"", dom))
    empty = dom.count('class="empty"')
    if steps:
        # The timeline is a canvas; the reward has a second chart, of its terms; running requests have up to three.
        assert (drawn, empty) == (len(CHARTS) - 1 + min(steps, 3), 0)
        assert "<canvas" in dom
        assert dom.count('class="tip" style="display: block') >= 10
    else:
        assert drawn == 1  # the held-out reward before the first step


EXTRAS = {
    "groups/total": 20.0, "groups/surplus": 1.0, "groups/refilled": 4.0, "tokens/refilled": 100.0,
    "overlong/reward": 0.1, "length_penalty/reward": 0.2, "sampler_correction/effective_share": 0.9,
    "sampler_correction/masked": 0.1,
    "clip_fraction/low": 0.001, "rollouts/masked": 2.0, "kl_old": 1e-4,
}  # fmt: skip


def test_what_only_some_objectives_report_is_shown_where_it_was_recorded(run_dir: Path, tmp_path: Path) -> None:
    plain = render(run_dir)
    assert ", objective grpo<" in plain
    assert "chart-correction" not in Page(plain).ids
    assert "refilled" not in plain.split("<script")[0]
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    rows = read(run / "metrics.jsonl")
    lines = [json.dumps({**row, **EXTRAS} if row["kind"] == "step" else row) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = render(run)
    assert "chart-correction" in Page(page).ids
    steps = sum(row["kind"] == "step" for row in rows)
    assert f"{4 * steps} refilled" in page
    assert EXTRAS.keys() <= chart_data(run)["series"].keys()
    if CHROMIUM is not None:
        dom = drawn_by_a_browser(run, tmp_path)
        for title in (
            "Reward less what long responses lose",
            "with the length penalty",
            "less what overlong ones lose",
            "with signal, not needed",
            "effective",
            "left out because",
        ):
            assert title in dom
        assert 'class="empty"' not in dom


def test_events_of_one_kind_in_a_row_are_one_row_that_opens(tmp_path: Path) -> None:
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        for step in range(100, 1500, 100):
            observer.event("warm_start", f"warm start {step}/1400")
        observer.event("data", "<96> records")
    text = render(tmp_path).partition('<section id="events">')[2].partition("</section>")[0]
    Page(text)
    assert re.findall(r'<td class="kind[^"]*">([^<]*)', text) == ["started", "warm_start (14)", "data"]
    assert "<summary>warm start 1400/1400</summary>" in text
    assert "&lt;96&gt; records" in text


def test_responses_come_early_with_their_reward_as_colour_and_those_held_out(tmp_path: Path) -> None:
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        observer.samples(
            0, [Sample(prompt="p", response="before", reward=0.2, tokens=3, finish_reason="stop")], held_out=True
        )
        observer.samples(
            1,
            [
                Sample(prompt="p", response="best", reward=1.0, tokens=3, finish_reason="stop"),
                Sample(prompt="p", response="worst", reward=-1.0, tokens=3, finish_reason="stop"),
            ],
        )
        observer.step(StepRecord(step=1, metrics={"reward/mean": 0.0}, seconds={"step": 1.0}))
    text = render(tmp_path)
    assert text.index('id="reward"') < text.index('id="samples"') < text.index('id="lengths"')
    rows = re.findall(r'<tr data-from="([\w-]+)" style="--good:(\d+)">.*?<td class="response"><pre>(\w+)', text)
    assert rows == [("train", "100", "best"), ("train", "0", "worst"), ("held-out", "60", "before")]


def test_an_episode_is_shown_turn_by_turn_with_roles_and_rewards(tmp_path: Path) -> None:
    turns = (Said("assistant", "go <b>", 0.25), Said("tool", "you went"), Said("assistant", "done", 0.0))
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        episode = Sample(prompt="p", response="go done", reward=0.25, tokens=3, finish_reason="stop", turns=turns)
        observer.samples(1, [episode])
        observer.step(StepRecord(step=1, metrics={"reward/mean": 0.0}, seconds={"step": 1.0}))
    shown = re.findall(r'<div class="turn (\w+)"><b>([^<]*)</b><pre>([^<]*)</pre></div>', render(tmp_path))
    assert shown == [
        ("assistant", "assistant +0.25", "go &lt;b&gt;"),
        ("tool", "tool", "you went"),
        ("assistant", "assistant", "done"),
    ]


def test_evaluations_are_a_table_of_their_metrics_and_name_the_sets_of_their_responses(tmp_path: Path) -> None:
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        for step, reward in ((0, 0.25), (2, 0.5)):
            observer.evaluation(step, {"eval/reward": reward, "eval/aime/pass@8": 2 * reward})
            sample = Sample(prompt="p", response=f"r{step}", reward=reward, tokens=3, finish_reason="stop", set="aime")
            observer.samples(step, [sample] * 20, held_out=True)
        observer.step(StepRecord(step=1, metrics={"reward/mean": 0.0}, seconds={"step": 1.0}))
    text = render(tmp_path)
    table = text.partition('<section id="evaluation">')[2].partition("</section>")[0]
    assert re.findall(r"<th(?: [^>]*)?>([^<]*)", table) == ["Metric", "Step 0", "Step 2"]
    assert re.findall(r"<td[^>]*>([^<]*)", table) == ["eval/reward", "0.25", "0.5", "eval/aime/pass@8", "0.5", "1"]
    assert text.count('data-from="held-out, aime"') == 2 * 16, "observe.eval_samples of each"


def test_no_change_is_neither_good_nor_bad(tmp_path: Path) -> None:
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        for step, reward in ((0, 0.5), (2, 0.5001)):
            observer.evaluation(step, {"eval/reward": reward})
    assert '<span class="same">+0.000</span>' in render(tmp_path)


def test_the_report_says_what_it_ran_on(run_dir: Path) -> None:
    text = render(run_dir).partition('<section id="environment">')[2]
    assert "torch" in text
    assert "python" in text
