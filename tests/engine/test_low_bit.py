"""An engine that stores its weights in few bits: its tokens depend on nothing but the request, its log-probs are those
of the masters that mirror it, and it computes with what it is handed, in few bits or not."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engine.batch.telemetry import EngineStepRecord
from actors.engine.native import core
from actors.engine.native.engine import NativeEngine
from actors.engine.native.forward.fused import FusedForward
from actors.engine.process import EngineStartError, spawn_engine
from actors.engine.wire import Start
from actors.handoff import receive, send
from actors.training.network import LogProbModel, computing_in
from config.formats import FORMATS, Quantization, low_bit_format
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from config.strategy import Strategy
from contracts.handoff import HandOffError, Way
from contracts.rollout import Recorded, Request, Rollout, WeightsLoaded
from drafter.build import build_drafters
from drafter.training.cut import HEAD_TENSORS, cut_head
from models.checkpoint import WeightsMismatchError, hf_state_dict, init_model, load_model, save_model
from models.checksum import BLOCK_BYTES
from models.low_bit import quantised
from models.packed import PackedContext
from models.pieces import Scatter
from models.transformer import Transformer
from models.weights import WeightsCorruptError, pack, unpack
from policies.speculation.policy import FixedPolicy
from tests.engine.support import assert_same, make_requests, options_of, run, write_config
from tests.engine.test_graphs import FakeGraphCapture, assert_same_tokens
from tests.handoff.tools import Meeting

WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "initializer_range": 0.15}
DTYPES = (torch.float32, torch.bfloat16)
NAMES: tuple[Quantization, ...] = ("w8a8", "w4a8", "w4a16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The masters after some updates."""
    return checkpoint(tmp_path_factory.mktemp("later"), seed=2)


def checkpoint(directory: Path, seed: int, family: str = "qwen3") -> Path:
    save_model(init_model(write_config(directory / "config", family, **WIDE), seed), directory / "model")
    return directory / "model"


def target(folder: Path, name: Quantization, dtype: torch.dtype = torch.float32) -> Transformer:
    return load_model(folder, dtype=dtype, low_bit=low_bit_format(name, "cpu"))


def engine_of(
    model: Transformer,
    strategy: str = "",
    verification: Any = "coupled",
    steps: list[EngineStepRecord] | None = None,
    **changes: Any,
) -> NativeEngine:
    options = options_of(**changes)
    if not strategy:
        return NativeEngine(model, options)
    speculation = SpeculationOptions(strategies=(strategy,), eagle=EagleOptions(path="random"))
    drafters = build_drafters(speculation, model, options)
    policy = FixedPolicy(Strategy.parse(strategy))
    return NativeEngine(model, options, drafters=drafters, policy=policy, verification=verification, steps=steps)


def published(masters: Transformer, name: Quantization, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What the learner hands over: in the engine's dtype, then in few bits."""
    named = ((key, tensor.to(dtype)) for key, tensor in hf_state_dict(masters).items())
    return dict(named if name == "none" else quantised(named, FORMATS[name]))


def learner_logprobs(
    masters: Transformer, requests: Sequence[Request], found: dict[int, Rollout], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Log-probs by the learner's packed pass over all sequences at once, and the engine's."""
    texts = [np.concatenate([r.prompt_tokens, found[r.request_id].tokens]) for r in requests]
    rows, targets, theirs, start = [], [], [], 0
    for request, text in zip(requests, texts, strict=True):
        first = start + len(request.prompt_tokens) - 1
        rows.append(torch.arange(first, start + len(text) - 1))
        targets.append(torch.from_numpy(found[request.request_id].tokens).long())
        logprobs = found[request.request_id].logprobs_t1
        assert logprobs is not None
        theirs.append(torch.from_numpy(logprobs))
        start += len(text)
    module = LogProbModel(masters, torch.device("cpu"))
    context = PackedContext.from_lengths([len(text) for text in texts])
    tokens = torch.from_numpy(np.concatenate(texts)).long()
    with computing_in(module, None if dtype is torch.float32 else dtype):
        logprobs, _, _ = module(tokens, context, torch.cat(rows), torch.cat(targets), 1.0)
        logprobs.sum().backward()
    return logprobs.detach(), torch.cat(theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_are_the_same_for_any_batch_chunk_and_cached_prefix(
    folder: Path, name: Quantization, dtype: torch.dtype
) -> None:
    model = target(folder, name, dtype)
    requests = make_requests(64, prompts=9, seed=3, max_new_tokens=10, stop_token_ids=(2,), top_p=0.95)
    expected = run(engine_of(model, max_running=64), requests)
    assert sum(len(rollout.tokens) for rollout in expected.values()) > 300
    alone = engine_of(model, max_running=1, prefill_chunk_tokens=16)
    for request in requests[::7]:  # later ones find their prompt in the cache
        assert_same(run(alone, [request]), {request.request_id: expected[request.request_id]})
    for options in ({"max_running": 3}, {"max_running": 17, "prefill_chunk_tokens": 16}, {"block_tokens": 16}):
        assert_same(run(engine_of(model, **options), requests), expected)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads if threads < 3 else 1)
    try:
        assert_same(run(engine_of(model), requests), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["ngram:4", "suffix:6", "eagle:3", "eagle:3x2/6"])
def test_speculation_changes_nothing(folder: Path, name: Quantization, dtype: torch.dtype, strategy: str) -> None:
    model = target(folder, name, dtype)
    requests = make_requests(14, prompts=4, seed=5, max_new_tokens=24, temperature=0.4)
    expected = run(engine_of(model), requests)
    records: list[EngineStepRecord] = []
    core = engine_of(model, strategy, prefill_chunk_tokens=32, steps=records)
    assert_same(run(core, requests), expected)
    assert sum(record.drafted for record in records) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w2a8"])
def test_the_fused_stack_and_the_modules_give_the_same_tokens(
    folder: Path, later: Path, name: Quantization, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights it started from, new ones in place, and through a change of precision and back."""
    if not FusedForward.supports(target(folder, name, dtype)):
        pytest.skip("paceline_native is not installed: pip install -e .")
    calls: list[int] = []
    forward = FusedForward.__call__

    def counted(self: FusedForward, tokens: Tensor, context: Any) -> Tensor:
        calls.append(len(tokens))
        return forward(self, tokens, context)

    monkeypatch.setattr(FusedForward, "__call__", counted)
    requests, masters = make_requests(12, prompts=4, seed=6, max_new_tokens=12), load_model(later)
    fused = engine_of(target(folder, name, dtype), prefill_chunk_tokens=16)
    with monkeypatch.context() as patched:
        patched.setattr(FusedForward, "supports", staticmethod(lambda model: False))
        modules = engine_of(target(folder, name, dtype), prefill_chunk_tokens=16)
    assert_same(run(fused, requests), run(modules, requests))
    for version, form in enumerate((name, "none", name), start=1):
        manifest, buffer = pack(published(masters, form, dtype), version)
        with monkeypatch.context() as patched:
            patched.setattr(FusedForward, "supports", staticmethod(lambda model: False))
            modules.update_weights(manifest, buffer)
            before = len(calls)
            expected = run(modules, requests)
            assert len(calls) == before
        fused.update_weights(manifest, buffer)
        assert_same(run(fused, requests), expected)
        assert len(calls) > before


@pytest.mark.parametrize("name", NAMES)
def test_rejection_verification_runs(folder: Path, name: Quantization) -> None:
    requests = make_requests(8, prompts=2, seed=5, max_new_tokens=16, temperature=0.5)
    core = engine_of(target(folder, name), "eagle:3", verification="rejection")
    found = run(core, requests)
    logprobs, theirs = learner_logprobs(mirrored(folder, name, torch.float32), requests, found, torch.float32)
    assert (logprobs - theirs).abs().max() < 4e-6


def mirrored(folder: Path, name: Quantization, dtype: torch.dtype) -> Transformer:
    masters = load_model(folder)
    masters.mirror(low_bit_format(name, "cpu"), dtype)
    return masters


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_engines_logprobs_are_those_of_the_masters_that_mirror_it(
    folder: Path, later: Path, name: Quantization, dtype: torch.dtype
) -> None:
    """With the weights that it started from, and after an update with what the learner publishes."""
    requests = make_requests(24, prompts=6, seed=9, max_new_tokens=20)
    core = engine_of(target(folder, name, dtype))
    for step, path in enumerate((folder, later)):
        masters = mirrored(path, name, dtype)
        if step:
            core.update_weights(*pack(published(masters, name, dtype), 1))
        found = run(core, requests)
        logprobs, theirs = learner_logprobs(masters, requests, found, dtype)
        assert (logprobs - theirs).abs().mean() < 1e-6
        assert (logprobs - theirs).abs().max() < 4e-6
        masters.mirror(None, dtype)
        unaligned, _ = learner_logprobs(masters, requests, found, dtype)
        assert (unaligned - theirs).abs().mean() > 1e-4, "few bits must show where nothing mirrors them"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_computes_with_what_it_is_handed(
    folder: Path, later: Path, name: Quantization, dtype: torch.dtype
) -> None:
    """Few bits, full precision for a final evaluation, and few bits again, with requests on the way."""
    requests, masters = make_requests(10, prompts=3, seed=4, max_new_tokens=12), load_model(later)
    core = engine_of(target(folder, name, dtype), "eagle:2")
    before = run(core, requests)
    want = {form: run(engine_of(target(later, form, dtype)), requests) for form in (name, "none")}
    assert any(want[name][i].logprobs.tobytes() != want["none"][i].logprobs.tobytes() for i in want["none"])
    for version, form in enumerate((name, "none", "none", name, "none", name), start=1):
        manifest, buffer = pack(published(masters, form, dtype), version)
        loaded = core.update_weights(manifest, buffer)
        assert (loaded.version, loaded.checksum) == (version, manifest.checksum)
        assert loaded.quantization == form
        assert_same(run(core, requests), want[form])
    core.update_weights(*pack(published(load_model(folder), name, dtype), 9))
    assert_same(run(core, requests), before)


def test_running_requests_go_on_when_the_precision_changes(folder: Path) -> None:
    masters = load_model(folder)
    core = engine_of(target(folder, "w8a8"))
    requests = make_requests(6, prompts=2, seed=6, max_new_tokens=20)
    core.submit(requests)
    events = [event for _ in range(5) for event in core.step()]
    core.update_weights(*pack(published(masters, "none"), 1))
    assert not any(isinstance(event, WeightsLoaded) for event in events)
    assert run(core, []).keys() == {request.request_id for request in requests}


def test_weights_that_do_not_fit_change_nothing(folder: Path, later: Path) -> None:
    masters, requests = load_model(later), make_requests(4, seed=8, max_new_tokens=8)
    core, full = engine_of(target(folder, "w8a8")), engine_of(load_model(folder))
    want, exact = run(core, requests), run(full, requests)
    good = published(masters, "w8a8")
    scale = "model.layers.1.mlp.up_proj.weight_scale"
    for form, faulty in (
        ("w8a8", published(masters, "w4a8")),
        ("w8a8", good | {scale: good[scale][1:]}),
        ("w8a8", good | {scale.removesuffix("_scale"): good[scale.removesuffix("_scale")].view(torch.uint8)}),
        ("w8a8", {key: tensor for key, tensor in good.items() if key != scale}),
        ("w8a8", published(masters, "none") | {"model.norm.weight": torch.ones(3)}),
        ("none", good),
    ):
        with pytest.raises(WeightsMismatchError):
            (core if form == "w8a8" else full).update_weights(*pack(faulty, 5))
    for faulty in (good, published(masters, "none")):
        manifest, buffer = pack(faulty, 5)
        buffer[-100] ^= 4
        with pytest.raises(WeightsCorruptError):
            core.update_weights(manifest, buffer)
    assert_same(run(core, requests), want)
    assert_same(run(full, requests), exact)


@pytest.mark.parametrize("way", ["ipc", "broadcast"])
@pytest.mark.parametrize("name", NAMES)
def test_low_bit_weights_in_pieces_reach_the_engine(
    folder: Path, later: Path, way: Way, name: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", BLOCK_BYTES)
    requests, masters, meeting = make_requests(6, prompts=2, seed=7, max_new_tokens=12), load_model(later), Meeting()
    core = engine_of(target(folder, name))
    run(core, requests)
    for version, form in enumerate((name, "none", name), start=1):
        answer = offered(core, meeting, published(masters, form), way, version)
        assert (answer.version, answer.way, answer.quantization, answer.failure) == (version, way, form, "")
        assert_same(run(core, requests), run(engine_of(target(later, form)), requests))


def test_pieces_that_break_off_leave_no_mixture(folder: Path, later: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "PIECE_BYTES", BLOCK_BYTES)
    for module in (send, receive):
        monkeypatch.setattr(module, "PATIENCE_S", 2.0)
    requests, masters, meeting = make_requests(6, prompts=2, seed=7, max_new_tokens=12), load_model(later), Meeting()
    core = engine_of(target(folder, "w8a8"))
    want = run(core, requests)
    answer = offered(core, meeting, published(masters, "w4a8"), "ipc", 1)  # of another format: refused before it begins
    assert "the engine's tensors are others" in answer.failure
    assert_same(run(core, requests), want)
    take = Scatter.take

    def breaks(self: Scatter, piece: Tensor) -> None:
        if self._at:
            raise HandOffError("the cable")
        take(self, piece)

    with monkeypatch.context() as patched:
        patched.setattr(Scatter, "take", breaks)
        answer = offered(core, meeting, published(masters, "none"), "ipc", 2)
    assert (answer.version, answer.quantization) == (0, "w8a8")
    core.submit(requests)
    assert not core.has_work
    core.abort([request.request_id for request in requests])
    core.update_weights(*pack(published(masters, "none"), 2))
    core.step()
    assert_same(run(core, requests), run(engine_of(load_model(later)), requests))


def offered(core: NativeEngine, meeting: Meeting, named: dict[str, Tensor], way: Way, version: int) -> WeightsLoaded:
    manifest, _ = pack(named, version)
    terms = meeting.terms(1, way, version)
    layout, given = (manifest.tensors, manifest.total_bytes), iter(named.items())
    sending = threading.Thread(target=meeting.senders[0].send, args=(terms, layout, given))
    sending.start()
    answer = core.receive_weights(meeting.offer(terms, 0, manifest))
    sending.join(60)
    assert not sending.is_alive()
    return answer


def test_graphs_are_captured_again_only_when_the_precision_changes(folder: Path, later: Path) -> None:
    """Weights of the same precision lie where they lay; those of another one do not."""
    capture = FakeGraphCapture()
    core = NativeEngine(target(folder, "w8a8"), options_of(), graph_capture=capture)
    requests, masters = make_requests(8, seed=2, max_new_tokens=10), load_model(later)
    records = [capture.records]
    for version, form in enumerate(("w8a8", "none", "none", "w8a8"), start=1):
        core.update_weights(*pack(published(masters, form), version))
        records.append(capture.records)
        expected = run(engine_of(target(later, form)), requests)
        assert_same_tokens(run(core, requests), expected, atol=1e-3 if form == "none" else 0.05)
    assert records == [records[0] * times for times in (1, 1, 2, 2, 3)]
    assert capture.replays > 0


def test_asleep_and_awake_it_computes_the_same(folder: Path) -> None:
    requests = make_requests(6, prompts=2, seed=2, max_new_tokens=10)
    core = engine_of(target(folder, "w4a8"))
    want = run(core, requests)
    core.sleep()
    core.update_weights(*pack(published(load_model(folder), "w4a8"), 1))
    core.wake()
    assert_same(run(core, requests), want)


def test_recorded_hidden_states_are_those_of_the_mirrored_masters(folder: Path) -> None:
    """With the outputs of layers before the final state: for drafters that are trained on them."""
    core = NativeEngine(target(folder, "w8a8"), options_of(), recording_bytes=1 << 24, recorded_layers=(0,))
    core.submit(make_requests(3, seed=3, max_new_tokens=9))
    records = []
    while core.has_work:
        records += [record for event in core.step() if isinstance(event, Recorded) for record in event.records]
    masters = mirrored(folder, "w8a8", torch.float32)
    assert records
    for record in records:
        tokens = torch.from_numpy(np.asarray(record.tokens)).long()
        with torch.no_grad():
            states = masters(tokens, PackedContext.from_lengths([len(tokens)]), (0,))
        found = torch.from_numpy(np.array(record.states).view(np.float32).reshape(record.rows, -1))
        assert torch.equal(found, states[: record.rows])


def test_a_drafters_trainer_cuts_the_targets_head_out_of_low_bit_weights(later: Path) -> None:
    masters = load_model(later)
    low, exact = (cut_head(*pack(published(masters, name), 3)) for name in ("w4a8", "none"))
    named: Iterable[tuple[str, Tensor]] = unpack(*low, verify=False)
    assert [name for name, _ in named] == [name for name in HEAD_TENSORS if name in hf_state_dict(masters)]
    assert low[1].tobytes() == exact[1].tobytes()


def test_a_child_starts_in_few_bits_and_says_why_it_cannot(folder: Path, tmp_path: Path) -> None:
    started = spawn_engine(ModelOptions(path=str(folder)), EngineOptions(threads=1), quantization="w8a8")
    started.close()
    narrow = tmp_path / "narrow"
    save_model(init_model(write_config(tmp_path / "config"), 0), narrow)
    with pytest.raises(EngineStartError, match=r"rollout\.quantization=w4a8 has groups of 128 or 64.*q_proj.*use w8a8"):
        spawn_engine(ModelOptions(path=str(narrow)), EngineOptions(threads=1), quantization="w4a8")
    for remedy in ("use w8a8, w4a8, w3a8, w2a8, w4a16 or none", "another rollout.engine.device"):
        start = Start(
            model=ModelOptions(path=str(folder)),
            options=EngineOptions(device="cpu"),
            speculation=SpeculationOptions(),
            quantization="fp8",
            seed=0,
            weights_version=0,
            niceness=0,
        )
        with pytest.raises(ValueError, match=f"rollout.quantization=fp8 is computed on cuda only.*{remedy}"):
            core.build(start)
