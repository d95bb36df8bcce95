"""Drafting by a low-bit copy of the target: milliseconds of a draft by depth and of a whole cycle, with predictions,
the engines' gain over plain decoding, and whether their tokens are equal.

Weights are random, so the acceptance says nothing about trained models. `speedup_of_all` is the gain of a cycle if
every token were accepted. Rounding the weights again is an engine's cost after every update.
"""

from typing import Any

import numpy as np

from actors.engine.native.engine import NativeEngine
from benchmarks.gpu_parts.requests import PROMPT_TOKENS, waves
from benchmarks.gpu_parts.session import Session, part
from benchmarks.tools.qwen import network
from config.formats import FORMATS
from config.rollout import EngineOptions
from config.strategy import PLAIN, Strategy
from drafter.self import SelfDrafter
from models.transformer import Transformer
from policies.roofline.kernels import draft_kernels
from policies.roofline.timing import DEFAULT, step_time, time_of
from policies.speculation.policy import FixedPolicy

_CONTEXT = 128  # about that of requests in the middle of a wave


def run(session: Session) -> None:
    for size in ("7b", "1.5b") if not session.rehearse else ("wide",):
        model = session.model(size)
        plain = {batch: _wave(session, model, PLAIN, batch, None) for batch in _batches(session)}
        for name in ("w8a8", "w4a16"):
            drafter = SelfDrafter(model, FORMATS[name])
            for batch in _batches(session):
                for depth in (3, 5, 10) if not session.rehearse else (3,):
                    if session.left_s < 6:
                        session.row(size=size, form=name, batch=batch, depth=depth, skipped="no time left")
                        continue
                    _cycle(session, size, model, drafter, name, batch, depth, plain[batch])
            _rounding(session, size, drafter, name)
            del drafter
            session.free()
        del model
        session.free()


def _batches(session: Session) -> tuple[int, ...]:
    return (2,) if session.rehearse else (1, 8, 32)


def _wave(
    session: Session, model: Transformer, strategy: Strategy, batch: int, drafter: SelfDrafter | None
) -> tuple[list[Any], dict[int, list[int]]]:
    """Return full steps of an engine, and the tokens of every request."""
    options = EngineOptions(max_running=batch, kv_tokens=batch * 512, max_model_tokens=256)
    records: list[Any] = []
    engine = NativeEngine(
        model,
        options,
        drafters={} if drafter is None else {drafter.name: drafter},
        policy=FixedPolicy(strategy, batch),
        steps=records,
    )
    tokens: dict[int, list[int]] = {}
    steps = waves(engine, records, batch, session.rehearse, tokens)
    del engine
    session.free()
    return steps, tokens


def _cycle(
    session: Session,
    size: str,
    model: Transformer,
    drafter: SelfDrafter,
    name: str,
    batch: int,
    depth: int,
    plain: tuple[list[Any], dict[int, list[int]]],
) -> None:
    strategy, net, gpu = Strategy("self", depth), network(model.config), session.gpu
    steps, tokens = _wave(session, model, strategy, batch, drafter)
    plain_steps, plain_tokens = plain
    drafting = [step for step in steps if step.drafted] or steps
    plain_ms, cycle_ms, draft_ms = (
        float(np.median([getattr(step, what) for step in of])) * 1e3
        for of, what in ((plain_steps, "elapsed_s"), (drafting, "elapsed_s"), (drafting, "draft_s"))
    )
    draft = time_of(draft_kernels(net, batch, strategy, _CONTEXT, FORMATS[name]), gpu).ms - DEFAULT.host_s * 1e3
    predicted_plain = step_time(net, gpu, batch, 1, _CONTEXT).ms
    predicted_cycle = draft + step_time(net, gpu, batch, 1 + depth, _CONTEXT).ms
    emitted = sum(step.emitted for step in drafting) / max(1, sum(step.running for step in drafting))
    session.row(
        size=size,
        form=name,
        batch=batch,
        depth=depth,
        prompt_tokens=PROMPT_TOKENS,
        draft_ms=draft_ms,
        predicted_draft_ms=draft,
        cycle_ms=cycle_ms,
        predicted_cycle_ms=predicted_cycle,
        plain_ms=plain_ms,
        predicted_plain_ms=predicted_plain,
        tokens_per_cycle=emitted,
        speedup=emitted * plain_ms / cycle_ms,
        speedup_of_all=(1 + depth) * plain_ms / cycle_ms,
        predicted_speedup_of_all=(1 + depth) * predicted_plain / predicted_cycle,
        same_tokens=sum(tokens[i] == plain_tokens[i] for i in plain_tokens),
        responses=len(plain_tokens),
    )


def _rounding(session: Session, size: str, drafter: SelfDrafter, name: str) -> None:
    """Measure the cost of every update of the target, and the copy's memory."""

    def again() -> None:
        drafter.new_target(1)
        drafter.refresh()

    session.row(size=size, form=name, rounding_s=session.seconds(again, repeats=3), copy_gib=drafter.bytes / 2**30)


if __name__ == "__main__":
    part(run, "self_drafts")
