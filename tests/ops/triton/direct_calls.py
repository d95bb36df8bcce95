"""What reaches a driver that only notes it, by a plan and directly: run in a process whose Triton is no interpreter."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from models.ops.triton import direct, launch, launch_low_bit
from models.ops.triton.direct import Launch

_noted: list[tuple[Any, ...]] = []


class Noting:
    """Triton's launcher of one kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.early = metadata.launch_pdl

    def __call__(self, *given: Any) -> None:
        _noted.append((*given[:5], f"{given[5]}, early: {self.early}", *given[6:]))


class Driver:
    """Triton's driver of an H100 that is not there."""

    launcher_cls = Noting
    utils: "Driver"

    def __init__(self) -> None:
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), (name, hash(binary)), 0, 0, 1024


def reached(call: Callable[[], None], given: list[Tensor]) -> list[Any]:
    """What the driver was given: tensors by their place among `given`, or in the order in which they were made."""
    _noted.clear()
    call()
    places = {x.data_ptr(): f"given {place}" for place, x in enumerate(given)}
    kept: list[Any] = []
    for grid_x, grid_y, grid_z, stream, function, packed, *rest in _noted:
        values = []
        for value, kind in zip(rest[3:], _kinds(rest[3:], places), strict=True):
            if kind != "made":
                values.append(kind)
                continue
            values.append(places.setdefault(value, f"made {len(places)}"))
        kept.append([grid_x, grid_y, grid_z, stream, str(function), str(packed), values])
    return kept


def _kinds(values: list[Any], places: dict[int, str]) -> list[Any]:
    """Numbers as they are; addresses and tensors are `made` unless their place is known."""
    found: list[Any] = []
    for index, value in enumerate(values):
        address = value.data_ptr() if isinstance(value, Tensor) else value
        values[index] = address
        is_address = isinstance(address, int) and not isinstance(address, bool) and address > 2**32
        found.append(places.get(address, "made") if is_address else value)
    return found


def by_plan(plan: Callable[..., list[Launch]], *arguments: Any) -> None:
    for one in plan(*arguments):
        one.run()


def new(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=kind)


def cases(rows: int) -> list[tuple[Any, ...]]:
    """A plan and its arguments each: new tensors at every call."""
    hidden, heads, kv_heads, size, vocab, requests = 64, 4, 2, 16, 5000, 3
    whole, wide, ids, ints = new(hidden), new(rows, kind=torch.float32), new(rows, kind=torch.int64), torch.int32
    caches = new(64, kv_heads, size), new(64, kv_heads, size)
    angles = new(128, size // 2, kind=torch.float32), new(128, size // 2, kind=torch.float32)
    tables = new(8, requests, kind=ints).t(), new(requests + 1, kind=ints), new(requests, kind=ints)
    logits, x = new(rows, vocab, kind=torch.float32), new(rows, hidden)
    eight = new(rows, hidden, kind=torch.int8), new(rows, 1, kind=torch.float32)
    weight = new(48, hidden, kind=torch.int8), new(48, 1, kind=torch.float32)
    deep = new(rows, 4096, kind=torch.int8), eight[1], new(48, 4096, kind=torch.int8), weight[1]  # K is split
    arrived = new(264, kind=ints)
    drawn = new(rows, kind=torch.int64), new(rows, kind=torch.float32), new(rows, kind=torch.float32)
    temperature, cutoff, positions = wide, new(rows, kind=torch.float32), new(rows, kind=torch.int64)
    best = new(rows, 4, kind=torch.int64), new(rows, 4, kind=torch.float32)
    q, mask = new(rows, heads, size), new(rows, 17, kind=torch.uint8)
    bounds = 16, rows, 4096, 0.25
    return [
        (launch.plan_rms_norm, x, None, whole, 1e-6, new(rows, hidden), None),
        (launch.plan_rms_norm, x, new(rows, hidden), whole, 1e-6, new(rows, hidden), new(rows, hidden)),
        (
            launch.plan_rope_write,
            new(rows, (heads + 2 * kv_heads) * size),
            *angles,
            ids,
            positions,
            None,
            None,
            1e-6,
            *caches,
            new(rows, heads, size),
        ),
        (launch.plan_swiglu, new(rows, 2 * hidden), new(rows, hidden)),
        (launch.plan_linear, x, new(48, hidden), None, new(rows, 48)),
        (launch.plan_linear, x, new(48, hidden), new(48), new(rows, 48)),
        (launch.plan_paged_attention, q, *caches, *tables, None, *bounds, None, new(rows, heads, size)),
        (launch.plan_paged_attention, q, *caches, *tables, mask, *bounds, new(900, kind=ints), new(rows, heads, size)),
        (launch.plan_paged_attention, q, *caches, *tables, None, 16, rows, 64, 0.25, None, new(rows, heads, size)),
        (launch.plan_sample, logits, cutoff, temperature, ids, positions, *drawn),
        (launch.plan_sample_topk, logits, cutoff, temperature, ids, positions, 1.0, True, *best),
        (launch.plan_cutoff, logits, temperature, ids, cutoff, wide.clone()),
        (launch_low_bit.plan_quantise_tokens, x, *eight),
        (launch_low_bit.plan_add_norm_quantise, x, new(rows, hidden), whole, 1e-6, *eight, new(rows, hidden)),
        (launch_low_bit.plan_swiglu_quantise, new(rows, 2 * hidden), *eight),
        (launch_low_bit.plan_low_bit_linear, *eight, *weight, None, None, new(rows, 48), arrived),
        (launch_low_bit.plan_low_bit_linear, *deep, None, None, new(rows, 48), arrived),
    ]


def main() -> None:
    driver.set_active(Driver())
    planned: list[str] = []
    run = Launch.run

    def counted(self: Launch) -> Any:
        planned.append(self.kernel.__name__)
        return run(self)

    Launch.run = counted  # type: ignore[method-assign]
    found: list[dict[str, Any]] = []
    for rows in (3, 64, 3):
        for (plan, *first), (_, *second) in zip(cases(rows), cases(rows), strict=True):
            row: dict[str, Any] = {"plan": plan.__name__, "rows": rows}
            known = len(direct._known)
            direct.run_plan(plan, *first)
            row["remembered"] = len(direct._known) - known
            planned.clear()
            tensors = [x for x in second if isinstance(x, Tensor)]
            row["directly"] = reached(lambda: direct.run_plan(plan, *second), tensors)  # noqa: B023
            row["planned"] = len(planned)
            row["by_plan"] = reached(lambda: by_plan(plan, *second), tensors)  # noqa: B023
            found.append(row)
    for (plan, *first), (_, *second) in zip(cases(11), cases(11), strict=True):
        layer = direct.LayerCalls()
        layer(plan, *first)
        planned.clear()
        tensors = [x for x in second if isinstance(x, Tensor)]
        row = {"plan": plan.__name__, "layers": True}
        row["directly"] = reached(lambda: layer(plan, *second), tensors)  # noqa: B023
        row["planned"] = len(planned)
        row["by_plan"] = reached(lambda: by_plan(plan, *second), tensors)  # noqa: B023
        found.append(row)
    odd = torch.empty(5 * 64 + 1, dtype=torch.bfloat16)[1:].view(5, 64)  # two bytes behind a multiple of sixteen
    x, weight, out = new(5, 64), new(64), new(5, 64)
    for name, of in (("unaligned", (odd, None, weight, 1e-6, out, None)), ("twice", (x, x, weight, 1e-6, out, out))):
        planned.clear()
        layer = direct.LayerCalls()
        for way in (direct.run_plan, direct.run_plan, layer, layer):
            way(launch.plan_rms_norm, *of)
        found.append({"plan": name, "planned": len(planned)})
    planned.clear()
    for rows in range(70, 75):
        direct._MOST_CALLS = 3
        direct.run_plan(launch.plan_swiglu, new(rows, 128), new(rows, 64))
    found.append({"plan": "many", "planned": len(planned), "kept": len(direct._known)})
    found.append({"plan": "apart", "turned": [direct.launch_apart(), direct.launch_apart()]})
    for plan, *given in cases(3):
        found[-1].setdefault("reached", []).append(reached(lambda: by_plan(plan, *given), []))  # noqa: B023
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
