"""What an engine step costs its host, without a GPU: `python -m benchmarks.step_host`.

Owns `results/step_host.json`. The engine's device side (`DeviceSteps`: upload, forward, head, draws, download) runs
over tensors of the CPU that nobody computes on: Triton launches its kernels of sm_90 into an empty driver
(`benchmarks.tools.empty_cuda`), and a product of cuBLAS is stood in for by one of 1 x 8 by 8 x 8 and an empty result.
So every figure, CPU time of one thread, holds Python, torch's and Triton's calls, and neither CUDA's nor cuBLAS's own.
`planned`: every launch is planned anew and goes through Triton's own dispatch, as it did before `direct`. `unseen`: a
step's shapes come for the first time, as a mixed step's usually do. `replayed`: in the graph that an engine of 128
requests has for the step, whose replay does nothing; the default up to 1,024 rows of prompts. Not to be run with
TRITON_INTERPRET.
"""

import ctypes
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_parts.stepping import Request, Stepper
from benchmarks.harness import RESULTS, command, in_turns, markdown, paired, write
from benchmarks.tools import empty_cuda
from benchmarks.tools.qwen import QWEN, qwen
from models import ops
from models.ops.triton import direct, launch, operators
from models.transformer import Transformer
from policies.speculation.graph_plan import LARGEST_CHUNK, batch_buckets, bucketed_plan

QUESTION = "host time of engine steps: launches planned anew, direct, and graphs"
CASES = ((31, 512), (127, 512), (127, 2048), (64, 0))  # decoding requests, rows of a prompt chunk
MAX_RUNNING, CONTEXT = 128, 2048  # requests, and tokens that each decoding request has


def planned(plan: Callable[..., list[direct.Launch]], *arguments: Any) -> None:
    """As `direct.run_plan` with nothing remembered."""
    for one in plan(*arguments):
        one.run()


def stand_in() -> None:
    """Our operators on CPU launch; torch's products and the embedding compute next to nothing."""
    warnings.filterwarnings("ignore", "Warning only once for all operators")
    library: Any = torch.library.Library("paceline", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("rms_norm", "add_rms_norm", "rope_write", "swiglu", "paged_attention"):
        library.impl(name, partial(getattr(launch, name), run=planned), "CPU", allow_override=True)
    left, right = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        torch.mm(left, right)
        return x.new_empty(x.shape[0], weight.shape[0])

    def logits(x: Tensor, weight: Tensor, *, invariant: bool) -> Tensor:
        torch.mm(left, right)
        return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)

    _kept.append(library)
    for of, name, by in (
        (ops, "sample", launch.sample),
        (ops, "head", logits),
        (F, "linear", product),
        (F, "embedding", lambda tokens, weight: weight.new_empty(tokens.shape[0], weight.shape[1])),
    ):
        setattr(of, name, by)
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: memory comes back from the heap, as from CUDA's caching allocator
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


_kept: list[Any] = []  # registrations end with their library


class NothingCaptured:
    """Graphs that compute nothing."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def reset(self) -> None:
        pass


def host_ms(size: str, decoding: int, chunk: int, repeats: int) -> dict[str, Any]:
    """Medians and least times of one step by either way, in turns."""
    model = Transformer(qwen(size), dtype=torch.bfloat16, batch_invariant=False)
    requests = [Request(1, CONTEXT - i % 16, 1) for i in range(decoding)]
    requests += [Request(chunk, chunk, 1)] if chunk else []

    def way(direct_calls: bool) -> Callable[[], None]:
        operators.is_direct = lambda x: direct_calls
        stepper = Stepper(model, decoding + 1, CONTEXT, decoding + chunk, graphs=False)
        return partial(stepper.run, stepper.packed(requests))

    seen = way(True)

    def unseen() -> None:
        direct._known.clear()
        seen()

    ways = {"planned": way(False), "unseen": unseen, "direct": seen}
    plan = bucketed_plan(lambda _: (), batch_buckets(MAX_RUNNING), chunk_tokens=max(chunk, 1))
    if chunk <= LARGEST_CHUNK:
        graphs = Stepper(model, MAX_RUNNING, CONTEXT, 2 * MAX_RUNNING + chunk, graphs=NothingCaptured())
        graphs.capture(*plan.graphs)
        ways["replayed"] = partial(graphs.run, graphs.packed(requests))
    seconds = in_turns(ways, repeats, warm_up=3, clock=time.thread_time)
    found = {name: {"median_ms": median(of) * 1e3, "least_ms": min(of) * 1e3} for name, of in seconds.items()}
    rounded = {name: {key: round(value, 3) for key, value in of.items()} for name, of in found.items()}
    return (
        {"model": size, "decoding": decoding, "chunk": chunk}
        | rounded
        | {"ratio": paired(seconds["planned"], seconds["direct"])}
    )


def main(
    sizes: Annotated[Sequence[str], "models", tuple(QWEN)] = ("0.5b", "7b"),
    repeats: Annotated[int, "steps of each way"] = 40,
    out: Annotated[Path, "the record"] = RESULTS / "step_host.json",
) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        empty_cuda.install(Path(folder))
        stand_in()
        rows = [host_ms(size, *case, repeats) for size in sizes for case in CASES]
    shown = [
        (
            row["model"],
            row["decoding"],
            row["chunk"],
            *(row[way]["median_ms"] if way in row else "" for way in ("planned", "unseen", "direct", "replayed")),
        )
        for row in rows
    ]
    print(markdown("model | decoding | chunk | planned, ms | unseen shapes, ms | direct, ms | replayed, ms", shown))
    write(out, QUESTION, {"rows": rows}, settings={"threads": 1, "repeats": repeats, "context": CONTEXT})


if __name__ == "__main__":
    command(main)
