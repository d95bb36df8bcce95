"""Verification of 1 to 17 rows per request, EAGLE's drafts by depth and tree, the sampler alone, and the gain of
speculation at a given acceptance.
"""

import numpy as np
import torch

from benchmarks.gpu_parts.session import Session, part
from benchmarks.gpu_parts.stepping import Stepper
from benchmarks.tools.qwen import network
from config.network import Network
from config.strategy import Strategy
from models import ops
from models.transformer import Transformer
from policies.roofline.kernels import draft_kernels, sampling
from policies.roofline.timing import DEFAULT, step_time, time_of
from policies.speculation.graph_plan import GraphShape

ACCEPTED = 2.6  # assumed tokens accepted per draft at batch 1


def run(session: Session) -> None:
    for size in session.sizes("7b", "0.5b"):
        model = session.model(size)
        net = network(model.config)
        _sampler(session, size, net)
        plain = _verification(session, size, model, net)
        _drafting(session, size, model, net, plain)
        del model
        session.free()


def _sampler(session: Session, size: str, net: Network) -> None:
    for rows in (1, 32, 288) if not session.rehearse else (1, 3):
        logits = torch.randn(rows, net.vocab_size, device=session.device)
        cutoff = torch.full((rows,), -torch.inf, device=session.device)
        heat = torch.ones(rows, device=session.device)
        keys = torch.arange(rows, device=session.device)

        with torch.inference_mode():
            seconds = session.device_seconds(ops.sample, logits, cutoff, heat, keys, keys)
        predicted = time_of(sampling(net, rows), session.gpu).ms - DEFAULT.host_s * 1e3
        session.row(size=size, sampler_rows=rows, ms=seconds * 1e3, predicted_ms=predicted)


def _verification(session: Session, size: str, model: Transformer, net: Network) -> dict[int, float]:
    """Return the milliseconds of a plain step by requests."""
    plain: dict[int, float] = {}
    context = 40 if session.rehearse else 4096
    for batch in (1, 8, 32) if not session.rehearse else (1, 2):
        for rows in (1, 2, 3, 4, 5, 7, 9, 13, 17) if not session.rehearse else (1, 3):
            if session.left_s < 8:
                return plain
            stepper = Stepper(model, batch, context, batch * rows, graphs=True)
            captured = stepper.capture(GraphShape(kind="target", batch=batch, rows=rows))
            step = stepper.uniform(batch, rows, context)
            ms = session.seconds(stepper.run, step, repeats=10) * 1e3
            plain.setdefault(batch, ms)
            predicted = step_time(net, session.gpu, batch, rows, context)
            session.row(
                size=size,
                batch=batch,
                rows=rows,
                context=context,
                ms=ms,
                predicted_ms=predicted.ms,
                over_plain=ms / plain[batch],
                captured=captured,
            )
            del stepper, step
            session.free()
    return plain


def _drafting(session: Session, size: str, model: Transformer, net: Network, plain: dict[int, float]) -> None:
    """Measure EAGLE with fresh weights, through the engine: milliseconds of a draft, and of a whole step,
    by strategy."""
    from actors.engine.batch.telemetry import EngineStepRecord
    from actors.engine.native.engine import NativeEngine
    from benchmarks.gpu_parts.requests import waves
    from config.rollout import EngineOptions
    from config.speculation import EagleOptions, SpeculationOptions
    from drafter.build import build_drafters
    from policies.speculation.policy import FixedPolicy

    for text in ("eagle:2", "eagle:4", "eagle:8", "eagle:4x3/12") if not session.rehearse else ("eagle:2",):
        strategy = Strategy.parse(text)
        for batch in (1, 8) if not session.rehearse else (2,):
            if session.left_s < 8:
                session.row(size=size, strategy=text, batch=batch, skipped="no time left")
                continue
            options = EngineOptions(max_running=batch, kv_tokens=batch * 512, max_model_tokens=256)
            eagle = EagleOptions(path="random", min_probability=0.0)
            drafters = build_drafters(SpeculationOptions(eagle=eagle, strategies=(text,)), model, options)
            records: list[EngineStepRecord] = []
            engine = NativeEngine(model, options, drafters=drafters, policy=FixedPolicy(strategy, batch), steps=records)
            steps = waves(engine, records, batch, session.rehearse)
            draft_ms = float(np.median([step.draft_s for step in steps])) * 1e3
            whole_ms = float(np.median([step.elapsed_s for step in steps])) * 1e3
            found = time_of(draft_kernels(net, batch, strategy, 128), session.gpu)
            verify = step_time(net, session.gpu, batch, 1 + strategy.tokens_to_verify, 128)
            predicted_draft = found.ms - DEFAULT.host_s * 1e3
            accepted = min(ACCEPTED, float(strategy.depth))
            session.row(
                size=size,
                strategy=text,
                batch=batch,
                draft_ms=draft_ms,
                predicted_draft_ms=predicted_draft,
                step_ms=whole_ms,
                predicted_step_ms=predicted_draft + verify.ms,
                accepted_assumed=accepted,
                speedup_then=(1 + accepted) * plain[batch] / whole_ms if batch in plain else None,
            )
            del engine, drafters
            session.free()


if __name__ == "__main__":
    part(run, "verifying")
