"""Steps with a prompt chunk and decoding requests, shapes seen for the first time, and their memory."""

from benchmarks.gpu_parts.session import Session, part
from benchmarks.gpu_parts.stepping import Request, Stepper
from benchmarks.tools.qwen import network
from policies.roofline.kernels import step_kernels
from policies.roofline.timing import step_time, time_of


def run(session: Session) -> None:
    for size in session.sizes("7b", "1.5b"):
        model = session.model(size)
        net = network(model.config)
        for decoding, chunk, context in ((127, 512, 2560), (31, 2048, 2560), (0, 512, 512), (0, 8192, 8192)):
            if session.rehearse:
                decoding, chunk, context = min(decoding, 3), min(chunk, 9), 48
            stepper = Stepper(model, decoding + 1, context, decoding + chunk, graphs=False)
            requests = [Request(1, context - i % 16, 1) for i in range(decoding)]
            rows = stepper.packed([*requests, Request(chunk, chunk, 1)])
            session.free()
            first_ms = session.seconds(stepper.run, rows, repeats=1, warm_up=0) * 1e3
            warm_ms = session.seconds(stepper.run, rows, repeats=5) * 1e3
            longer = stepper.packed([*requests, Request(chunk - 1, chunk - 1, 1)])
            unseen_ms = session.seconds(stepper.run, longer, repeats=1, warm_up=0) * 1e3
            prompt = step_time(net, session.gpu, 1, chunk, chunk, eager=True)
            beside = [k for k in step_kernels(net, decoding, 1, context) if k.part == "kv"] if decoding else []
            kv_ms = time_of(beside, session.gpu).by_part_ms["kv"]
            session.row(
                size=size,
                decoding=decoding,
                chunk=chunk,
                context=context,
                first_ms=first_ms,
                ms=warm_ms,
                predicted_ms=prompt.ms + kv_ms,
                shape_never_seen_ms=unseen_ms,
                peak_gib=session.peak_gib(),
            )
            del stepper, rows, longer
            session.free()
            if session.left_s < 4:
                break
        del model
        session.free()


if __name__ == "__main__":
    part(run, "mixed")
