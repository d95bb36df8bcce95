"""The first things to run on a GPU machine: `pytest -m gpu`. CUDA against the CPU, which the other tests hold to the
oracles, in float32 and in what production runs, bfloat16; skipped where there is no CUDA device, real or pretended."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward.graphs import CudaGraphCapture
from actors.engine.native.forward.kv_memory import AllocatedMemory
from config.strategy import Strategy
from drafter.protocol import Replay
from models.checkpoint import hf_state_dict, load_hf_state_dict
from models.noise import gumbel
from models.packed import PackedContext
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import (
    FAMILIES,
    Counted,
    assert_same,
    engine,
    logits_of,
    make_requests,
    options_of,
    run,
    tiny_model,
)
from tests.engine.test_speculation import Oracle
from tests.engine.test_trees import RandomTrees

DEVICE = "cuda"
# float32 is without TF32, torch's default for matrix products. The models are sharp: logits up to 9, weights of 0.4.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1.0}  # of logits and log-probs, the worst
MEAN = {torch.float32: 1e-3, torch.bfloat16: 0.06}
GRADIENT = {torch.float32: 1e-3, torch.bfloat16: 0.2}  # relative
TIE = {torch.float32: 1e-3, torch.bfloat16: 0.25}  # of the best two draws, of the same kernels in another batch
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def reference_of(directory: Path, family: str, dtype: torch.dtype) -> Transformer:
    """On the CPU: weights that are numbers of `dtype`, computed with in float32."""
    model = tiny_model(directory, family, invariant=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def on_device(model: Transformer, dtype: torch.dtype) -> Transformer:
    copy = Transformer(model.config, dtype=dtype, device=DEVICE, batch_invariant=False)
    load_hf_state_dict(copy, hf_state_dict(model))
    return copy


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference = reference_of(tmp_path, family, dtype)
    model, tolerance, gradient = on_device(reference, dtype), TOLERANCE[dtype], GRADIENT[dtype]
    lengths, vocab = [17, 1, 40], reference.config.vocab_size
    tokens = torch.randint(vocab, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    expected = reference.logits(reference(tokens, PackedContext.from_lengths(lengths)))
    found = model.logits(model(tokens.to(DEVICE), PackedContext.from_lengths(lengths, DEVICE)))
    torch.testing.assert_close(found.float().cpu(), expected, atol=tolerance, rtol=tolerance)
    assert (found.float().cpu() - expected).abs().mean() < MEAN[dtype]
    expected.logsumexp(-1).sum().backward()
    found.logsumexp(-1).sum().backward()
    for (name, one), two in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None, name
        assert two.grad is not None, name
        assert (two.grad.float().cpu() - one.grad).norm() <= gradient * one.grad.norm(), name


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_draws_from_the_models_distribution(
    family: str, temperature: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Log-probs equal the CPU's, and each token is the argmax of the CPU's logits plus the request's noise, but for
    near ties; more requests than run together, several samples per prompt, prompts in chunks."""
    reference, tolerance = reference_of(tmp_path, family, dtype), TOLERANCE[dtype]
    requests = make_requests(24, prompts=6, temperature=temperature)
    finished = run(engine(on_device(reference, dtype), prefill_chunk_tokens=16), requests)
    assert finished.keys() == {request.request_id for request in requests}
    far, lost = [], []
    for request in requests:
        rollout, prompt = finished[request.request_id], request.prompt_tokens.tolist()
        drawn = torch.from_numpy(rollout.tokens).long()
        logits = logits_of(reference, prompt + drawn.tolist())[len(prompt) - 1 : -1]
        at_1 = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(rollout.logprobs_t1), at_1, atol=tolerance, rtol=0)
        far.append((torch.from_numpy(rollout.logprobs_t1) - at_1).abs())
        noise = gumbel(torch.full((len(drawn),), request.noise_key), torch.arange(len(drawn)), logits.shape[1])
        scores = logits + (noise if temperature else 0.0)
        behind = scores.max(-1).values - scores.gather(1, drawn[:, None])[:, 0]
        assert behind.max() < tolerance
        lost.append(behind)
    assert torch.cat(far).mean() < MEAN[dtype]
    assert torch.cat(lost).mean() < MEAN[dtype] / 10


class Counting(CudaGraphCapture):
    """Graphs of CUDA, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = self.replays = 0

    def record(self, compute: Callable[[], None]) -> Replay:
        replay = super().record(compute)
        self.captures += 1

        def counted() -> None:
            self.replays += 1
            replay()

        return counted


def assert_tokens_of(
    model: Transformer, requests: list[Any], expected: dict[int, Any], finished: dict[int, Any], tie: float
) -> None:
    """The same tokens, up to the first place where the reference's best two draws are as near as `tie`."""
    assert finished.keys() == expected.keys()
    for request in requests:
        ours, theirs = (x[request.request_id].tokens.tolist() for x in (finished, expected))
        if ours == theirs:
            continue
        at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        logits = logits_of(model, request.prompt_tokens.tolist() + theirs[:at])[-1]
        noise = gumbel(torch.tensor([request.noise_key]), torch.tensor([at]), len(logits))[0]
        best = (logits + (noise if request.sampling.temperature else 0.0)).topk(2).values
        assert best[0] - best[1] < tie, (request.request_id, at)


@DTYPES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strategy", ["plain", "test:5", "test:4x3/12"])
def test_graphs_change_no_token(
    family: str, temperature: float, strategy: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Captured and replayed steps against eager ones: plain decoding, chains and trees; before and after a sleep, and
    with new weights in place. Nothing is captured while requests run."""
    reference, tie = reference_of(tmp_path, family, dtype), TIE[dtype]
    model = on_device(reference, dtype)
    requests = make_requests(20, prompts=6, temperature=temperature)
    expected = run(engine(model, cuda_graphs=False), requests)
    drafters: dict[str, Any] = {
        "test:5": {"test": Oracle(expected, spoil=True)},
        "test:4x3/12": {"test": RandomTrees(expected, 0.7)},
    }
    graph_capture = Counting()
    core = NativeEngine(
        model,
        options_of(prefill_chunk_tokens=16),
        drafters=drafters.get(strategy, {}),
        policy=None if strategy == "plain" else FixedPolicy(Strategy.parse(strategy)),
        graph_capture=graph_capture,
    )
    captured = graph_capture.captures
    assert captured > 0
    assert_tokens_of(reference, requests, expected, run(core, requests), tie)
    assert graph_capture.replays > 0
    core.sleep()
    core.wake()
    assert_tokens_of(reference, requests, expected, run(core, requests), tie)
    assert graph_capture.captures == captured, "the cache, small or of virtual memory, lies where it lay"
    with torch.no_grad():
        for changed in (model, reference):
            changed.norm.weight.mul_(0.5)
    anew = run(engine(model, cuda_graphs=False), requests)
    assert_tokens_of(reference, requests, anew, run(core, requests), tie)
    assert temperature == 0 or any(anew[i].tokens.tolist() != expected[i].tokens.tolist() for i in anew)
    assert graph_capture.captures == captured, "weights are read in place"


@pytest.mark.skipif(
    torch.cuda.is_available()
    and torch.cuda.get_device_name() == "pretended"
    and os.environ.get("PACELINE_PRETENDED_KERNELS") != "triton",
    reason="the oracles depend on the batch; tests/pretended/test_kernels.py runs the kernels",
)
@DTYPES
def test_batch_invariant_log_probs_are_bitwise_those_of_a_request_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    """In a batch, in graphs, with other chunks of the prompt and with drafted chains. Trees keep the tokens: a node
    sees its keys at other places of a tile, so its sums are those of a plain continuation to rounding only."""
    reference = reference_of(tmp_path, "qwen3", dtype)
    model = Transformer(reference.config, dtype=dtype, device=DEVICE, batch_invariant=True)
    load_hf_state_dict(model, hf_state_dict(reference))
    requests = make_requests(4, prompts=3, max_new_tokens=7)
    alone = run(engine(model, cuda_graphs=False, max_running=1, prefill_chunk_tokens=16), requests)
    assert_same(run(engine(model, max_running=4), requests), alone)
    assert_same(run(engine(model, max_running=4, cuda_graphs=False, prefill_chunk_tokens=32), requests), alone)
    assert_same(Counted(model, Oracle(alone, spoil=True), "test:3", max_running=4).run(requests), alone)
    trees = Counted(model, RandomTrees(alone, 0.7), "test:2x2/4", max_running=4).run(requests)
    assert_tokens_of(reference, requests, alone, trees, TIE[dtype])


def test_a_cache_that_moved_is_captured_again_when_it_wakes(tmp_path: Path) -> None:
    """Where the driver cannot keep addresses, and the cache is too large to stay."""
    reference = reference_of(tmp_path, "qwen3", torch.float32)
    model = on_device(reference, torch.float32)
    requests = make_requests(8, prompts=4)
    expected = run(engine(model, cuda_graphs=False), requests)
    graph_capture = Counting()
    core = NativeEngine(model, options_of(), graph_capture=graph_capture, make_memory=AllocatedMemory)
    captured = graph_capture.captures
    core.sleep()
    in_its_place = torch.empty(1 << 20, device=DEVICE)
    core.wake()
    del in_its_place
    assert graph_capture.captures == 2 * captured
    assert_tokens_of(reference, requests, expected, run(core, requests), TIE[torch.float32])
    assert graph_capture.captures == 2 * captured


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_name() == "pretended", reason="no real memory")
def test_graphs_of_one_pool_take_less_memory(tmp_path: Path) -> None:
    """The bucketed plan against a graph with a pool and outputs of its own for each strategy and batch size."""
    from benchmarks.tools.qwen import qwen
    from tests.gpu.captured_memory import memory, random_model

    model = random_model(qwen("0.5b", max_position_embeddings=1024, num_layers=2), DEVICE, torch.bfloat16)
    found = {row["plan"]: row["bytes"] for row in memory(model, 256)}
    assert 0 < found["bucketed"] < found["naive"] / 4
    assert found["naive"] <= found["naive, own pools"]
