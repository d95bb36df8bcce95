"""Speculators that vLLM computes (MTP, DFlash, P-EAGLE), at the depth that we choose in each step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engine.vllm.drafter_passes import NOT_AT_ALL
from drafter.foreign import MTP_LAYERS, is_beyond
from models.checkpoint import WeightsMismatchError, hf_state_dict
from models.config import read_config
from models.transformer import Transformer
from models.weights import pack
from tests.vllm.speculators import dflash, peagle, tensors_of, with_mtp, write
from tests.vllm.support import VLLM, RawEngine, tiny_checkpoint
from tests.vllm.test_model_drafters import Counting, Outcome

pytestmark = [*VLLM, pytest.mark.timeout(900)]

DEPTH, TOKENS, WORDS = 6, 32, 13  # few words: even random drafts are accepted at times
PROMPTS = [np.random.default_rng(i).integers(0, WORDS, 20).tolist() for i in range(8)]
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "head_dim": 32,
    "vocab_size": WORDS,
    "initializer_range": 0.15,
}
Depth = Callable[[int], int]


def of_kind(kind: str, folder: Path) -> tuple[Path, Path, Transformer]:
    """A target, its speculator, and the target as our network."""
    target, model = tiny_checkpoint(folder, "qwen2" if kind == "mtp" else "qwen3", **SHAPE)
    if kind == "mtp":
        markov(target)
        with_mtp(target, copied=4)
        return target, target, model
    return target, {"dflash": dflash, "peagle": peagle}[kind](target, folder / kind), model


def markov(target: Path) -> None:
    """Let layers add little to the embedding, so that MTP layers can know the next token from the last one."""
    named = tensors_of(target)
    small = {
        name: 0.02 * tensor for name, tensor in named.items() if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    write(target, read_config(target), named | small)


@pytest.fixture(scope="module", params=["mtp", "dflash", "peagle"])
def held(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Any, Outcome]]:
    """A kind, an engine that we hold, and what stock vLLM does at the kind's whole depth."""
    from actors.engine.vllm.model_drafters import foreign_drafter
    from actors.engine.vllm.worker import EXTENSION

    target, path, _ = of_kind(request.param, tmp_path_factory.mktemp(request.param))
    drafter = foreign_drafter(request.param, str(path), target)
    depth = drafter.block or DEPTH
    own = RawEngine(target, block_size=32, speculative_config=drafter.speculative_config(depth))
    stock = run(own, lambda step: depth)
    own.close()
    raw = RawEngine(
        target, block_size=32, worker_extension_cls=EXTENSION, speculative_config=drafter.speculative_config(DEPTH)
    )
    raw.core.collective_rpc("paceline_hold_drafter", args=(drafter.copies_target, drafter.block))
    yield request.param, raw, stock
    raw.close()


def run(raw: RawEngine, depth: Depth) -> Outcome:
    control = raw.scheduler.control = Counting(depth, lambda step, request: None)
    for i, prompt in enumerate(PROMPTS):
        raw.add(str(i), prompt, TOKENS, temperature=0.0)
    control.outcome.tokens = {name: one.tokens for name, one in raw.run().items()}
    return control.outcome


def test_at_its_whole_depth_it_accepts_what_stock_vllm_accepts(held: tuple[str, RawEngine, Outcome]) -> None:
    kind, raw, stock = held
    assert stock.accepted > 0, "nothing would be compared"
    assert run(raw, lambda step: DEPTH) == stock
    if kind == "mtp":
        assert stock.accepted > 0.5 * stock.offered  # its draft is nearly the target's own computation
    print(kind, stock.offered, stock.accepted)


def test_every_step_may_have_another_depth_and_changes_no_token(held: tuple[str, RawEngine, Outcome]) -> None:
    _, raw, stock = held
    offered = []
    for depth in (lambda step: 0, lambda step: 2, lambda step: (DEPTH, 0, 1, NOT_AT_ALL, 3)[step % 5]):
        found = run(raw, depth)
        assert found.tokens == stock.tokens
        offered.append(found.offered)
    assert offered[0] == 0
    assert offered[1] > 0
    assert offered[2] > 0


def test_the_target_changes_under_frozen_mtp_layers(tmp_path: Path) -> None:
    """A learner publishes no MTP layers. Theirs stay, and read the target's new embedding and head."""
    from actors.engine.vllm.model_drafters import foreign_drafter
    from actors.engine.vllm.weights import WeightsLoader
    from actors.engine.vllm.worker import EXTENSION

    target, path, model = of_kind("mtp", tmp_path)
    published = {name: tensor for name, tensor in tensors_of(target).items() if not is_beyond(name, 5)}
    drafter = foreign_drafter("mtp", str(path), target)
    raw = RawEngine(
        target, block_size=32, worker_extension_cls=EXTENSION, speculative_config=drafter.speculative_config(DEPTH)
    )
    raw.core.collective_rpc("paceline_hold_drafter", args=(drafter.copies_target,))
    loader = WeightsLoader(raw.core, target)
    before = run(raw, lambda step: DEPTH)
    loader.load_target(*pack(hf_state_dict(model), 1))  # of which no layer is small
    changed = run(raw, lambda step: DEPTH)
    assert changed.tokens != before.tokens
    assert changed.accepted / changed.offered < 0.5 * before.accepted / before.offered
    loader.load_target(*pack(published, 2))
    assert run(raw, lambda step: DEPTH) == before
    raw.close()


def test_half_a_checkpoint_starts_no_engine(tmp_path: Path) -> None:
    from actors.engine.vllm.model_drafters import foreign_drafter

    target, path, _ = of_kind("dflash", tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(WeightsMismatchError, match="has neither"):
        foreign_drafter("dflash", str(path), target)


def test_vllm_knows_the_architectures_whose_mtp_layers_are_accepted() -> None:
    """By its source: of most of them no tiny model is made here."""
    import vllm.config.speculative as source

    text = Path(source.__file__).read_text(encoding="utf-8")
    assert [name for name in MTP_LAYERS if f'"{name}"' not in text] == []
