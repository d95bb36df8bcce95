"""Faults planted in what a graph captures: each must be noticed, and each would pass unnoticed on a CPU.

Three of them CUDA refuses while it captures; then decoding goes on without graphs and no token changes. The fourth is
legal and wrong: a length that the host knew when it captured.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.decoder import DecoderForward
from actors.engine.native.forward.layout import DeviceStep
from models.checkpoint import hf_state_dict, load_hf_state_dict
from models.transformer import Transformer
from tests.engine.support import engine, make_requests, options_of, run, tiny_model
from tests.gpu.test_cuda import Counting
from tests.pretended.device import IllegalInCaptureError, MixedDevicesError
from tests.pretended.tensor import to_host

Fault = Callable[[DeviceStep], DeviceStep]  # what a forward is given, as it is and as it becomes


def reads_a_value(step: DeviceStep) -> DeviceStep:
    int(step.positions.max())
    return step


def adds_a_host_tensor(step: DeviceStep) -> DeviceStep:
    return replace(step, tokens=step.tokens + torch.zeros(1, dtype=torch.int64))


def copies_from_pageable_memory(step: DeviceStep) -> DeviceStep:
    return replace(step, tokens=step.tokens + torch.zeros(1, dtype=torch.int64).to(step.tokens.device))


def bakes_in_a_length(step: DeviceStep) -> DeviceStep:
    known = int(to_host(step.positions).max())  # without asking the device: the host had it
    return replace(step, positions=torch.full_like(step.positions, known))


def none(step: DeviceStep) -> DeviceStep:
    return step


class Witness(Counting):
    """What captures raised."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[RuntimeError] = []

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        try:
            return super().record(compute)
        except RuntimeError as error:
            self.errors.append(error)
            raise


def run_with(fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Witness, bool]:
    """Decoding with `fault` in whatever is captured; whether its tokens are those of an engine without graphs."""
    reference = tiny_model(tmp_path, "qwen2", invariant=False)
    model = Transformer(reference.config, device="cuda", batch_invariant=False)
    load_hf_state_dict(model, hf_state_dict(reference))
    requests = make_requests(3, max_new_tokens=24)
    expected = run(engine(model, cuda_graphs=False), requests)
    sound = DecoderForward.__call__

    def forward(self: DecoderForward, step: DeviceStep, cache: KVCache) -> tuple[Tensor, Tensor]:
        return sound(self, fault(step) if torch.cuda.is_current_stream_capturing() else step, cache)

    monkeypatch.setattr(DecoderForward, "__call__", forward)
    witness = Witness()
    found = run(NativeEngine(model, options_of(), graph_capture=witness), requests)
    return witness, all(found[i].tokens.tolist() == expected[i].tokens.tolist() for i in expected)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (reads_a_value, IllegalInCaptureError),
        (adds_a_host_tensor, MixedDevicesError),
        (copies_from_pageable_memory, IllegalInCaptureError),
    ],
)
def test_a_fault_that_cuda_refuses_ends_capturing_and_changes_no_token(
    fault: Fault, error: type[RuntimeError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness, right = run_with(fault, tmp_path, monkeypatch)
    assert witness.captures == 0
    assert [type(one) for one in witness.errors] == [error]
    assert right


def test_a_length_that_was_baked_in_gives_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness, right = run_with(bakes_in_a_length, tmp_path, monkeypatch)
    assert witness.replays > witness.captures > 0
    assert not right


def test_without_a_fault_nothing_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness, right = run_with(none, tmp_path, monkeypatch)
    assert witness.replays > witness.captures > 0
    assert right
    assert not witness.errors
