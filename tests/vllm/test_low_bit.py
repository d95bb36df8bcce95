"""Targets in few bits on stock vLLM: its log-probs are ours, new weights come in the same format, and nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.engine.core import build_core
from actors.engine.wire import Start
from config.formats import FORMATS
from config.model import ModelOptions
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from models.checkpoint import WeightsMismatchError, hf_state_dict, load_model
from models.compressed_tensors import write_quantised
from models.config import UnsupportedModelError, read_config
from models.directory import write_checkpoint
from models.low_bit import quantised
from models.packed import PackedContext
from models.transformer import Transformer
from models.weights import pack
from tests.engine.support import VOCAB, make_requests
from tests.vllm.support import VLLM, Drawn, RawEngine, tiny_checkpoint

pytestmark = VLLM

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 3,
    "initializer_range": 0.05,
}  # vLLM's AMX kernel takes it
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 24).tolist() for i in range(12)]


def start(directory: Path, dtype: str, **arguments: Any) -> RawEngine:
    from actors.engine.vllm.low_bit import mend_int8

    mend_int8()
    extension = "actors.engine.vllm.worker.PacelineWorker"
    return RawEngine(directory, dtype=dtype, worker_extension_cls=extension, **arguments)


def drawn(engine: RawEngine, temperature: float) -> dict[str, Drawn]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, 40, temperature=temperature, seed=i)
    return engine.run()


@torch.no_grad()
def gaps(model: Transformer, found: Mapping[str, Drawn]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """|vLLM's log-prob - the model's| of every token, at temperature 1."""
    apart: list[float] = []
    for i, prompt in enumerate(PROMPTS):
        tokens, logprobs = found[str(i)].tokens, found[str(i)].logprobs
        rows = model(torch.tensor(prompt + tokens), PackedContext.from_lengths([len(prompt) + len(tokens)]))
        ours = torch.log_softmax(model.logits(rows).float(), -1)[len(prompt) - 1 : -1]
        apart += (ours[torch.arange(len(tokens)), torch.tensor(tokens)] - torch.tensor(logprobs)).abs().tolist()
    return np.array(apart)


@pytest.mark.parametrize("form", ["w8a8", "fp8"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_a_checkpoint_of_ours_gives_our_log_probs(tmp_path: Path, family: str, form: str) -> None:
    """Activations that fall on other sides of a half are what is left of the gap."""
    full, _ = tiny_checkpoint(tmp_path, family, **SHAPE)
    source = read_config(full)
    write_quantised(source, hf_state_dict(load_model(full)).items(), FORMATS[form], tmp_path / "low")
    engine = start(tmp_path / "low", "float32")
    found = drawn(engine, 1.0)
    engine.close()
    aligned, unaligned = gaps(load_model(full, low_bit=FORMATS[form]), found), gaps(load_model(full), found)
    assert aligned.mean() < 1e-3
    assert aligned.mean() < 0.1 * unaligned.mean()


def same(one: Mapping[str, Drawn], other: Mapping[str, Drawn]) -> bool:
    return all(
        one[i].tokens == other[i].tokens and np.allclose(one[i].logprobs, other[i].logprobs, rtol=0, atol=1e-5)
        for i in one
    )


@dataclass
class Case:
    engine: RawEngine
    directory: Path
    dtype: torch.dtype
    states: dict[str, dict[str, Tensor]]  # of a and b, full precision
    fresh: dict[str, dict[str, Drawn]]  # what engines drew that were started with a and with b

    def load(self, named: Mapping[str, Tensor]) -> None:
        from actors.engine.vllm.weights import WeightsLoader

        WeightsLoader(self.engine.core, self.directory).load_target(*pack(dict(named), 1))

    def low_bit(self, which: str) -> dict[str, Tensor]:
        return dict(quantised((name, tensor.to(self.dtype)) for name, tensor in self.states[which].items()))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    from actors.engine.vllm.low_bit import low_bit_target

    folder, states, fresh = tmp_path_factory.mktemp(request.param), {}, {}
    for seed, which in enumerate("ab"):
        full, model = tiny_checkpoint(folder / which, seed=seed, **SHAPE)
        states[which] = hf_state_dict(model)
        target = low_bit_target(ModelOptions(path=str(full), dtype=request.param), "w8a8", folder / which / "low")
        engine = start(Path(target.path), request.param)
        fresh[which] = drawn(engine, 0.0)
        engine.close()
    assert not same(fresh["a"], fresh["b"])
    engine = start(folder / "a" / "low", request.param)
    yield Case(engine, folder / "a" / "low", getattr(torch, request.param), states, fresh)
    engine.close()


def test_new_weights_come_in_few_bits_as_often_as_they_like(case: Case) -> None:
    """A kernel that kept a pointer to the scales it was packed with would read freed memory."""
    assert same(drawn(case.engine, 0.0), case.fresh["a"])
    for which in "babab":
        case.load(case.low_bit(which))
        scattered = [torch.full((1 << 16,), 7.0) for _ in range(64)]  # where scales have been freed
        assert same(drawn(case.engine, 0.0), case.fresh[which])
        del scattered
    case.load(case.low_bit("a"))


def test_weights_of_another_precision_are_refused_and_change_nothing(case: Case) -> None:
    full = {name: tensor.to(case.dtype) for name, tensor in case.states["b"].items()}
    with pytest.raises(WeightsMismatchError, match=r"q_proj.* came as torch\.b?float.*holds it as torch\.int8.*native"):
        case.load(full)
    wide = {name: tensor.to(torch.int16).to(torch.uint8) for name, tensor in case.low_bit("b").items()}
    with pytest.raises(WeightsMismatchError, match=r"came as torch\.uint8"):
        case.load(wide)
    assert same(drawn(case.engine, 0.0), case.fresh["a"])


START = Start(
    model=ModelOptions(path=""),
    options=EngineOptions(backend="vllm", max_running=8, kv_tokens=4096, vllm_arguments={"enforce_eager": True}),
    seed=1,
    weights_version=0,
    niceness=0,
    speculation=SpeculationOptions(mode="off"),
    quantization="w8a8",
)


def test_what_makes_no_sense_beside_few_bits_is_refused_with_the_remedy(tmp_path: Path) -> None:
    directory, model = tiny_checkpoint(tmp_path, **SHAPE)
    asked = replace(START, model=ModelOptions(path=str(directory)))
    copy = SpeculationOptions(mode="fixed", strategies=("self:3",))
    with pytest.raises(ValueError, match=r"self beside rollout\.quantization=w8a8.*no cheaper.*ngram"):
        build_core(replace(asked, speculation=copy))
    twice = asked.options.model_copy(update={"vllm_arguments": {"quantization": "fp8"}})
    with pytest.raises(ValueError, match="leave one of them out"):
        build_core(replace(asked, options=twice))
    with pytest.raises(ValueError, match=r"w4a8: vLLM takes fp8 or w8a8 from us.*backend=native"):
        build_core(replace(asked, quantization="w4a8"))
    gemma = read_config(directory) | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    write_checkpoint(gemma, hf_state_dict(model).items(), tmp_path / "gemma")
    with pytest.raises(UnsupportedModelError):
        build_core(replace(asked, model=ModelOptions(path=str(tmp_path / "gemma"))))


@pytest.mark.timeout(300)
def test_an_engine_in_few_bits_drafts_and_takes_new_weights(tmp_path: Path) -> None:
    """Through the commands of a supervisor; an EAGLE drafter stays in full precision."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from contracts.engine import Submit, UpdateWeights
    from contracts.rollout import DrafterFailed, EngineWindow, Finished, WeightsLoaded

    directory, _ = tiny_checkpoint(tmp_path / "0", "llama", **SHAPE)
    _, other = tiny_checkpoint(tmp_path / "1", "llama", seed=1, **SHAPE)
    speculation = SpeculationOptions(mode="fixed", strategies=("eagle:3",), eagle=EagleOptions(path="random"))
    core = build_core(replace(START, model=ModelOptions(path=str(directory)), speculation=speculation))
    events: list[Any] = []
    answers: list[Any] = []
    requests = make_requests(16)
    for version in range(2):
        core.apply(Submit(tuple(requests[8 * version : 8 * version + 8])), None)
        while core.has_work:
            events += core.step()
        manifest, memory = pack(dict(quantised(hf_state_dict(other).items())), 1)
        answers.append(core.apply(UpdateWeights(manifest), memory))
    core.close()
    cleanup_dist_env_and_memory()
    assert sum(isinstance(event, Finished) for event in events) == 16
    assert not any(isinstance(event, DrafterFailed) for event in events)
    assert all(isinstance(answer, WeightsLoaded) and answer.quantization == "w8a8" for answer in answers)
    assert any(use.drafted for event in events if isinstance(event, EngineWindow) for use in event.strategies)
