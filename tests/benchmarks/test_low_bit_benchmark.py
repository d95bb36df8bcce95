"""What of the low-bit benchmark needs no engine: ratios, goals, tables, and the page that it writes into."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import low_bit
from benchmarks.tools.low_bit_report import goals, refresh, table

BEGIN, END = "<!-- benchmarks.low_bit: begin -->", "<!-- benchmarks.low_bit: end -->"


def row(size: str, requests: int, **seconds: float) -> dict[str, Any]:
    repeated = {name.replace("_", " "): [of, of, of] for name, of in seconds.items()}
    return {
        "target": size,
        "parameters": 1,
        "requests": requests,
        "longest": 64,
        "tokens_per_s": {name: 100 / of[0] for name, of in repeated.items()},
        "ratios": low_bit.ratios(repeated),
    }


RECORD: dict[str, Any] = {
    "machine": {"cpu": "a CPU", "commit": "abc"},
    "settings": {"threads": 2},
    "rollout": [row("20m", 8, fp32=3.3, bf16=1.9, w8a8=1.0, vllm_w8a8=1.5, vllm_bf16=1.8), row("100m", 8, w8a8=2.0)],
    "learner": [
        {
            "target": "20m",
            "rollouts": 16,
            "step_s": {"full": 2.0, "mirrored": 2.3},
            "mirrored_over_full": {"median": 1.15, "low": 1.1, "high": 1.2},
        }
    ],
}


def test_each_goal_is_met_or_missed_by_itself() -> None:
    found = {text.split(",")[0]: met for text, met in goals(RECORD)}
    assert found == {
        "20m at 8: w8a8 / fp32 3.30": True,
        "20m at 8: w8a8 / bf16 1.90": False,
        "20m at 8: w8a8 / vllm w8a8 1.50": True,
        "20m at 8: bf16 / vllm bf16 0.95": False,
        "20m: learner's step 1.150 times": False,
    }


def test_goals_of_few_requests_are_asked_of_the_20m_model_alone() -> None:
    elsewhere = {"rollout": [row("20m", 16, fp32=1.0, w8a8=1.0), row("demo", 1, fp32=1.0, w8a8=2.0)]}
    assert goals(elsewhere) == []


def test_the_tables_say_what_was_missed_and_leave_out_what_was_not_measured() -> None:
    text = table(RECORD)
    assert "**missed**: 20m at 8: w8a8 / bf16 1.90" in text
    assert "| 100m | 8 |  |  | 50 |" in text
    assert "Responses are cut, in tokens: 20m at 8: 64" in text
    assert "hand-over" not in text


def test_the_page_gets_the_tables_between_its_marks_again_and_again(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        refresh(page, RECORD)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\na CPU, 2 threads, commit abc.")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert text.count("times faster") == 1
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no"):
        refresh(page, RECORD)


def test_the_page_has_its_marks() -> None:
    text = low_bit.PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
