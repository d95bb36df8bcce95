"""The table of launches, by which budgets count and predictions are made, against what the launchers do."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.tools.qwen import network, qwen
from config.formats import FORMATS
from models.ops import reference
from models.ops.triton import LAUNCHES, launch, launch_low_bit, operators
from models.ops.triton.direct import Launch, LayerCalls
from policies.roofline.kernels import step_kernels
from tests.ops.test_operators import arguments

OURS = {name: of for of in (launch, launch_low_bit) for name in LAUNCHES if hasattr(of, name)}


@pytest.mark.parametrize("name", OURS)
def test_an_operator_launches_what_the_table_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Any] = []
    run = Launch.run

    def counted(self: Launch) -> None:
        kernels.append(self.kernel)
        run(self)

    monkeypatch.setattr(Launch, "run", counted)
    given = list(arguments(torch.float32)[name])
    if name == "paged_attention":
        given[9] = 1024  # max_context: splits, and their merge
    getattr(OURS[name], name)(*given)
    assert len(kernels) == LAUNCHES[name]


def test_kernels_of_layers_start_early_as_the_predictor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for the kernel before them, and no others."""
    early: dict[str, set[bool]] = {}

    def noted(self: Launch) -> None:
        early.setdefault(name, set()).add("PDL" in self.kernel.arg_names)

    monkeypatch.setattr(Launch, "run", noted)
    for name in OURS:
        getattr(OURS[name], name)(*arguments(torch.float32)[name])
    kernels = step_kernels(replace(network(qwen("0.5b")), low_bits=FORMATS["w8a8"]), 1, 1, 1024)
    predicted = {"low_bit_linear" if kernel.product else kernel.name: kernel.early for kernel in kernels[1:-5]}
    predicted |= {kernel.name: kernel.early for kernel in step_kernels(network(qwen("0.5b")), 1, 1, 1024)}
    assert {"rms_norm", "add_norm_quantise", "swiglu", "sample", "low_bit_linear"} <= predicted.keys()
    for name, starts in predicted.items():
        assert name not in early or early[name] == {starts}, name


def test_a_kernel_that_does_not_fit_the_device_leaves_the_operator_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Shared memory that a smaller card has not: said once, and the run goes on."""
    asked: list[str] = []

    def refused(self: Launch) -> None:
        asked.append(self.kernel.__name__)
        raise OutOfResources(300_000, 101_376, "shared memory")

    monkeypatch.setattr(Launch, "run", refused)
    given = arguments(torch.float32)["swiglu"]
    call = operators.launched("swiglu", "launch", reference.swiglu)
    expected = reference.swiglu(*given)
    assert torch.equal(call(*given), expected)
    assert torch.equal(call(*given), expected)
    assert torch.equal(call(*given, run=LayerCalls()), expected), "of a step's layers"
    assert len(asked) == 1
    assert caplog.text.count("paceline::swiglu") == 1
