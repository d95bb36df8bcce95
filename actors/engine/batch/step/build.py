"""Which implementation of the array work this installation has. Owns the choice only."""

from actors.engine.batch.slots import SlotTable
from actors.engine.batch.step.kernels import NativeSteps
from actors.engine.batch.step.reference import NumpySteps
from actors.engine.batch.step.types import StepArrays
from models.ops.native import kernels


def step_arrays(table: SlotTable, block_tokens: int) -> StepArrays:
    """The fastest implementation that is installed."""
    return (NativeSteps if hasattr(kernels, "StepKernels") else NumpySteps)(table, block_tokens)
