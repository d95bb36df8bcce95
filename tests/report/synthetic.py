"""A realistic run folder, written through the Observer: rising reward, long-tailed lengths, one lost worker, and
speculation in the tail of each rollout, a drafter that learns on the worker that is done first, and a token budget that
is shared out less and less evenly."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from config.tree import Config
from contracts.rollout import PromptUse, ReasonUse, StrategyUse
from contracts.spot import MicroStep, TrainStopped
from launch.observe import TRAIN_SPAN, DrafterMeter, Observer, Sample, Span, SpeculationMeter, StepDrafter, StepRecord
from launch.observe.speculation import StepSpeculation
from tests.windows import engine_window

Floats = NDArray[np.float64]
START_S = 1_800_000_000.0
PROMPTS = tuple(PromptUse(i, 40 + i, 3 * i) for i in range(12))


def config(run_dir: Path, *, steps: int, name: str = "synthetic") -> Config:
    return Config.model_validate(
        {
            "run": {"name": name, "dir": str(run_dir.parent), "steps": steps},
            "model": {"path": "model"},
            "data": {"train": "train.jsonl", "eval": "eval.jsonl"},
            "observe": {"live": False},
        }
    )


def write_run(
    run_dir: Path,
    *,
    steps: int = 60,
    planned: int = 60,
    workers: int = 2,
    seed: int = 0,
    speculation: bool = True,
    drafter: bool = True,
    token_budget: bool = True,
) -> Path:
    """Write `steps` of `planned` RL steps with `workers` rollout workers; returns run_dir."""
    rng = np.random.default_rng(seed)
    clock = [START_S]
    meter = DrafterMeter() if speculation and drafter else None
    with Observer(run_dir, config(run_dir, steps=planned), clock=lambda: clock[0]) as observer:
        observer.evaluation(0, {"eval/reward": 0.21}, seconds=1.1)
        for step in range(1, steps + 1):
            clock[0] += _step(observer, rng, step, clock[0], workers, planned, speculation, meter, token_budget)
            if step % 10 == 0:
                observer.evaluation(step, {"eval/reward": _skill(step, planned) + 0.01 * float(rng.normal())}, 1.2)
                observer.event("checkpoint", f"checkpoints/step_{step:06}")
            if step == steps // 2:
                observer.event("worker_lost", "rollout-1: engine process killed by SIGKILL; 7 requests re-issued")
                observer.event("worker_restarted", "rollout-1: engine up again after 2.1 s")
        if steps == planned:
            observer.event("finished", f"{steps} RL steps")
    return run_dir


def _skill(step: int, planned: int) -> float:
    return 0.2 + 0.45 / (1 + np.exp(-8 * (step / planned - 0.4)))


def _step(
    observer: Observer,
    rng: np.random.Generator,
    step: int,
    now: float,
    workers: int,
    planned: int,
    speculation: bool,
    meter: DrafterMeter | None,
    token_budget: bool,
) -> float:
    lengths = np.clip(rng.lognormal(3.6 + 0.5 * step / planned, 0.75, size=128), 4, 200).astype(int)
    mean = float(np.clip(_skill(step, planned) + rng.normal(0, 0.035), 0, 1))
    ends = _decode(observer, rng, step, now, workers)
    rollout = float(ends.max() - now)
    at = now + rollout
    seconds = {"rollout": rollout, "reward_wait": 0.03 + 0.02 * rng.random()}
    at += seconds["reward_wait"]
    observer.span(Span("reward-0", "grade", now + 0.3 * rollout, at, step))
    for kind, length in (("logprobs", 0.16), ("train", 0.55 + 0.05 * rng.random()), ("publish", 0.05)):
        observer.span(Span("learner-0", kind, at, at + length, step))
        at += length
    seconds |= {"learn": at - 0.05 - now - rollout - seconds["reward_wait"], "publish": 0.05, "sync": 0.06}
    for worker in range(workers):
        observer.span(Span(f"rollout-{worker}", "load_weights", at, at + 0.06, step))
    at += 0.06
    if step % 10 == 0:
        seconds["checkpoint"] = 0.2
        observer.span(Span("learner-0", "checkpoint", at, at + 0.2, step))
        at += 0.2
    seconds["step"] = at - now + 0.02
    zero = int(rng.integers(1, 6))
    metrics = {
        "reward/mean": mean, "reward/std": float(np.sqrt(mean * (1 - mean))), "tokens/generated": float(lengths.sum()),
        "tokens_per_s": float(lengths.sum()) / seconds["step"], "groups/zero_variance": zero, "groups/used": 16 - zero,
        "groups/total": 16.0, "groups/ungraded": 0.0,
        "rollouts/failed": 0.0, "rollouts/truncated": float((lengths == 200).sum()),
        "reward/math": mean, "reward/format": min(1.0, mean + 0.2),
        "rollouts/reissued": 7.0 if step == planned // 2 else 0.0,
        "logprob_gap/mean": 3e-7 * float(rng.lognormal(0, 0.2)), "logprob_gap/max": 6e-6 * float(rng.lognormal(0, 0.4)),
        "loss/mean": float(rng.normal(0.0, 0.02)), "grad_norm/mean": float(rng.lognormal(-0.7, 0.25)),
        "clip_fraction": float(0.01 * rng.random()), "entropy": 1.1 - 0.5 * step / planned, "kl": 0.0, "lr": 1e-3,
    }  # fmt: skip
    counts: list[int] = []
    if token_budget:
        counts, budget = _shared_out(np.random.default_rng(step), step / planned, int(lengths.sum()))
        metrics |= budget
    speculated = _speculate(rng, step / planned, now, rollout, workers, meter is not None) if speculation else None
    trained = _train(observer, meter, rng, step, step / planned, ends, speculated) if meter is not None else None
    observer.step(
        StepRecord(
            step=step,
            metrics=metrics,
            seconds=seconds,
            lengths=lengths.tolist(),
            rollouts_per_prompt=counts,
            speculation=speculated,
            drafter=trained,
        )
    )
    observer.samples(step, [_sample(rng, i, int(n)) for i, n in enumerate(lengths[:12])])
    return at - now + 0.02


def _shared_out(rng: np.random.Generator, done: float, tokens: int) -> tuple[list[int], dict[str, float]]:
    """Responses of each of 16 prompts, and what a planner would say of them."""
    counts = np.clip(np.round(8 * rng.lognormal(0.0, 0.1 + done, size=16)), 2, 32).astype(int)
    metrics = {
        "budget/tokens": round(1.02 * tokens, 1), "budget/planned_tokens": round(1.02 * tokens, 1),
        "budget/spent_tokens": float(tokens), "budget/lambda": 1e-6,
        "budget/rollouts_min": float(counts.min()), "budget/rollouts_mean": float(counts.mean()),
        "budget/rollouts_max": float(counts.max()), "budget/variance": 0.3 - 0.1 * done,
        "budget/variance_uniform": 0.3, "budget/bound": 0.4 * done, "budget/spread_mean": 0.4,
        "abort/poll_from": 20.0 + 10 * done, "abort/give_up_at": 90.0 + 20 * done, "abort/answered_share": 0.6,
        "abort/given_up_share": 0.09, "abort/kept_late_share": 0.01, "abort/surcharge": 1.9,
        "abort/natural_p50": 45.0, "abort/natural_p90": 100.0, "abort/keep_mean": 0.4, "abort/keep_min": 0.1,
        "abort/saved_tokens": 700.0, "skip/passed_over": 2.0, "skip/share": 2 / 18,
    }  # fmt: skip
    return counts.tolist(), metrics


def _speculate(
    rng: np.random.Generator, done: float, now: float, rollout: float, workers: int, drafter: bool
) -> StepSpeculation:
    """Plain decoding while many requests run, then n-grams, then the suffix index, which gets better over the run."""
    meter = SpeculationMeter()
    for worker in range(workers):
        ends = np.sort(rng.gamma(2.0, 0.2 * rollout, size=64).clip(0.01, rollout))
        trace = [(now, 64, "none")]
        for i, end in enumerate(ends):
            left = 63 - i
            trace.append(
                (now + float(end), left, "none" if left > 32 or left == 0 else "ngram" if left > 12 else "suffix")
            )
        rate = 0.2 + 0.4 * done
        offered = tuple(int(900 * 0.9**d) for d in range(8))
        taken = tuple(int(n * rate ** (0.3 * (d + 1))) for d, n in enumerate(offered))
        uses: tuple[StrategyUse, ...] = (
            StrategyUse(
                strategy="plain",
                engine_steps=80,
                request_steps=4000,
                drafted=0,
                accepted=0,
                seconds=0.08,
                draft_s=0.0,
                saved_s=0.0,
                expected_s=0.075,
                measured_s=0.08,
                missed_s=0.007,
            ),
            StrategyUse(
                strategy="ngram:3",
                engine_steps=20,
                request_steps=400,
                drafted=700,
                accepted=180,
                seconds=0.02,
                draft_s=0.001,
                saved_s=0.004,
                offered=(300, 250, 150),
                taken=(110, 50, 20),
            ),
            StrategyUse(
                strategy="suffix:8",
                engine_steps=90,
                request_steps=950,
                drafted=sum(offered),
                accepted=sum(taken),
                seconds=0.06,
                draft_s=0.004,
                saved_s=0.12 * rate,
                offered=offered,
                taken=taken,
            ),
        )
        if drafter:
            right = tuple(int(400 * (0.35 + 0.45 * done) ** (d + 1)) for d in range(4))
            deep = (400, 400, 390, 380)
            uses += (
                StrategyUse(
                    strategy="eagle:4",
                    engine_steps=10,
                    request_steps=400,
                    drafted=sum(deep),
                    accepted=sum(right),
                    seconds=0.03,
                    draft_s=0.01,
                    saved_s=0.02,
                    offered=deep,
                    taken=right,
                ),
            )
        window = engine_window(
            start_s=now,
            end_s=now + rollout,
            engine_steps=190,
            strategies=uses,
            trace=tuple(trace),
            prompts=PROMPTS,
            reasons=(ReasonUse("plain is faster", 80, 60, 54.0), ReasonUse("pays most", 110), ReasonUse("trial", 10)),
        )
        meter.window(f"rollout-{worker}", window)
    return meter.take()


def _decode(observer: Observer, rng: np.random.Generator, step: int, now: float, workers: int) -> Floats:
    """Returns when each worker was done."""
    ends = now + 1.0 + rng.gamma(2.0, 0.4, size=workers)
    for worker, end in enumerate(ends):
        name = f"rollout-{worker}"
        for start in np.arange(now, end, 0.2):
            observer.span(Span(name, "decode", float(start), float(min(start + 0.2, end)), step))
        observer.span(Span(name, "idle", float(end), float(ends.max()) + 0.8, step))
    return ends


def _train(
    observer: Observer,
    meter: DrafterMeter,
    rng: np.random.Generator,
    step: int,
    done: float,
    ends: Floats,
    speculation: StepSpeculation | None,
) -> StepDrafter:
    """Micro-steps of 50 ms on the worker that was done first; accuracy dips after each target update and recovers."""
    first = int(ends.argmin())
    starts = np.arange(ends[first] + 0.02, ends.max() - 0.05, 0.05)
    for i, start in enumerate(starts):
        top3 = float(np.clip(0.4 + 0.45 * done - 0.08 * 0.6**i + rng.normal(0, 0.01), 0, 1))
        at, name = float(start), f"rollout-{first}"
        target = step - 1  # what it decodes with
        meter.event(
            name,
            MicroStep(
                step=step * 100 + i,
                session=step,
                epoch=1,
                members=1,
                loss=3 - 2 * top3,
                accuracy=top3 - 0.2,
                top3_accuracy=top3,
                tokens=1500,
                target_version=target,
                started_s=at,
                seconds=0.048,
            ),
        )
        observer.span(Span(name, TRAIN_SPAN, at, at + 0.048, step))
    if len(starts):
        meter.event(f"rollout-{first}", TrainStopped(step, step * 100, 0.02))
        meter.published(step * 100)
        meter.swapped(step * 100)
    meter.buffer("node-a", sequences=100, bytes=step << 20)
    meter.recorded(1 << 20)
    return meter.take(step - 1, speculation)


def _sample(rng: np.random.Generator, index: int, tokens: int) -> Sample:
    a, b = (int(v) for v in rng.integers(2, 60, size=2))
    right = index % 3 != 0
    answer = a * b if right else a * b + 1
    response = f"We need {a} x {b}.\n{a} x {b} = {answer}\n<answer>{answer}</answer>"
    return Sample(
        prompt=f"What is {a} times {b}?",
        response=response,
        reward=float(right),
        tokens=tokens,
        finish_reason="stop",
        answer=str(a * b),
        parts={"math": float(right)},
    )
