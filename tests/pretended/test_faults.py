"""Faults planted in what a graph captures: each must be noticed, and each would pass unnoticed on a CPU.

Three of them CUDA refuses while it captures; then decoding goes on without graphs and no token changes. The fourth is
legal and wrong: a length that the host knew when it captured.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.native.engine import NativeEngine
from models.checkpoint import hf_state_dict, load_hf_state_dict
from models.transformer import Transformer
from tests.engine.support import engine, make_requests, options_of, run, tiny_model
from tests.gpu.test_cuda import Counting
from tests.pretended.device import IllegalInCaptureError, MixedDevicesError
from tests.pretended.tensor import to_host

Fault = Callable[[Tensor, Any], tuple[Tensor, Any]]  # tokens and context of a forward, as they are and as they become


def reads_a_value(tokens: Tensor, context: Any) -> tuple[Tensor, Any]:
    int(context.positions.max())
    return tokens, context


def adds_a_host_tensor(tokens: Tensor, context: Any) -> tuple[Tensor, Any]:
    return tokens + torch.zeros(1, dtype=torch.int64), context


def copies_from_pageable_memory(tokens: Tensor, context: Any) -> tuple[Tensor, Any]:
    return tokens + torch.zeros(1, dtype=torch.int64).to(tokens.device), context


def bakes_in_a_length(tokens: Tensor, context: Any) -> tuple[Tensor, Any]:
    known = int(to_host(context.positions).max())  # without asking the device: the host had it
    return tokens, replace(context, positions=torch.full_like(context.positions, known))


def none(tokens: Tensor, context: Any) -> tuple[Tensor, Any]:
    return tokens, context


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
    requests = make_requests(3, max_new_tokens=8)
    expected = run(engine(model, cuda_graphs=False), requests)
    sound = Transformer.forward

    def forward(self: Transformer, tokens: Tensor, context: Any, *rest: Any) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            tokens, context = fault(tokens, context)
        return sound(self, tokens, context, *rest)

    monkeypatch.setattr(Transformer, "forward", forward)
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
