"""The machine code of the Triton kernels, without a GPU: `python -m benchmarks.triton_kernels`.

Owns `results/triton_kernels.json`. Compiles every launch of the engine at the shapes of Qwen2.5 0.5B, 1.5B and 7B, from
the launchers' own plans over meta tensors, for sm_80 and sm_90 (fp8: sm_90), and reads the machine code: registers,
bytes of spills, shared memory, 128-bit loads, tensor core instructions; what a kernel does before it waits for the one
before it, and how a norm's sums are spread; of low-bit kernels PTX's float32 arithmetic and instructions per weight. It
times nothing and runs nothing. The committed record changes when a kernel, its shapes or the compiler does. Do not run
it with TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.harness import RESULTS, command, write
from benchmarks.tools.qwen import QWEN
from config.formats import FORMATS
from models.dtypes import DTYPES
from models.ops.triton import eight_bits
from models.ops.triton import launch as launches
from models.ops.triton import launch_drafting as drafting
from models.ops.triton import launch_low_bit as low_bit
from models.ops.triton import low_bit as low_bit_kernels
from models.ops.triton.direct import Launch
from models.ops.triton.draft_operators import empty_fed
from models.ops.triton.work import SPLIT_TOKENS

ARCHITECTURES = (80, 90)
ROWS, REQUESTS, BLOCK_TOKENS, SLOTS, POSITIONS, CONTEXT = 64, 8, 16, 4096, 32_768, 32_768
_TENSOR_CORE = re.compile(r"\b(?:HMMA|HGMMA|IMMA|IGMMA|QMMA|QGMMA)\.")
_TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def plans(size: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Launch]]:
    """Yield every launch of an engine step and of drafting, by name."""
    shape = QWEN[size]
    hidden, intermediate, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    hq, hkv, head_dim = shape["num_heads"], shape["num_kv_heads"], shape["head_dim"]

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def numbers(*shape: int) -> Tensor:
        return empty(*shape, kind=torch.int32)

    x, weight, rows = empty(ROWS, hidden), empty(hidden), empty(ROWS, kind=torch.int64)
    wide = empty(ROWS, kind=torch.float32)
    yield from zip(("rms_norm",), launches.plan_rms_norm(x, None, weight, 1e-6, x, None), strict=True)
    yield from zip(("add_rms_norm",), launches.plan_rms_norm(x, x, weight, 1e-6, x, x), strict=True)
    plan: list[Launch]
    cache = empty(SLOTS, hkv, head_dim)
    q, angles = empty(ROWS, hq, head_dim), empty(POSITIONS, head_dim // 2, kind=torch.float32)
    qkv, norm = empty(ROWS, (hq + 2 * hkv) * head_dim), empty(head_dim)
    for name, norms in (("rope_write", (None, None)), ("rope_write, head norms", (norm, norm))):
        plan = launches.plan_rope_write(qkv, angles, angles, rows, rows, norms[0], norms[1], 1e-6, cache, cache, q)
        yield from zip((name,), plan, strict=True)
    plan = launches.plan_swiglu(empty(ROWS, 2 * intermediate), empty(ROWS, intermediate))
    yield from zip(("swiglu",), plan, strict=True)
    tables, offsets, lengths = numbers(REQUESTS, CONTEXT // BLOCK_TOKENS), numbers(REQUESTS + 1), numbers(REQUESTS)
    masks = {"": None, ", tree": empty(ROWS, 17, kind=torch.uint8)}
    for kind, mask in masks.items():
        ways = ((f"whole context{kind}", SPLIT_TOKENS, None), (f"split{kind}", CONTEXT, None))
        for name, context, work in (*ways, (f"items{kind}", CONTEXT, numbers(1000))):
            plan = launches.plan_paged_attention(
                q, cache, cache, tables, offsets, lengths, mask, BLOCK_TOKENS, 8, context, 0.1, work, q
            )
            yield from zip((f"attention, {name}", f"attention, merge{kind}"), plan, strict=False)
    for name, columns, depth in (
        ("qkv", (hq + 2 * hkv) * head_dim, hidden),
        ("o", hidden, hq * head_dim),
        ("gate_up", 2 * intermediate, hidden),
        ("down", hidden, intermediate),
    ):
        of = empty(ROWS, depth), empty(columns, depth), empty(columns) if name == "qkv" else None
        yield from zip((f"linear, {name}",), launches.plan_linear(*of, empty(ROWS, columns)), strict=True)
    logits = empty(ROWS, vocab, kind=torch.float32)
    yield from zip(("linear, head",), launches.plan_linear(x, empty(vocab, hidden), None, logits), strict=True)
    drawn = logits, wide, wide, rows, rows
    yield from zip(("sample, chunks", "sample, rows"), launches.plan_sample(*drawn, rows, wide, wide), strict=True)
    for k in (1, 4):
        best = empty(ROWS, k, kind=torch.int64), empty(ROWS, k, kind=torch.float32)
        plan = launches.plan_sample_topk(*drawn, 1.0, True, *best)
        yield from zip((f"top {k}, chunks", f"top {k}, rows"), plan, strict=True)
    yield from zip(("cutoff",), launches.plan_cutoff(logits, wide, rows, wide, wide), strict=True)
    yield from _drafting_plans(hidden, vocab, empty)
    yield from _low_bit_plans(shape, empty)


def _drafting_plans(hidden: int, vocab: int, empty: Callable[..., Tensor]) -> Iterator[tuple[str, Launch]]:
    """Yield launches between the passes of a tree of 4 levels with 3 nodes expanded each."""
    k, fed, nodes = 3, 3, 30

    def numbers(*shape: int) -> Tensor:
        return empty(*shape, kind=torch.int64)

    def scores(*shape: int) -> Tensor:
        return empty(*shape, kind=torch.float32)

    weight, table = empty(hidden), empty(vocab, hidden)
    features, joined = empty(ROWS, hidden), empty(ROWS, 2 * hidden)
    for name, norm in (("draft inputs", None), ("draft inputs, norms", weight)):
        yield name, drafting.plan_draft_inputs(numbers(ROWS), table, features, norm, norm, 1e-6, joined)
    level = numbers(REQUESTS * k, k), scores(REQUESTS * k, k), numbers(REQUESTS, k), scores(REQUESTS, k), k
    outputs, mask = empty(REQUESTS, fed, hidden), empty(REQUESTS, fed, fed, kind=torch.uint8)
    known = numbers(REQUESTS, nodes), numbers(REQUESTS, nodes), scores(REQUESTS, nodes)
    found = empty_fed(k, outputs, numbers(REQUESTS, fed))
    before = numbers(REQUESTS, fed), outputs, mask
    yield "tree feed", drafting.plan_tree_feed(*level, k, outputs, before, known, found)
    best = numbers(REQUESTS, 12), numbers(REQUESTS, 12), scores(REQUESTS, 12)
    yield "tree best", drafting.plan_tree_best(*level, known, best)


def _low_bit_plans(shape: dict[str, Any], empty: Callable[..., Tensor]) -> Iterator[tuple[str, Launch]]:
    """Yield tokens and products of the narrowest and the widest matrix, for rows of decoding and of the learner."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    for form in FORMATS.values():
        if form.bits in (2, 3):
            continue  # the kernel is that of four bits
        stored, eight = DTYPES[form.stored], {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}
        kind = eight.get(form.activations, torch.bfloat16)
        shapes = (8, hidden, inner), (8, 2 * inner, hidden), (ROWS, 2 * inner, hidden), (4096, hidden, inner)
        for rows, outputs, inputs in shapes:
            x, scales = empty(rows, inputs, kind=kind), empty(rows, 1, kind=torch.float32)
            groups = form.groups(inputs)
            weight = empty(outputs, inputs * form.container_bits // 8, kind=stored)
            zeros = empty(outputs, groups, kind=torch.uint8) if form.asymmetric else None
            of_weight = weight, empty(outputs, groups, kind=torch.float32), zeros, empty(outputs)
            out, of_tokens = empty(rows, outputs), scales if kind in eight.values() else None
            plan = low_bit.plan_low_bit_linear(
                x, of_tokens, *of_weight, out, empty(low_bit._SPLIT_PROGRAMS, kind=torch.int32)
            )
            yield from zip((f"{form.name}, {rows} x {outputs} x {inputs}",), plan, strict=True)
            if rows == ROWS and form.name in ("w8a8", "fp8"):
                state, gate_up = empty(rows, hidden), empty(rows, 2 * inner)
                plan = low_bit.plan_quantise_tokens(state, x, scales)
                yield from zip((f"quantise tokens, {form.name}",), plan, strict=True)
                plan = low_bit.plan_add_norm_quantise(state, state, empty(hidden), 1e-6, x, scales, state)
                yield from zip((f"add_norm_quantise, {form.name}",), plan, strict=True)
                plan = low_bit.plan_swiglu_quantise(gate_up, empty(rows, inner, kind=kind), scales)
                yield from zip((f"swiglu_quantise, {form.name}",), plan, strict=True)


class _Pretended:
    """Stands in for the driver that Triton queries before it compiles: a device per architecture, with its name."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Launch, architecture: int) -> dict[str, Any]:
    """Return facts of the exact binary that a launch would run there, compiled by the launcher's own call.

    Raises ValueError for an integer argument that Triton would specialise, since steps would compile variants.
    """
    kernel = launch.kernel
    driver.set_active(_Pretended(architecture))
    names = [name for name in kernel.arg_names if name not in launch.constexprs]
    for name, value in zip(names, launch.arguments, strict=True):
        free = kernel.params[kernel.arg_names.index(name)].do_not_specialize
        if isinstance(value, int) and not free:
            raise ValueError(f"{kernel.__name__}: {name} is an integer that Triton would specialise")
    found = launch.compile()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(found.asm["cubin"])
        cubin.flush()
        usage, code = (_dumped(what, cubin.name) for what in ("--dump-resource-usage", "--dump-sass"))
    before_wait = _before_wait(found.asm["ptx"], code)
    if found.metadata.launch_pdl is (before_wait is None):
        raise ValueError(f"{kernel.__name__} starts early and does not wait, or waits and does not start early")
    registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
    return {
        "warps": launch.warps,
        "registers": registers,
        "stack_bytes": stack,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared_bytes": found.metadata.shared,
        "buffers": _buffers(found.asm["ttgir"]),
        "loads_128_bit": len(re.findall(r"\b(?:LDG|LDGSTS)\.\S*128", code)),
        "loads": len(re.findall(r"\b(?:LDG|LDGSTS)\.", code)),
        "products": ", ".join(
            sorted(set(re.findall(r"#(?:mma|blocked)\w* = (#ttg\.nvidia_mma<.*>)", found.asm["ttgir"])))
        ),
        "tensor_core": len(_TENSOR_CORE.findall(code)),
        "before_wait": before_wait,
        "sums": _sums(found.asm["ttgir"]),
    } | ({"float32": _float32(found.asm["ptx"]), "per_weight": _per_weight(launch, code)} if kernel in LOW_BIT else {})


def _before_wait(ptx: str, code: str) -> str | None:
    """Return what precedes the wait for the previous kernel, in PTX and in machine code: operations on memory that
    others see, and jumps. None: the kernel does not wait."""
    if "griddepcontrol.wait" not in ptx:
        return None
    before, first = ptx.partition("griddepcontrol.wait")[0], code.partition("ACQBULK")
    assert first[1], "ptxas has another name for the wait"
    found = re.findall(
        r"^\s*(?:@!?%p\d+\s+)?((?:ld\.global|st|cp|atom|red|prefetch|bra)\b[\w.:]*)", before, re.MULTILINE
    )
    found += re.findall(r"\b((?:LDG|LDGSTS|STG|ATOM|ATOMG|RED|UBLKCP|CCTL|BRA|LD|ST)\b[\w.]*)", first[0])
    return ", ".join(sorted(set(found)))


def _sums(ttgir: str) -> str:
    """Return how the first float32 reduction spreads its numbers over threads, which is the order of its sums."""
    found = re.search(r"}\) : \(tensor<[0-9x]*f32, (#\w+)>\) -> f32", ttgir)
    if found is None:
        return ""
    layout = re.search(rf"^{found[1]} = (.*)$", ttgir, re.MULTILINE)
    assert layout is not None
    return layout[1]


def _buffers(ttgir: str) -> int:
    """Return the number of tiles that the load pipeline buffers in shared memory; 0 without a pipeline."""
    allocated = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    return min(map(int, allocated), default=0)


def _float32(ptx: str) -> str:
    """Return the float32 arithmetic by name, which shows how each operation rounds."""
    return ", ".join(sorted(set(re.findall(r"\b(?:add|sub|mul|div|fma|rcp)\.[\w.]*f32\b", ptx))))


def _dumped(what: str, path: str) -> str:
    return subprocess.run([_TOOL, what, path], capture_output=True, text=True, check=True).stdout


LOW_BIT = (
    eight_bits.quantise_tokens,
    eight_bits.add_norm_quantise,
    eight_bits.swiglu_quantise,
    low_bit_kernels.multiply_bytes,
    low_bit_kernels.multiply_nibbles,
    low_bit_kernels.multiply_unpacked,
)


def _per_weight(launch: Launch, code: str) -> float:
    """Return the instructions of a thread in the loop of products, for each weight that it multiplies; of a row that is
    kept in registers, for each of its numbers; 0 for others."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", code)
    instructions = {int(address, 16): text for address, text in found}
    if "HEAD" in launch.constants:
        numbers: int = launch.constants["HEAD"] + launch.constants["TAIL"]
        return round(len(instructions) * 32 * launch.warps / numbers, 2)
    per_step = launch.constants.get("GROUP", launch.constants.get("TILE_DEPTH", 0))
    weights: float = launch.constants.get("TILE_COLUMNS", 0) * per_step / (32 * launch.warps)
    for address, text in instructions.items():
        back = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if back is None or int(back[1], 16) >= address:
            continue
        loop = [text for place, text in instructions.items() if int(back[1], 16) <= place <= address]
        if any(_TENSOR_CORE.search(text) for text in loop):
            return round(len(loop) / weights, 2)
    return 0.0


def table(sizes: Sequence[str], architectures: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for size in sizes:
        for name, launch in plans(size):
            for architecture in architectures:
                if "fp8" in name and architecture < 89:
                    continue
                row = {"kernel": name, "model": size, "architecture": f"sm_{architecture}"}
                found.append(row | compiled(launch, architecture))
                print(*found[-1].values(), sep="\t", flush=True)
    return found


def main(
    sizes: Annotated[Sequence[str], "models", tuple(QWEN)] = tuple(QWEN),
    architectures: Annotated[Sequence[int], "compute capabilities, 90 for sm_90"] = ARCHITECTURES,
    out: Annotated[Path, "the record"] = RESULTS / "triton_kernels.json",
) -> None:
    rows = table(sizes, architectures)
    write(out, "the Triton kernels as machine code", {"rows": rows}, settings={"triton": triton.__version__})


if __name__ == "__main__":
    command(main, timed=False)
