"""The pretended device itself: values as on the host, and what a real one would refuse, count or leave undone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.pretended.counting import counting
from tests.pretended.device import DEVICE, IllegalInCaptureError, MixedDevicesError, PinnedRaceError

CUDA = "cuda"


def test_values_and_gradients_are_those_of_the_host() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(7, 5, generator=generator), torch.randn(3, 5, generator=generator)
    results = []
    for device in ("cpu", CUDA):
        w = weight.clone().to(device).requires_grad_()
        x = rows.to(device)
        y = torch.nn.functional.linear(x, w)
        y[:, 2:].mul_(2.0)
        y.softmax(-1)[torch.arange(3, device=device), 1].log().sum().backward()
        assert w.grad is not None
        assert w.grad.device.type == device
        results.append((y.detach().cpu(), w.grad.cpu()))
    torch.testing.assert_close(results[0], results[1])


def test_a_module_moves_and_its_parameters_are_written_in_place() -> None:
    module = torch.nn.Linear(3, 2).to(CUDA)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    module(torch.ones(4, 3, device=CUDA)).sum().backward()
    optimizer.step()
    assert module.weight.is_cuda
    assert not torch.equal(module.weight.cpu(), before.cpu())


def test_tensors_of_host_and_device_do_not_meet() -> None:
    x = torch.ones(3, device=CUDA)
    with pytest.raises(MixedDevicesError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(MixedDevicesError):
        torch.ones(3)[torch.zeros(2, dtype=torch.int64, device=CUDA)]
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        x.numpy()
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # a number is no tensor of the host


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
        lambda x: x.long().bincount(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.empty(4, pin_memory=True).copy_(x),
    ],
)
def test_what_makes_the_host_wait_is_counted(wait: Callable[[Tensor], object]) -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0]).to(CUDA) + 1.0
    with counting() as seen:
        wait(x)
    assert seen.waits.total() == 1, seen
    (place,) = seen.waits.lines()
    assert place.startswith("tests/pretended/test_device.py")


def test_what_needs_no_wait_is_not_counted() -> None:
    x = torch.arange(4, device=CUDA)
    with counting() as seen:
        y = x.repeat_interleave(2, output_size=8)
        y[y > 1] = 0
        y.masked_fill(y == 0, 1).index_select(0, x).float().softmax(0).argmax()
        torch.zeros(3, device=CUDA).clone()
    assert not seen.waits, seen.waits
    assert not seen.pageable


def test_kernels_are_counted_views_are_not() -> None:
    x = torch.ones(4, 6, device=CUDA)
    with counting() as seen:
        y = x.view(6, 4).t()[:2].unsqueeze(0).expand(3, -1, -1)
        torch.empty(3, device=CUDA)
        y + 1.0
        x @ x.t()
    assert seen.kernels.whats() == {"aten.add.Tensor": 1, "aten.mm.default": 1}


def test_an_upload_of_pageable_memory_is_told_from_one_of_pinned_memory() -> None:
    pinned, plain = torch.ones(3, pin_memory=True), torch.ones(3)
    with counting() as seen:
        pinned.to(CUDA, non_blocking=True)
    assert (seen.uploads.total(), seen.pageable.total(), seen.waits.total()) == (1, 0, 0)
    with counting() as seen:
        plain.to(CUDA)
        torch.tensor([1, 2], device=CUDA)
    assert (seen.uploads.total(), seen.pageable.total(), seen.waits.total()) == (2, 2, 2)


def test_a_download_is_garbage_until_the_host_has_waited() -> None:
    host, event = torch.zeros(3, pin_memory=True), torch.cuda.Event()
    with counting() as seen:
        host.copy_(torch.ones(3, device=CUDA), non_blocking=True)
        event.record()
        assert host.isnan().all()
        assert not event.query()
        event.synchronize()
        assert event.query()
        event.synchronize()
    assert host.tolist() == [1.0, 1.0, 1.0]
    assert (seen.downloads.total(), seen.pageable.total()) == (1, 0)
    assert seen.waits.total() == 1, "there is nothing left to wait for the second time"


def test_pinned_memory_written_while_it_is_copied_is_an_error() -> None:
    host, event = torch.zeros(3, pin_memory=True), torch.cuda.Event()
    on_device = host.to(CUDA, non_blocking=True)
    event.record()
    event.synchronize()
    host.fill_(1.0)  # now it may
    on_device.copy_(host, non_blocking=True)
    host.fill_(2.0)
    with pytest.raises(PinnedRaceError, match="test_device"):
        torch.cuda.synchronize()


def captured(compute: Callable[[], object], pool: object = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        compute()
    return graph


def test_a_replay_computes_with_what_the_addresses_hold_now() -> None:
    x, out = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)
    graph = captured(lambda: out.copy_((x * 2.0).cumsum(0)))
    assert out.tolist() == [0.0, 0.0, 0.0], "a capture runs nothing"
    with counting() as seen:
        graph.replay()
    assert out.tolist() == [2.0, 4.0, 6.0]
    assert (seen.launches.total(), seen.kernels.total(), seen.replays.total()) == (1, 3, 1)
    x.fill_(3.0)
    graph.replay()
    assert out.tolist() == [6.0, 12.0, 18.0]


def test_a_copy_inside_a_graph_reads_pinned_memory_at_each_replay() -> None:
    host, back = torch.ones(2, pin_memory=True), torch.zeros(2, pin_memory=True)
    x = torch.zeros(2, device=CUDA)

    def compute() -> None:
        x.copy_(host, non_blocking=True)
        back.copy_(x + 1.0, non_blocking=True)

    graph = captured(compute)
    for value in (5.0, 7.0):
        host.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert back.tolist() == [value + 1.0, value + 1.0]


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.sum().item(),
        lambda x: x + torch.ones(3).to(CUDA),
        lambda x: x[torch.tensor([0])],
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
        lambda x: torch.cuda.Event().synchronize(),
    ],
)
def test_what_cannot_be_captured_is_refused(fault: Callable[[Tensor], object]) -> None:
    x, out = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)

    def compute() -> None:
        out.add_(x)
        fault(x)

    with pytest.raises(IllegalInCaptureError, match="capturing"):
        captured(compute)
    assert out.tolist() == [0.0, 0.0, 0.0]
    assert not torch.cuda.is_current_stream_capturing()
    fault(x)


def test_a_refusal_that_is_swallowed_spoils_the_capture() -> None:
    x = torch.ones(3, device=CUDA)

    def compute() -> None:
        try:
            x.sum().item()
        except RuntimeError:
            x.add_(1.0)

    with pytest.raises(IllegalInCaptureError, match="spoiled"):
        captured(compute)


def test_graphs_of_a_pool_reuse_what_nobody_holds() -> None:
    x, pool = torch.ones(3, device=CUDA), torch.cuda.graph_pool_handle()
    kept: list[Tensor] = []
    first = captured(lambda: kept.append(x + 1.0), pool)
    second = captured(lambda: kept.append(x + 2.0), pool)
    first.replay()
    second.replay()
    assert [one.tolist() for one in kept] == [[2.0] * 3, [3.0] * 3], "both are held"
    dropped = kept[0].view(3).detach()
    kept.clear()
    third = captured(lambda: kept.append(x + 3.0), pool)
    assert dropped.tolist() == [2.0] * 3, "a view holds the memory too"
    first.replay()
    third.replay()
    assert kept[0].tolist() == [4.0] * 3
    first_again = first
    first_again.replay()
    assert dropped.tolist() == [2.0] * 3
    second.replay()  # its result was dropped before the third capture: they may share memory
    assert kept[0].isnan().all()


def test_memory_of_the_tensors_alive_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.zeros(1000, device=CUDA)
    y = x.view(10, 100)[2:]
    assert torch.cuda.memory_allocated() - before == 4000
    del x
    assert torch.cuda.memory_allocated() - before == 4000
    del y
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4000


def test_the_backward_pass_of_packed_attention_is_emulated() -> None:
    from torch.nn.attention.varlen import varlen_attn

    generator = torch.Generator().manual_seed(0)
    shape = (9, 4, 8)
    q, k, v = (torch.randn(*shape, generator=generator).bfloat16().requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    there = [x.detach().to(CUDA).requires_grad_() for x in (q, k, v)]
    with counting() as seen:
        found = varlen_attn(*there, offsets.to(CUDA), offsets.to(CUDA), 4, 4, window_size=(-1, 0))
    assert isinstance(found, Tensor)
    assert seen.kernels.total() == 1
    expected = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[a:b].float().transpose(0, 1) for x in (q, k, v)), is_causal=True
            ).transpose(0, 1)
            for a, b in [(0, 4), (4, 5), (5, 9)]
        ]
    )
    torch.testing.assert_close(found.float().cpu(), expected, atol=2e-2, rtol=2e-2)
    expected.square().sum().backward()
    found.float().square().sum().backward()
    for one, two in zip((q, k, v), there, strict=True):
        torch.testing.assert_close(two.grad.cpu(), one.grad, atol=5e-2, rtol=5e-2)  # type: ignore[union-attr]


def test_our_operators_are_counted_by_their_table() -> None:
    from models import ops
    from models.ops.triton import LAUNCHES

    x, weight = torch.ones(2, 8, device=CUDA), torch.ones(8, device=CUDA)
    with counting() as seen, torch.inference_mode():
        ops.rms_norm(x, weight, 1e-6)
    assert seen.kernels.total() == LAUNCHES["rms_norm"]
    assert DEVICE.seen.kernels.total() >= 1
