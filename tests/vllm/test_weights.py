"""New weights in a running vLLM: outputs are those of an engine that was started with them, or nothing has changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.checkpoint import WeightsMismatchError, hf_state_dict
from models.config import read_config
from models.directory import write_checkpoint
from models.manifest import WeightsManifest
from models.weights import Buffer, WeightsCorruptError, pack
from tests.engine.support import VOCAB
from tests.vllm.support import VLLM, Drawn, RawEngine, tiny_checkpoint

pytestmark = VLLM

BLOCK = 32
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 3 * BLOCK).tolist() for i in range(3)]
CASES = {"qwen3, tied, float32": ("qwen3", "float32"), "llama, untied, bfloat16": ("llama", "bfloat16")}


@dataclass
class Case:
    engine: RawEngine
    model: Path
    states: dict[str, dict[str, torch.Tensor]]  # of a and b, in the engine's dtype
    fresh: dict[str, dict[str, Drawn]]  # what engines drew that were started with a and with b

    def packed(self, which: str, version: int = 1) -> tuple[WeightsManifest, Buffer]:
        return pack(self.states[which], version)

    def drawn(self, name: str = "") -> dict[str, Drawn]:
        return greedy(self.engine, name)

    def load(self, which: str, **changes: Any) -> list[str]:
        from actors.engine.vllm.weights import WeightsLoader

        return WeightsLoader(self.engine.core, self.model, **changes).load_target(*self.packed(which))


def start(model: Path, dtype: str, **arguments: Any) -> RawEngine:
    extension = "actors.engine.vllm.worker.PacelineWorker"
    return RawEngine(model, dtype=dtype, block_size=BLOCK, worker_extension_cls=extension, **arguments)


def greedy(engine: RawEngine, name: str = "") -> dict[str, Drawn]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(f"{name}{i}", prompt, 40, temperature=0.0)
    return {request_id.removeprefix(name): drawn for request_id, drawn in engine.run().items()}


def same(one: dict[str, Drawn], other: dict[str, Drawn]) -> bool:
    return all(
        one[i].tokens == other[i].tokens and np.allclose(one[i].logprobs, other[i].logprobs, rtol=0, atol=1e-5)
        for i in one | other
    )


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, dtype = CASES[request.param]
    folder = tmp_path_factory.mktemp(family)
    directories = {}
    states = {}
    for seed, which in enumerate("ab"):
        directories[which], model = tiny_checkpoint(folder / which, family, seed=seed, num_hidden_layers=3)
        states[which] = {name: t.to(getattr(torch, dtype)) for name, t in hf_state_dict(model).items()}
    fresh = {}
    for which in "ab":
        engine = start(directories[which], dtype)
        fresh[which] = greedy(engine)
        engine.close()
    assert not same(fresh["a"], fresh["b"])
    engine = start(directories["a"], dtype)
    yield Case(engine, directories["a"], states, fresh)
    engine.close()


@pytest.mark.parametrize("through_file", [False, True], ids=["memory", "file"])
def test_outputs_are_those_of_an_engine_started_with_the_new_weights_and_again_with_the_old(
    case: Case, through_file: bool
) -> None:
    assert same(case.drawn(), case.fresh["a"])
    for which in "bab":
        case.load(which, through_file=through_file)
        assert same(case.drawn(), case.fresh[which])
    case.load("a")
    assert same(case.drawn(), case.fresh["a"])


def test_what_arrived_is_copied(case: Case) -> None:
    from actors.engine.vllm.weights import WeightsLoader

    manifest, memory = case.packed("b")
    WeightsLoader(case.engine.core, case.model).load_target(manifest, memory)
    memory.fill(0)
    assert same(case.drawn(), case.fresh["b"])
    case.load("a")


def test_without_forgetting_prefixes_outputs_are_wrong(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would not see if prompts were shorter than a block."""
    from actors.engine.vllm import weights

    case.load("a")
    case.drawn()
    with monkeypatch.context() as patched:
        patched.setattr(weights, "forget_prefixes", lambda scheduler: [])
        case.load("b")
        assert not same(case.drawn(), case.fresh["b"])
    case.load("b")
    assert same(case.drawn(), case.fresh["b"])
    case.load("a")


def broken(case: Case, how: str) -> tuple[WeightsManifest, Buffer]:
    state = dict(case.states["b"])
    norm = "model.layers.1.input_layernorm.weight"
    match how:
        case "flipped byte":
            manifest, memory = pack(state, 1)
            memory[len(memory) // 2] ^= 1
            return manifest, memory
        case "cut off":
            manifest, memory = pack(state, 1)
            return manifest, memory[:-64]
        case "missing":
            del state[norm]
        case "extra":
            state["model.layers.1.self_attn.sinks"] = state[norm]
        case "shape":
            state[norm] = state[norm][:-1]
    return pack(state, 1)


REFUSALS = {
    "flipped byte": (WeightsCorruptError, "checksum"),
    "cut off": (WeightsCorruptError, "the manifest says"),
    "missing": (WeightsMismatchError, "missing tensor model.layers.1.input_layernorm.weight"),
    "extra": (WeightsMismatchError, "unexpected tensor model.layers.1.self_attn.sinks"),
    "shape": (WeightsMismatchError, r"model.layers.1.input_layernorm.weight has shape \[63\]"),
}


@pytest.mark.parametrize("through_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("how", REFUSALS)
def test_weights_that_are_damaged_or_of_another_model_are_refused_and_nothing_changes(
    case: Case, how: str, through_file: bool
) -> None:
    from actors.engine.vllm.weights import WeightsLoader

    error, says = REFUSALS[how]
    loader = WeightsLoader(case.engine.core, case.model, through_file=through_file)
    with pytest.raises(error, match=says):
        loader.load_target(*broken(case, how))
    assert same(case.drawn(), case.fresh["a"])


@pytest.mark.parametrize("case", ["qwen3, tied, float32"], indirect=True)
def test_a_head_that_is_not_the_embedding_is_refused_where_it_is_tied(case: Case) -> None:
    from actors.engine.vllm.weights import WeightsLoader

    loader = WeightsLoader(case.engine.core, case.model)
    embedding = case.states["b"]["model.embed_tokens.weight"]
    with pytest.raises(WeightsMismatchError, match=r"lm_head\.weight is not the embedding"):
        loader.load_target(*pack(case.states["b"] | {"lm_head.weight": embedding + 1}, 1))
    assert same(case.drawn(), case.fresh["a"])
    loader.load_target(*pack(case.states["b"] | {"lm_head.weight": embedding}, 1))
    assert same(case.drawn(), case.fresh["b"])
    case.load("a")


def test_a_file_of_weights_is_gone_afterwards(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.engine.vllm import weights

    monkeypatch.setattr(weights, "_roomy", lambda size_bytes: tmp_path)
    case.load("b", through_file=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(WeightsCorruptError):
        weights.WeightsLoader(case.engine.core, case.model, through_file=True).load_target(
            *broken(case, "flipped byte")
        )
    assert not list(tmp_path.iterdir())
    case.load("a")


def test_running_requests_go_on_and_nobody_reuses_what_they_computed(case: Case) -> None:
    """What it adds later continues old K/V: others with its very tokens must not find it."""
    engine = case.engine
    engine.add("long", PROMPTS[0], 100, temperature=0.0)
    for _ in range(20):
        engine.step()
    before = list(engine.drawn["long"].tokens)
    assert case.load("b") == []
    drawn = engine.run()["long"]
    assert drawn.tokens[: len(before)] == before
    assert len(drawn.tokens) == 100
    assert drawn.tokens[len(before) : 40] != case.fresh["a"]["0"].tokens[len(before) :]  # the new weights said these
    text = PROMPTS[0] + drawn.tokens  # several blocks beyond the update
    for name, tokens in {"opening": PROMPTS[0], "again": text}.items():  # the first finds the others' way there
        engine.add(name, tokens, 1, temperature=0.0)
        again = engine.run()[name]
    case.load("b")  # forgets all
    engine.add("clean", text, 1, temperature=0.0)
    clean = engine.run()["clean"]
    assert again.tokens == clean.tokens
    assert abs(again.logprobs[0] - clean.logprobs[0]) < 1e-5
    case.load("a")


def test_requests_that_have_drawn_nothing_start_again_with_the_new_weights(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is half read when weights come is read again, and its siblings that wait do not find its blocks."""
    engine = case.engine
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 2 * BLOCK)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, 40, temperature=0.0)
    engine.step()
    assert not engine.drawn["0"].tokens
    assert case.load("b") == ["0"]
    assert same(engine.run(), case.fresh["b"])
    case.load("a")


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    """What vLLM would silently leave as it was."""
    from actors.engine.vllm.weights import _expected

    out, model = tiny_checkpoint(tmp_path, "llama")
    shapes, _, tied = _expected(out)
    assert not tied
    assert shapes == {name: t.shape for name, t in hf_state_dict(model).items()}


def test_a_tied_checkpoint_that_stores_its_head_expects_none(tmp_path: Path) -> None:
    from actors.engine.vllm.weights import _expected

    out, model = tiny_checkpoint(tmp_path, "qwen3")
    state = hf_state_dict(model)
    stored = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    write_checkpoint(read_config(out), stored.items(), out)
    shapes, _, tied = _expected(out)
    assert tied
    assert shapes.keys() == state.keys()
