"""The report: complete, self-contained, safe against what responses contain, and honest about partial runs."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from actors.engine.types import EngineWindow, StrategyUse
from launch.errors import UsageError
from launch.observe import Observer, Sample, Span, SpeculationMeter, StepRecord
from launch.observe.drafter import TRAIN_SPAN, updates_of
from launch.observe.journal import Journal, read
from launch.observe.timeline import to_json
from launch.report import render, write_report
from launch.report.collect import chart_data
from launch.report.drafter import MAX_POINTS, drafter_data, worker_time
from launch.report.page import NAV, OPTIONAL
from launch.report.speculation import BINS
from tests.report.synthetic import config, write_run

VOID = frozenset({"meta", "br", "input", "link", "img"})
CHARTS = (
    "reward", "lengths", "histogram", "time", "speed", "gantt", "gap", "loss", "grad", "clip", "entropy", "kl",
    "groups", "failures", "running", "acceptance", "accept-length", "positions", "saved", "strategies",
    "reasons", "predicted", "predicted-error",
    "drafter-accuracy", "drafter-length", "drafter-positions", "drafter-time", "drafter-steps", "drafter-loss",
)  # fmt: skip


class Page(HTMLParser):
    """Checks that every element is closed, and collects ids, attributes and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "action"):
                self.links.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)

    @property
    def data(self) -> dict[str, Any]:
        parsed = json.loads(self.scripts[0])
        assert isinstance(parsed, dict)
        return parsed


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "synthetic", steps=20, planned=20)


def test_every_section_and_chart_is_there(run_dir: Path) -> None:
    page = Page(write_report(run_dir).read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert {name for name, _ in NAV} | {"summary", "data"} <= set(page.ids)
    assert {f"chart-{name}" for name in CHARTS} <= set(page.ids)
    assert {link.removeprefix("#") for link in page.links} == {name for name, _ in NAV}
    assert {"learner-0", "reward-0", "rollout-0", "rollout-1"} == set(page.data["timeline"]["actors"])
    assert (run_dir / "trace.json").is_file()


def test_nothing_is_loaded_from_elsewhere(run_dir: Path) -> None:
    text = render(run_dir)
    outside = set(re.findall(r"https?://[^\s\"'<>)]+", text)) - {"http://www.w3.org/2000/svg"}  # a name, not fetched
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


def window(use: StrategyUse, *trace: tuple[float, int, str]) -> EngineWindow:
    return EngineWindow(
        start_s=0.0,
        end_s=1.0,
        engine_steps=use.engine_steps,
        prefill_tokens=0,
        decode_tokens=0,
        running=0,
        waiting=0,
        kv_tokens_used=0,
        preempted=0,
        strategies=(use,),
        trace=trace,
    )


def test_running_requests_keep_their_area_by_drafter(tmp_path: Path) -> None:
    """Request-seconds of each drafter, whatever the bins; first, middle and last RL step."""
    with Observer(tmp_path, config(tmp_path, steps=9)) as observer:
        for step in range(1, 6):
            meter = SpeculationMeter()
            use = StrategyUse(
                strategy="suffix:2",
                engine_steps=1,
                request_steps=1,
                drafted=1,
                accepted=1,
                seconds=1.0,
                draft_s=0.0,
                saved_s=0.5,
            )
            meter.window("a", window(use, (10.0, 4, "none"), (10.5, 2, "suffix"), (11.3, 1, "none"), (12.0, 0, "none")))
            meter.window("b", window(use, (10.1, 7, "suffix"), (13.0, 0, "none")))
            observer.step(StepRecord(step=step, metrics={}, seconds={"step": 1.0}, speculation=meter.take()))
    data = chart_data(tmp_path)["speculation"]
    assert [chart["step"] for chart in data["running"]] == [1, 3, 5]
    for chart in data["running"]:
        assert chart["width_s"] == pytest.approx(3.0 / BINS)
        areas = {name: sum(means) * chart["width_s"] for name, means in chart["running"].items()}
        assert areas == pytest.approx({"plain": 4 * 0.5 + 0.7, "suffix": 2 * 0.8 + 7 * 2.9}, rel=1e-2)
        assert max(chart["running"]["suffix"]) == 9.0
    assert data["saved_s"] == {"suffix": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert data["positions"] == {"suffix": []}


def test_speculation_is_shown_as_it_was_recorded(run_dir: Path) -> None:
    data = Page(render(run_dir)).data["speculation"]
    records = read(run_dir / "speculation.jsonl")
    assert data["steps"] == [record["step"] for record in records]
    for index, record in enumerate(records):
        suffix = record["strategies"]["suffix:8"]
        assert data["acceptance"]["suffix"][index] == suffix["accepted"] / suffix["drafted"]
    shares = {row["strategy"]: row["share"] for row in data["strategies"]}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares) == ["suffix:8", "plain", "ngram:3", "eagle:4"]
    assert len(data["positions"]["suffix"]) == 8
    assert data["running"][1]["step"] == 11


def test_the_prompts_with_the_least_and_the_most_acceptance_are_named(run_dir: Path) -> None:
    page = render(run_dir)
    shown = Page(page).data["speculation"]["prompts"]
    assert [row["prompt"] for row in shown] == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11], "of twelve, five and five"
    records = read(run_dir / "speculation.jsonl")
    drafted = sum(row[1] for record in records for row in record["prompts"] if row[0] == 11)
    assert shown[-1] == {"prompt": 11, "drafted": drafted, "acceptance": pytest.approx(33 / 51)}
    assert f"{drafted:,}</td>" in page


def test_without_speculation_nothing_is_said_about_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "off", steps=3, planned=3, speculation=False)
    page = Page(render(run))
    assert "speculation" not in page.ids
    assert "#speculation" not in page.links
    assert "Speculati" not in "".join(page.text)
    assert page.data["speculation"] is None


def test_without_drafter_training_nothing_is_said_about_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "off", steps=3, planned=3, drafter=False)
    page = Page(render(run))
    assert "drafter" not in page.ids
    assert "#drafter" not in page.links
    assert "Drafter training" not in "".join(page.text)
    assert page.data["drafter"] is None


def test_drafter_training_is_shown_as_it_was_recorded(run_dir: Path) -> None:
    data = Page(render(run_dir)).data["drafter"]
    records = read(run_dir / "drafter.jsonl")
    updates = [update for record in records for update in updates_of(record)]
    assert data["curve"]["x"] == list(range(1, len(updates) + 1))
    assert data["curve"]["top3_accuracy"] == pytest.approx([update.top3_accuracy for update in updates])
    targets = [update.target_version for update in updates]
    assert data["curve"]["marks"] == [[i, b] for i, (a, b) in enumerate(pairwise(targets), start=1) if a != b]
    assert len(data["curve"]["marks"]) >= 10
    assert data["steps"] == list(range(1, 21))
    use = read(run_dir / "speculation.jsonl")[4]["strategies"]["eagle:4"]
    shares = [taken / offered for taken, offered in zip(use["taken"], use["offered"], strict=True)]
    assert [position[4] for position in data["positions"]] == shares
    assert data["accept_length"][4] == 1 + use["accepted"] / use["request_steps"]


def test_the_accuracy_curve_is_averaged_but_never_across_a_target_update() -> None:
    def update(step: int, top3: float | None, target: int, tokens: int = 10) -> list[object]:
        return [step, float(step), 1.0, 1.0, 0.0, top3, tokens, target, 1]

    count = MAX_POINTS + 300  # groups of two
    record = {
        "step": 1,
        "origin_s": 0.0,
        "updates": [update(i, 0.25 if i < 301 else 0.75, 3 + (i >= 301)) for i in range(count)]
        + [update(count, 0.5, 4, tokens=30), update(count + 1, None, 4, tokens=0)],
    }
    curve = (drafter_data([record], [], []) or {})["curve"]
    assert set(curve["top3_accuracy"][:151]) == {0.25}
    assert set(curve["top3_accuracy"][151:-2]) == {0.75}
    assert curve["top3_accuracy"][-2:] == [pytest.approx((10 * 0.75 + 30 * 0.5) / 40), None]
    assert curve["marks"] == [(301, 4)]
    assert curve["x"][150:152] == [301, 303]


def test_training_on_an_idle_worker_is_not_idle_time() -> None:
    spans = [
        Span("rollout-0", "decode", 0.0, 4.0, 1),
        Span("rollout-0", "idle", 4.0, 10.0, 1),
        Span("rollout-0", TRAIN_SPAN, 5.0, 6.0, 1),
        Span("rollout-0", TRAIN_SPAN, 5.5, 7.0, 1),
        Span("rollout-0", TRAIN_SPAN, 9.0, 11.0, 1),  # a micro-step more, until the stop is seen
        Span("rollout-1", "decode", 0.0, 9.0, 1),
        Span("rollout-1", "load_weights", 9.0, 10.0, 1),
        Span("learner-0", "train", 0.0, 10.0, 1),
    ]
    time = worker_time(spans)
    assert time["steps"] == [1]
    total = 4.0 + 3.0 + 4.5 + 9.0 + 1.0
    shares = {"busy": 13.0, "training": 4.5, "idle": 3.0, "other": 1.0}
    assert {name: time[name][0] for name in shares} == pytest.approx(
        {name: 100 * value / total for name, value in shares.items()}, abs=0.01
    )


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


def test_very_long_timelines_lose_their_shortest_spans_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.report.collect.MAX_SPANS", 10)
    journal = Journal(tmp_path / "timeline.jsonl")
    for i in range(30):
        journal.write(to_json(Span("a", "decode", float(i), i + 0.01 * (i + 1), 1)))
    journal.close()
    shutil.copy(tmp_path / "timeline.jsonl", tmp_path / "metrics.jsonl")
    timeline = chart_data(tmp_path)["timeline"]
    assert [span[3] for span in timeline["spans"]] == [10.0 * (i + 1) for i in range(20, 30)]
    assert (timeline["left_out"], timeline["left_out_below_ms"]) == (20, 210.0)
    assert "20 spans shorter than 210.0 ms are left out" in render(tmp_path)


def test_workers_are_in_natural_order(tmp_path: Path) -> None:
    run = write_run(tmp_path / "many", steps=1, planned=1, workers=12)
    actors = [actor for actor in chart_data(run)["timeline"]["actors"] if actor.startswith("rollout")]
    assert actors == [f"rollout-{n}" for n in range(12)]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def drawn_by_a_browser(run: Path, folder: Path) -> str:
    """The page after its scripts ran, every chart was pointed at and every button pressed."""
    text = write_report(run).read_text(encoding="utf-8")
    catcher = "<script>window.onerror = (m) => document.documentElement.setAttribute('data-error', m);</script></head>"
    use = (
        "<script>for (const f of document.querySelectorAll('.chart')) { const b = f.getBoundingClientRect();"
        "(f.querySelector('canvas') || f).dispatchEvent(new MouseEvent('mousemove',"
        "{clientX: b.left + b.width / 2, clientY: b.top + 60, bubbles: true})); }"
        "for (const b of document.querySelectorAll('button')) b.click();</script></body>"
    )
    path = folder / "page.html"
    path.write_text(text.replace("</head>", catcher).replace("</body>", use), encoding="utf-8")
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --window-size=1200,900 --virtual-time-budget=2000 --dump-dom"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "data-error" not in dom.split("<head>")[0]
    return dom


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
    "overlong/reward": 0.1, "sampler_correction/effective_share": 0.9, "sampler_correction/masked": 0.1,
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
            "with signal, not needed",
            "effective",
            "left out because",
        ):
            assert title in dom
        assert 'class="empty"' not in dom


def test_a_pause_of_everything_is_drawn_as_a_break(tmp_path: Path) -> None:
    """Ten seconds of work, an hour until it was resumed, ten more: the hour takes no room, and is named."""
    with Observer(tmp_path, config(tmp_path, steps=4)) as observer:
        for step, start_s in ((1, 100.0), (2, 105.0), (3, 3710.0), (4, 3715.0)):
            observer.span(Span("rollout-0", "decode", start_s, start_s + 5, step))
    timeline = chart_data(tmp_path)["timeline"]
    ((end_ms, cut_ms),) = timeline["breaks"]
    starts = [span[2] for span in timeline["spans"]]
    assert starts == pytest.approx([0, 5000, end_ms, end_ms + 5000])
    assert 0 < end_ms - 10_000 < 1000
    assert cut_ms + end_ms == pytest.approx(3_610_000)


def test_a_run_without_a_pause_has_no_break(run_dir: Path) -> None:
    assert chart_data(run_dir)["timeline"]["breaks"] == []


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


def test_no_change_is_neither_good_nor_bad(tmp_path: Path) -> None:
    with Observer(tmp_path, config(tmp_path, steps=2)) as observer:
        for step, reward in ((0, 0.5), (2, 0.5001)):
            observer.evaluation(step, {"eval/reward": reward})
    assert '<span class="same">+0.000</span>' in render(tmp_path)


def test_the_report_says_why_speculation_was_off_and_how_long_steps_should_have_taken(run_dir: Path) -> None:
    data = chart_data(run_dir)["speculation"]
    assert data["reasons"] == {
        "pays most": pytest.approx([0.55] * 20),
        "plain is faster": pytest.approx([0.4] * 20),
        "trial": pytest.approx([0.05] * 20),
    }
    workers = 2
    assert data["expected_s"]["plain"] == pytest.approx([workers * 0.075] * 20)
    assert data["measured_s"]["plain"] == pytest.approx([workers * 0.08] * 20)
    assert data["expected_s"]["suffix"] == [None] * 20
    assert data["predicted_error"] == pytest.approx([0.007 / 0.08] * 20)
    text = "off in 40 % of steps: plain decoding was faster (drafts predicted at 0.90x of it) 40 %"
    assert f"Whole run: speculation was {text}." in render(run_dir)


def test_nothing_of_the_report_is_wider_than_its_column(run_dir: Path) -> None:
    """The table of strategies has the page's width, not half of it, where its last columns were cut."""
    speculation = render(run_dir).partition('<section id="speculation">')[2].partition("</section>")[0]
    before, _, table = speculation.partition("<h3>Strategies")
    assert before.count("<div") == before.count("</div>")
    assert "<table>" in table


def test_the_report_says_what_it_ran_on(run_dir: Path) -> None:
    text = render(run_dir).partition('<section id="environment">')[2]
    assert "torch" in text
    assert "python" in text
