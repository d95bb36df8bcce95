"""Captures: seconds and bytes per graph at the engine's start; sleep, wake, and whether graphs survive them."""

import time

import torch

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native.engine import NativeEngine
from benchmarks.gpu_parts.requests import waves
from benchmarks.gpu_parts.session import Session, part
from benchmarks.tools.qwen import network
from config.rollout import EngineOptions
from config.strategy import Strategy
from policies.roofline.timing import DEFAULT, step_time
from policies.speculation.chooser import AdaptivePolicy

_ARMS = tuple(Strategy.parse(text) for text in ("suffix:4", "suffix:8", "suffix:6x2/12"))


def run(session: Session) -> None:
    for size in session.sizes("7b", "0.5b"):
        model = session.model(size)
        most, tokens = (4, 1024) if session.rehearse else (64, 65_536)
        policy = AdaptivePolicy(_ARMS, max_running=min(32, most), exploration=0.01)
        options = EngineOptions(max_running=most, kv_tokens=tokens, max_model_tokens=512)
        records: list[EngineStepRecord] = []
        session.synchronize()
        free_bytes, start_s = _free(session), time.perf_counter()
        from benchmarks.tools.contenders import WrongDrafter

        engine = NativeEngine(
            model, options, drafters={"suffix": WrongDrafter("suffix", 1)}, policy=policy, steps=records
        )
        session.synchronize()
        session.row(
            size=size,
            start_s=time.perf_counter() - start_s,
            used_bytes=free_bytes - _free(session),
            kv_bytes=tokens * network(model.config).kv_token_bytes,
        )
        for batch in (1, 8) if not session.rehearse else (2,):
            steps = waves(engine, records, batch, session.rehearse)
            plain = [step for step in steps if not step.drafted] or steps
            step_ms = sorted(step.elapsed_s for step in plain)[len(plain) // 2] * 1e3
            predicted = step_time(network(model.config), session.gpu, batch, 1, 128)
            session.row(
                size=size,
                engine_batch=batch,
                step_ms=step_ms,
                predicted_step_ms=predicted.ms,
                host_assumed_ms=DEFAULT.host_s * 1e3,
            )
        start_s = time.perf_counter()
        engine.sleep()
        session.synchronize()
        slept_s, asleep_bytes = time.perf_counter() - start_s, _free(session)
        start_s = time.perf_counter()
        engine.wake()
        session.synchronize()
        woke_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        waves(engine, records, 1, session.rehearse)
        session.row(
            size=size,
            sleep_s=slept_s,
            wake_s=woke_s,
            given_back_bytes=asleep_bytes - _free(session),
            first_wave_after_s=time.perf_counter() - start_s,
        )
        del engine, model
        session.free()


def _free(session: Session) -> int:
    return int(torch.cuda.mem_get_info()[0]) if session.device == "cuda" else 0


if __name__ == "__main__":
    part(run, "captures")
