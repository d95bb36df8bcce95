"""Low-bit products and steps against bfloat16's, each with its prediction.

Products: the matrices of a 7B layer by rows, with tokens rounded each time as in a step. `of_bfloat16` is bfloat16's
time over theirs. int8 by torch's library (`torch._int_mm`, from 17 rows on) is measured too, without the float steps
that would follow it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_parts.session import Session, part
from benchmarks.gpu_parts.stepping import Stepper, fits
from benchmarks.tools.qwen import network
from config.formats import FORMATS, LowBitFormat
from models.low_bit import quantise
from models.ops.low_bit import low_bit_linear
from models.ops.triton.low_bit_operators import require_products
from policies.roofline.kernels import projection
from policies.roofline.timing import kernel_s, step_time
from policies.speculation.graph_plan import GraphShape

NAMES = ("w8a8", "fp8", "w4a8", "w4a16")


def run(session: Session) -> None:
    forms = [FORMATS[name] for name in NAMES if _runs(session, FORMATS[name])]
    for size in ("7b", "0.5b") if not session.rehearse else ("wide",):
        for batch, context in ((1, 1024), (8, 8192), (64, 1024)) if not session.rehearse else ((2, 40),):
            for form in (None, *forms):
                _step(session, size, batch, context, form)
    _products(session, forms)


def _runs(session: Session, form: LowBitFormat) -> bool:
    try:
        require_products(form, session.device)
    except ValueError as error:
        session.row(quantization=form.name, skipped=str(error))
        return False
    return True


def _step(session: Session, size: str, batch: int, context: int, form: LowBitFormat | None) -> None:
    name = "none" if form is None else form.name
    if session.left_s < 0.35 * session.budget_s and not session.rehearse:
        session.row(size=size, batch=batch, context=context, quantization=name, skipped="time is left for products")
        return
    model = session.model(size, low_bit=form)
    if not fits(model, batch * context):
        session.row(size=size, batch=batch, context=context, quantization=name, skipped="the cache does not fit")
        return
    stepper = Stepper(model, batch, context, batch, graphs=True)
    rows = stepper.uniform(batch, 1, context)
    stepper.run(rows)
    captured = stepper.capture(GraphShape(kind="target", batch=batch, rows=1))
    predicted = step_time(network(model.config, quantization=name), session.gpu, batch, 1, context)
    graph_ms = session.seconds(stepper.run, rows, repeats=20) * 1e3
    session.row(
        size=size,
        batch=batch,
        context=context,
        quantization=name,
        floor_ms=predicted.floor_ms,
        graph_ms=graph_ms,
        predicted_graph_ms=predicted.ms,
        captured=captured,
        launches=predicted.launches,
    )
    del model, stepper, rows
    session.free()


def _products(session: Session, forms: list[LowBitFormat]) -> None:
    config = session.config("7b" if not session.rehearse else "wide")
    for outputs, inputs in network(config).matrices:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=session.device)
        stored = [quantise(weight, form) for form in forms]
        for rows in (1, 8, 32, 64, 512, 8192) if not session.rehearse else (1, 70):
            if session.left_s < 3:
                session.row(n=outputs, k=inputs, m=rows, skipped="no time left")
                return
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=session.device)
            exact_s = session.device_seconds(F.linear, x, weight)
            for low in stored:
                net = network(config, quantization=low.format.name)
                predicted_s = sum(kernel_s(k, session.gpu) for k in projection(net, "", rows, outputs, inputs))
                with torch.inference_mode():
                    seconds = session.device_seconds(low_bit_linear, x, low)
                session.row(
                    quantization=low.format.name,
                    m=rows,
                    n=outputs,
                    k=inputs,
                    us=seconds * 1e6,
                    predicted_us=predicted_s * 1e6,
                    of_bfloat16=exact_s / seconds,
                    library_int8_us=_library_us(session, x, low.values) if low.format.name == "w8a8" else None,
                )


def _library_us(session: Session, x: Tensor, values: Tensor) -> float | None:
    """Return the microseconds of torch's int8 product to int32; None if it does not take the shape."""
    if session.device != "cuda" or len(x) <= 16 or torch.version.cuda is None:
        return None
    tokens = x.to(torch.int8)
    return session.device_seconds(torch._int_mm, tokens, values.t()) * 1e6


if __name__ == "__main__":
    part(run, "low_bits")
