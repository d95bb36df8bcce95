"""The step table: models by requests by context, with graphs and without, with floor and prediction."""

from benchmarks.gpu_parts.session import Session, part
from benchmarks.gpu_parts.stepping import Request, Stepper, fits
from benchmarks.tools.qwen import network
from models.transformer import Transformer
from policies.roofline.kernels import listed_attention, step_kernels
from policies.roofline.timing import step_time, time_of
from policies.speculation.graph_plan import GraphShape

GRID = tuple((batch, context) for context in (1024, 8192, 32_768) for batch in (1, 8, 32, 64))


def run(session: Session) -> None:
    for size in session.sizes("7b", "1.5b", "0.5b"):
        model = session.model(size)
        net = network(model.config)
        for batch, context in GRID if not session.rehearse else ((1, 40), (3, 40)):
            if session.left_s < 5:
                session.row(size=size, batch=batch, context=context, skipped="no time left")
                continue
            if not fits(model, batch * context):
                session.row(size=size, batch=batch, context=context, skipped="the cache does not fit")
                continue
            stepper = Stepper(model, batch, context, batch, graphs=True)
            rows = stepper.uniform(batch, 1, context)
            predicted = step_time(net, session.gpu, batch, 1, context)
            unplanned = step_time(net, session.gpu, batch, 1, context, eager=True)
            eager_ms = session.seconds(stepper.run, rows, repeats=6) * 1e3
            captured = stepper.capture(GraphShape(kind="target", batch=batch, rows=1))
            graph_ms = session.seconds(stepper.run, rows, repeats=20) * 1e3
            session.row(
                size=size,
                batch=batch,
                context=context,
                floor_ms=predicted.floor_ms,
                graph_ms=graph_ms,
                predicted_graph_ms=predicted.ms,
                eager_ms=eager_ms,
                predicted_eager_ms=unplanned.ms,
                captured=captured,
                of_hbm_limit=predicted.floor_ms / graph_ms,
                launches=predicted.launches,
            )
            del stepper, rows
            session.free()
        _stragglers(session, size, model)
        _histogram(session, size, model)
        del model
        session.free()


def _stragglers(session: Session, size: str, model: Transformer) -> None:
    """One long context among many short ones, as at the end of a rollout."""
    net = network(model.config)
    for batch in (64, 96, 128) if not session.rehearse else (3,):
        long, short = (8192, 600) if not session.rehearse else (700, 40)
        if session.left_s < 5 or not fits(model, batch * long):
            session.row(size=size, running=batch, longest=long, skipped="no time left, or the cache does not fit")
            continue
        stepper = Stepper(model, batch, long, batch, graphs=True)
        rows = stepper.packed([Request(1, long, 1), *[Request(1, short, 1)] * (batch - 1)])
        stepper.capture(GraphShape(kind="target", batch=batch, rows=1))
        contexts = [long, *[short] * (batch - 1)]
        kernels = [kernel for kernel in step_kernels(net, batch, 1, short) if kernel.part != "kv"]
        kernels += [listed_attention(net, contexts)] * net.num_layers
        session.row(
            size=size,
            running=batch,
            longest=long,
            others=short,
            graph_ms=session.seconds(stepper.run, rows, repeats=20) * 1e3,
            predicted_graph_ms=time_of(kernels, session.gpu).ms,
        )
        del stepper, rows
        session.free()


def _histogram(session: Session, size: str, model: Transformer) -> None:
    """Report the device's time by kernel in one eager step."""
    batch, context = (2, 40) if session.rehearse else (8, 8192)
    stepper = Stepper(model, batch, context, batch, graphs=False)
    rows = stepper.uniform(batch, 1, context)
    stepper.run(rows)
    events = session.profiled(lambda: stepper.run(rows))
    key = "self_device_time_total" if session.device == "cuda" else "self_cpu_time_total"
    largest = sorted(events, key=lambda event: -getattr(event, key, 0.0))[:12]
    kernels = {event.key[:60]: [event.count, round(getattr(event, key, 0.0), 1)] for event in largest}
    session.row(size=size, histogram=kernels, unit="count, us", batch=batch, context=context)


if __name__ == "__main__":
    part(run, "steps")
