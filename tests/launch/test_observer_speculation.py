"""Speculation as an observer shows and writes it."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from config.speculation import EagleOptions
from contracts.rollout import StrategyUse
from launch.observe import Observer, SpeculationMeter, StepRecord
from launch.observe.journal import read
from launch.observe.live import render
from tests.launch.test_observer import make_config
from tests.windows import engine_window


def test_speculation_is_shown_and_written_where_it_is_on(tmp_path: Path) -> None:
    out = StringIO()
    console = Console(file=out, width=200)
    meter = SpeculationMeter()
    suffix = StrategyUse(
        strategy="suffix:4",
        engine_steps=6,
        request_steps=10,
        drafted=20,
        accepted=14,
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.25,
        offered=(10, 10),
        taken=(9, 5),
    )
    ngram = StrategyUse(
        strategy="ngram:2",
        engine_steps=2,
        request_steps=10,
        drafted=20,
        accepted=12,
        seconds=0.5,
        draft_s=0.1,
        saved_s=0.0,
    )
    with Observer(tmp_path, make_config(live=True), console=console) as observer:
        for step, uses in (
            (1, (suffix, ngram)),
            (
                2,
                (
                    StrategyUse(
                        strategy="plain",
                        engine_steps=5,
                        request_steps=5,
                        drafted=0,
                        accepted=0,
                        seconds=0.5,
                        draft_s=0.0,
                        saved_s=0.0,
                    ),
                ),
            ),
        ):
            meter.window(
                "rollout-0",
                engine_window(end_s=0.2, engine_steps=8, decode_tokens=9, strategies=uses),
            )
            observer.step(StepRecord(step=step, metrics={}, seconds={"step": 1.0}, speculation=meter.take([(9, 3)])))
            panel = StringIO()
            Console(file=panel, width=120).print(render(observer._state, 1.0))
            wanted = "suffix, accept length 2.30, 0.25 s saved" if step == 1 else "off: plain decoding is faster"
            assert wanted in panel.getvalue()  # nothing is left of the step before
        observer.step(StepRecord(step=3, metrics={}, seconds={"step": 1.0}))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert ["accept 2.3" in line for line in lines] == [True, False, False]
    records = read(tmp_path / "speculation.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    first, second, third = read(tmp_path / "metrics.jsonl")
    assert first["speculation/suffix/acceptance"] == 0.7
    assert second["speculation/share"] == 0.0
    assert not any(name.startswith("speculation") for name in third)
    with Observer(tmp_path, make_config(), resume_from=1):
        pass
    assert [record["step"] for record in read(tmp_path / "speculation.jsonl")] == [1]


def test_a_head_that_is_never_right_is_an_event_once_and_across_a_resume(tmp_path: Path) -> None:
    """Its path and the likely cause are in the message; a resumed run counts on, and does not tell it again."""

    def step(observer: Observer, number: int) -> None:
        use = StrategyUse(
            strategy="eagle:4",
            engine_steps=50,
            request_steps=50,
            drafted=200,
            accepted=0,
            seconds=0.5,
            draft_s=0.1,
            saved_s=0.0,
        )
        meter = SpeculationMeter()
        meter.window("rollout-0", engine_window(end_s=0.2, engine_steps=50, decode_tokens=50, strategies=(use,)))
        observer.step(StepRecord(step=number, metrics={}, seconds={"step": 1.0}, speculation=meter.take()))

    eagle = EagleOptions(path="heads/other")
    config = make_config()
    rollout = config.rollout.model_copy(
        update={"speculation": config.rollout.speculation.model_copy(update={"eagle": eagle})}
    )
    config = config.model_copy(update={"rollout": rollout})

    def told() -> list[str]:
        return [event["message"] for event in read(tmp_path / "events.jsonl") if event["kind"] == "drafter_silent"]

    with Observer(tmp_path, config) as observer:
        step(observer, 1)
        assert told() == []
    with Observer(tmp_path, config, resume_from=1) as observer:
        step(observer, 2)
        (message,) = told()
        assert message.startswith("not one of 400 tokens drafted by eagle (heads/other) was right")
        assert "d2t" in message
        step(observer, 3)
        assert len(told()) == 1
