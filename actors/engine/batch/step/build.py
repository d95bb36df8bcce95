"""Choose the implementation of a step's array work; `reference` defines the results."""

from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.kernels import NativeSteps
from actors.engine.batch.step.reference import NumpySteps
from models.ops.native import kernels

StepArrays = NativeSteps | NumpySteps


def step_arrays(table: SlotTable, block_tokens: int) -> StepArrays:
    """Return the fastest installed implementation."""
    return (NativeSteps if hasattr(kernels, "StepKernels") else NumpySteps)(table, block_tokens)
