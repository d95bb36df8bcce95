# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Programmatic dependent launch: a kernel's programs start while those of the kernel before it still run.

Needs compute capability 9.0. Every program waits for the whole kernel before it, and for its memory, before it reads or
writes anything. So a kernel that has ended implies that all before it have, also those that it did not read from. Only
requests to bring weights into the L2 cache precede the wait: they change no value, whatever is written meanwhile.
Source: CUDA programming guide, Programmatic Dependent Launch; PTX, griddepcontrol.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous():
    """Let the next kernel's programs start, and wait for the previous kernel."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def ask_for(numbers, column, begin, COLUMNS: tl.constexpr, SIZE: tl.constexpr, LINES: tl.constexpr):
    """Ask for the first LINES lines of 128 bytes of each column's numbers [COLUMNS, SIZE], from number `begin` on."""
    LINE: tl.constexpr = 1024 // numbers.dtype.element_ty.primitive_bitwidth
    number = tl.minimum(begin + tl.arange(0, LINES) * LINE, SIZE - 1)
    of_column = tl.minimum(column, COLUMNS - 1).to(tl.int64) * SIZE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [numbers + of_column[:, None] + number[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
