"""Responses before and after: which prompts are followed, which of them are shown, and what terminal and report say."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from launch.observe import Observer
from launch.observe.records import Sample
from launch.report import write_report
from launch.report.before_after import before_after, shortened
from launch.report.summary import print_summary, summarise
from tests.launch.test_observer import make_config


def sample(uid: str, reward: float, text: str, number: int = 0) -> Sample:
    """The number-th response to prompt `uid`, whose template is not what is asked."""
    return Sample(
        uid=uid,
        prompt=f"<user>{uid}?<assistant>",
        asked=f"{uid}?",
        response=text,
        reward=reward,
        tokens=3,
        finish_reason="stop",
        sample=number,
    )


def write(run_dir: Path, evaluations: dict[int, list[Sample]]) -> None:
    with Observer(run_dir, make_config()) as observer:
        for step, samples in evaluations.items():
            observer.evaluation(step, {"eval/reward": 0.5})
            second = [replace(one, sample=1, response="not the first") for one in samples if one.sample == 0]
            observer.samples(step, samples + second, held_out=True)
            observer.judged(step, [{"set": "", "uid": one.uid, "reward": one.reward} for one in samples])


def printed(run_dir: Path, width: int = 80) -> list[str]:
    out = StringIO()
    print_summary(run_dir, console=Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_every_evaluation_keeps_the_first_response_to_the_same_prompts_and_the_best_and_the_worst(
    tmp_path: Path,
) -> None:
    """200 prompts x 2, of which others are right each time: 12 of the 16 are the same prompts, all over the set."""
    write(
        tmp_path,
        {step: [sample(f"p{i:03}", float(i * 7 % 13 < step), "text") for i in range(200)] for step in (1, 5)},
    )
    rows = [json.loads(line) for line in (tmp_path / "eval_samples.jsonl").read_text().splitlines()]
    kept = {step: [row for row in rows if row["step"] == step] for step in (1, 5)}
    assert [len(found) for found in kept.values()] == [16, 16]
    followed = [[(row["uid"], row["sample"]) for row in found[:12]] for found in kept.values()]
    assert followed[0] == followed[1]
    assert followed[0] == [(f"p{i:03}", 0) for i in (0, 18, 36, 54, 72, 90, 109, 127, 145, 163, 181, 199)]
    for found in kept.values():
        rewards = [row["reward"] for row in found[12:]]
        assert rewards == sorted(rewards, reverse=True)
        assert {rewards[0], rewards[-1]} == {0.0, 1.0}


def test_those_that_got_better_are_shown_first_with_the_honest_count(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            0: [sample("a", 1, "one"), sample("b", 0, "two\n\nlines"), sample("c", 1, "x"), sample("d", 0, "")],
            3: [sample("a", 1, "never shown"), sample("b", 1, "never"), sample("c", 1, "x"), sample("d", 0, "")],
            9: [sample("a", 0, "none"), sample("b", 0.5, "2"), sample("c", 1, "x"), sample("d", 1, "4")],
        },
    )
    found = summarise(tmp_path).before_after
    assert found is not None
    assert (found.prompts, found.better, found.worse) == (4, 2, 1)
    assert [(e.prompt, e.before, e.after) for e in found.examples] == [
        ("b?", "two lines", "2"),
        ("d?", "", "4"),
        ("a?", "one", "none"),
    ]
    lines = printed(tmp_path)
    at = lines.index("before and after 9 RL steps: 2 of 4 held-out prompts got better, 1 worse")
    assert [line.split() for line in lines[at + 1 : at + 7]] == [
        ["b?", "before", "0", "two", "lines"],
        ["after", "0.5", "2"],
        ["d?", "before", "0", "(empty)"],
        ["after", "1", "4"],
        ["a?", "before", "1", "one"],
        ["after", "0", "none"],
    ]
    stored = json.loads((tmp_path / "summary.json").read_text())["before_after"]
    assert stored["examples"][0]["reward_after"] == 0.5


@pytest.mark.parametrize("width", [60, 80, 100])
def test_long_texts_fit_the_terminal_with_their_beginning_and_their_end(tmp_path: Path, width: int) -> None:
    prompt, response = "Tell me " * 100 + "why", "Because [b]" + "it goes on " * 100 + "so 42"
    write(tmp_path, {step: [sample(prompt, step, response)] for step in (0, 1)})
    lines = [line for line in printed(tmp_path, width) if "before  " in line or "after  " in line]
    assert len(lines) == 2
    for line in lines:
        assert len(line) <= width
        assert "Because" in line
        assert line.endswith("42")
    (asked,) = (line for line in printed(tmp_path, width) if line.startswith("Tell me"))
    assert len(asked) <= width
    assert asked.endswith("why?")


def test_nothing_is_printed_without_two_evaluations_of_one_prompt(tmp_path: Path) -> None:
    write(tmp_path / "one", {0: [sample("a", 0, "x")]})
    write(tmp_path / "others", {0: [sample("a", 0, "x")], 4: [sample("b", 0, "x")]})
    write(tmp_path / "none", {})
    for name in ("one", "others", "none"):
        assert summarise(tmp_path / name).before_after is None
        assert not any("before and after" in line for line in printed(tmp_path / name))
    old = {"step": 0, "prompt": "p", "response": "r", "reward": 1.0}  # by an earlier version
    judged = [{"step": step, "set": "", "uid": "", "reward": 1.0} for step in (0, 4)]
    assert before_after([old, old | {"step": 4}], judged) is None
    first = old | {"uid": "", "set": "", "sample": 0}
    assert before_after([first, first | {"step": 4}], judged) is not None
    assert before_after([first, first | {"step": 4}], []) is None
    assert before_after([first, first | {"step": 4, "reward": None}], judged) is None


def test_the_report_has_them_and_escapes_them(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    write(tmp_path, {0: [sample(evil, 0, evil)], 4: [sample(evil, 1, "")]})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Responses before and after 4 RL steps: 1 of 1 held-out prompt got better, 0 worse" in text
    assert '<td class="">(empty)</td>' in text
    assert evil not in text


def test_shortened_keeps_within_its_width() -> None:
    assert shortened("a\n b", 10) == "a b"
    for width in range(6, 40):
        text = shortened("0123456789" * 5, width)
        assert len(text) <= width
        assert text.startswith("0")
        assert text.endswith("9") or width < 8
    assert shortened("0123456789" * 5, 15) == "012345 ... 6789"
