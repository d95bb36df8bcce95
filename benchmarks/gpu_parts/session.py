"""Shared code of the parts: rows written at once, a prediction with each measurement, timing, models.

Owns the clock of a part's budget and the timing on the device; a part decides what to measure. On a CPU (rehearsal) the
same code runs with tiny shapes and no events, so that nothing runs for the first time in borrowed minutes.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch

from benchmarks.harness import command
from benchmarks.tools.qwen import qwen
from config.formats import LowBitFormat
from models.config import ModelConfig
from models.transformer import Transformer
from policies.roofline.devices import DEVICES, Device, device_named

TINY: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2}
TINY |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "tied": True}
WIDE = TINY | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # divisible into groups of 128
BLOCK_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class Session:
    """One part: its output, its device, its time limit."""

    name: str
    out: Path
    budget_s: float
    rehearse: bool
    device: str = field(init=False)
    gpu: Device = field(init=False)  # the target of predictions
    started_s: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu" and not self.rehearse:
            raise SystemExit(f"{self.name} needs a CUDA device; --rehearse runs it with tiny shapes here")
        found = device_named(torch.cuda.get_device_name()) if self.device == "cuda" else None
        self.gpu = found or DEVICES["H100"]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        if self.device == "cuda" and found is None:
            name = torch.cuda.get_device_name()
            self.row(note=f"{name} is not in policies.roofline.devices: predictions are for an H100")

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.monotonic() - self.started_s)

    def row(self, **values: Any) -> None:
        """Append a row and print it. Numbers `x` and `predicted_x` are shown with their deviation."""
        found = {key: _short(value) for key, value in values.items()}
        for key in [key for key in found if f"predicted_{key}" in found]:
            measured, predicted = found[key], found[f"predicted_{key}"]
            if measured and predicted:
                found[f"{key}_over_predicted"] = _short(measured / predicted)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, default=str) + "\n")
        print(f"{self.name}: " + "  ".join(f"{key}={value}" for key, value in found.items()), flush=True)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[..., object], *given: object, repeats: int = 10, warm_up: int = 2) -> float:
        """Return median seconds of `work(*given)`, waiting for each: the time of a caller that needs the result."""
        repeats, warm_up = (2, 1) if self.rehearse else (repeats, warm_up)
        found = []
        for turn in range(-warm_up, repeats):
            self.synchronize()
            start_s = time.perf_counter()
            work(*given)
            self.synchronize()
            if turn >= 0:
                found.append(time.perf_counter() - start_s)
        return median(found)

    def device_seconds(self, work: Callable[..., object], *given: object, calls: int = 20) -> float:
        """Return the seconds of one of many calls in a row, between two events: the device's time, unless the host
        limits it."""
        calls = 2 if self.rehearse else calls
        work(*given)
        if self.device != "cuda":
            return self.seconds(work, *given)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(calls):
            work(*given)
        end.record()
        torch.cuda.synchronize()
        found = float(begin.elapsed_time(end)) / 1e3 / calls
        return found or self.seconds(work, *given)  # a pretended device has no clock

    def profiled(self, work: Callable[[], object]) -> Any:
        """Return torch's events of one call, averaged by name."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device == "cuda" and torch.version.cuda is not None:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        if self.device == "cuda" and torch.version.cuda is None:
            work()
            return []  # a pretended device has no profiler
        with torch.profiler.profile(activities=activities) as profile:
            work()
            self.synchronize()
        return profile.key_averages()

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """Return the replay of a graph of `work`; `work` itself on a CPU."""
        if self.device != "cuda":
            return work
        from actors.engine.native.forward.graphs import CudaGraphCapture

        def run() -> None:
            work()

        return CudaGraphCapture().record(run)

    def sizes(self, *wanted: str) -> tuple[str, ...]:
        return ("tiny",) if self.rehearse else wanted

    def config(self, size: str) -> ModelConfig:
        small = {"tiny": TINY, "wide": WIDE}
        return qwen("0.5b", **small[size]) if size in small else qwen(size)

    def model(self, size: str, dtype: torch.dtype = torch.bfloat16, low_bit: LowBitFormat | None = None) -> Transformer:
        """Make a model with random weights on its device; a step's cost does not depend on them. Low-bit: ones."""
        torch.manual_seed(0)
        config = self.config(size)
        model = Transformer(config, dtype=dtype, device=self.device, batch_invariant=False, low_bit=low_bit)
        with torch.no_grad():
            for buffer in () if low_bit is None else model.buffers():
                buffer.fill_(1)
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.02)
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return model.requires_grad_(False)

    def free(self) -> None:
        """Free memory between models; parts drop their references first."""
        import gc

        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def part(run: Callable[[Session], None], name: str) -> None:
    """Run a part as a command."""

    def main(
        *,
        out: Annotated[Path, "JSON lines"],
        budget_s: Annotated[float, "stop before"] = 60.0,
        rehearse: Annotated[bool, "tiny shapes, on whatever there is"] = False,
    ) -> None:
        session = Session(name=name, out=out, budget_s=budget_s, rehearse=rehearse)
        run(session)
        session.row(done=True, seconds=time.monotonic() - session.started_s)

    command(main, timed=False)
