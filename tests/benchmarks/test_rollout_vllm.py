"""What of the vLLM benchmark needs no vLLM: cases, sweeps, verdicts, tables, timers, and both ends of a pipe."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rollout_vllm
from benchmarks.tools.peers import Peer
from benchmarks.tools.step_parts import Parts
from benchmarks.tools.vllm_contenders import packed, row_of, step_record, timed, unpacked
from benchmarks.tools.vllm_report import TARGETS, table, verdicts
from contracts.rollout import Request, SamplingParams


def contender(speedup: float) -> dict[str, Any]:
    return {"speedup": speedup, "speedups": [speedup]}


def row(requests: int, warm: float, cold: float, built_in: float, bound: float) -> dict[str, Any]:
    speeds = {"paceline": warm, "paceline, cold": cold, "native": 9.0, "native, cold": 8.0, "ngram:4": built_in}
    found = {
        "target": "demo",
        "dtype": "float32",
        "requests": requests,
        "longest": 64,
        "past_end": requests / 100,
        "missing": {"suffix": "it is not there"},
        "plain_tokens_per_s": 1000.0,
        "contenders": {name: contender(speed) for name, speed in speeds.items()},
        "best_built_in": {"name": "ngram:4", "speedup": built_in},
        "bound_speedup": bound,
        "step_us": {
            "plain": {"vLLM: forward": 1500.0, "step": 2300.0},
            "paceline": {"vLLM: forward": 1500.0, "Paceline: draft": 8.0, "step": 2400.0},
        },
    }
    return found | {"targets": verdicts(found)}


def test_every_target_is_met_or_missed_by_itself() -> None:
    met = row(4, warm=1.5, cold=1.0, built_in=1.4, bound=1.6)
    assert met["targets"] == {"best_built_in": True, "bound": True, "few": True, "plain": True}
    assert row(4, 1.5, 1.0, 1.51, 1.6)["targets"]["best_built_in"] is False
    assert row(4, 1.43, 1.0, 1.4, 1.6)["targets"]["bound"] is False
    assert row(4, 1.29, 1.0, 1.2, 1.3)["targets"]["few"] is False
    assert row(4, 1.5, 0.96, 1.4, 1.6)["targets"]["plain"] is False
    assert row(8, 0.96, 1.0, 0.9, 1.0)["targets"]["plain"] is False


def test_a_speed_up_at_many_requests_is_asked_of_nobody() -> None:
    assert row(8, warm=1.0, cold=1.0, built_in=0.9, bound=1.05)["targets"]["few"] is None


def test_the_tables_have_every_case_every_target_and_what_is_missing() -> None:
    text = table({"cases": [row(1, 1.5, 1.0, 1.4, 1.6), row(32, 0.9, 0.9, 1.0, 1.1)]})
    assert "**1.50x** | 1.00x | 1.07 | 1.60x | 0.94" in text
    assert "| demo float32 | 32 | **no** | **no** | - | **no** |" in text
    assert all(said in text for said in TARGETS.values())
    assert "missing: `suffix`, it is not there" in text
    assert "| Paceline: draft |  | 8 |  | 8 |" in text
    assert text.count("demo at") == 2  # both were cut
    assert "behind a natural end: 1% to 32% of the tokens" in text


def test_waves_fill_the_time_and_are_cut_where_a_model_is_slow() -> None:
    lengths = [10, 20, 30, 40, 50, 60]
    assert rollout_vllm.fitting(lengths, 2, 200, step_s=0.01, seconds=0.55) == [[10, 20], [30, 40]]
    assert rollout_vllm.fitting(lengths, 2, 200, step_s=0.01, seconds=99.0) == [[10, 20], [30, 40], [50, 60]]
    assert rollout_vllm.fitting(lengths, 4, 25, step_s=1.0, seconds=0.0) == [[10, 20, 25, 25]]


def test_what_is_drawn_behind_a_natural_end_is_counted_without_the_end() -> None:
    responses = [np.array(tokens, np.int32) for tokens in ([5, 9, 6, 9], [5, 6], [9, 5], [5, 9])]
    assert rollout_vllm.past_end(responses, (9,)) == 0.3


def test_a_sweep_keeps_the_fastest_length_of_every_method() -> None:
    seconds = {"ngram:2": 2.0, "ngram:4": 1.5, "ngram:8": 3.0, "suffix": 9.0}
    assert rollout_vllm.slower(seconds) == {"ngram:2", "ngram:8"}


@pytest.mark.parametrize("arctic", [None, Path("here")])
def test_what_vllm_cannot_draft_with_here_is_written_as_missing(arctic: Path | None) -> None:
    options = rollout_vllm.Options(built_ins=("ngram", "suffix"), lengths=(2, 4), arctic=arctic)
    found, missing = rollout_vllm.built_ins(options, {"method": "draft_model"})
    assert found["ngram"]["num_speculative_tokens"] == 4
    assert ("suffix" in found) == (arctic is not None)
    assert ("suffix" in missing) == (arctic is None)
    assert missing["draft_model"] == "not asked for"


def request(number: int) -> Request:
    prompt = np.array([1, 2, number], np.int32)
    sampling = SamplingParams(200, stop_token_ids=(3,))
    return Request(request_id=number, prompt_id=7, prompt_tokens=prompt, noise_key=1 << 60, sampling=sampling)


def test_a_request_keeps_its_prompt_and_noise_on_the_pipe_and_loses_its_ends() -> None:
    ((first, second),) = (unpacked(wave) for wave in packed([[request(4), request(5)]], [[10, 20]]))
    assert (first.sampling, second.sampling) == (SamplingParams(10), SamplingParams(20))
    assert second.prompt_tokens.tolist() == [1, 2, 5]
    assert (second.request_id, second.prompt_id, second.noise_key) == (5, 7, 1 << 60)


def test_a_run_that_draws_another_number_of_tokens_is_refused() -> None:
    case = packed([[request(4)]], [[10]])

    def draw(tokens: int) -> Any:
        return lambda wave, steps: steps.append(step_record(0.0, 1, tokens, 0.5, False))

    assert timed(draw(10), case, None)["tokens"] == 10
    with pytest.raises(ValueError, match="9 tokens came where 10 were asked for"):
        timed(draw(9), case, None)


def test_steps_and_their_summary_survive_the_pipe() -> None:
    step = step_record(0.0, 2, 6, 0.25, False)
    runs = [{"seconds": 2.0, "tokens": 6, "steps": [row_of(step)]}, {"seconds": 4.0, "tokens": 6, "steps": []}]
    (found,) = rollout_vllm.steps_of(runs[0])
    assert (found.running, found.emitted, found.elapsed_s, found.strategy) == (2, 6, 0.25, step.strategy)
    summary = rollout_vllm.summary(runs, [4.0, 4.0])
    assert summary["speedups"] == [2.0, 1.0]
    assert (summary["speedup"], summary["tokens_per_request_step"], summary["steps"]) == (1.5, 3.0, {"plain": 1.0})


def test_history_reaches_the_contenders_rollout_by_rollout(tmp_path: Path) -> None:
    prompts = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    responses = [np.array([4], np.int32), np.array([5, 6, 7], np.int32)]
    rollout_vllm.save_history((prompts, responses), tmp_path / "known.npz")
    with np.load(tmp_path / "known.npz") as known:
        split = np.split(known["responses"], known["responses_ends"][:-1])
    assert [part.tolist() for part in split] == [[4], [5, 6, 7]]


class Engine:
    """A step of two parts, one of which calls the other."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hook = self.inner  # an instance's own, as EngineCore.step_fn is

    def step(self) -> None:
        self.outer()

    def outer(self) -> None:
        self.calls.append("outer")
        self.hook()

    def inner(self) -> None:
        self.calls.append("inner")


def test_timers_tell_parts_apart_and_leave_the_engine_as_it_was() -> None:
    engine = Engine()
    hook = engine.hook
    kinds = iter(["even", "odd"])
    parts = Parts((engine, "step"), lambda: next(kinds))
    parts.around("outer", engine, "outer")
    parts.around("inner", engine, "hook")
    engine.step()
    engine.step()
    by_kind = parts.per_step_us()
    assert set(by_kind) == {"even", "odd"}
    found = by_kind["odd"]
    assert set(found) == {"the rest", "outer", "inner", "step"}
    assert found["step"] == pytest.approx(sum(us for name, us in found.items() if name != "step"), abs=0.2)
    assert engine.calls == ["outer", "inner"] * 2
    assert engine.hook == hook
    assert vars(engine).keys() == {"calls", "hook"}


SQUARE = """
from benchmarks.tools.peers import serve
def make():
    print("noise of a library")
    return "up", lambda number: number * number
serve(make)
"""


def test_a_peer_answers_and_what_it_prints_disturbs_no_answer(tmp_path: Path) -> None:
    peer = Peer("square", [sys.executable, "-c", SQUARE], tmp_path / "log", threads=1)
    assert [peer.answer(), peer.ask({"number": 3}), peer.ask({"number": 4})] == ["up", 9, 16]
    peer.close()
    assert "noise of a library" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("program", "hello"), [("raise SystemExit(1)", []), (SQUARE, ["up"])])
def test_a_peer_that_ends_is_named_with_its_log(tmp_path: Path, program: str, hello: list[str]) -> None:
    peer = Peer("ours", [sys.executable, "-c", program], tmp_path / "log", threads=1)
    assert [peer.answer() for _ in hello] == hello
    with pytest.raises(SystemExit, match=r"ours ended: see .*log"):
        peer.ask({"unknown": 1})
    peer.close()
