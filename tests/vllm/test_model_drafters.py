"""Drafters that are networks, in stock vLLM: swapped, following the target, off for a while, beside other drafts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from drafter.eagle.files import load_eagle
from drafter.published import EagleWeightsError
from models.checkpoint import WeightsMismatchError, hf_state_dict
from models.config import ModelConfig, UnsupportedModelError, read_config
from models.directory import write_checkpoint
from models.transformer import Transformer
from models.weights import pack
from tests.drafter.test_export_vllm import fitted
from tests.engine.support import VOCAB
from tests.vllm.support import VLLM, Drawn, RawEngine, tiny_checkpoint

pytestmark = VLLM

DEPTH, TOKENS = 4, 48
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, 40).astype(np.int32) for i in range(24)]
SHAPE: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 128, "head_dim": 64, "initializer_range": 0.15}


@dataclass(slots=True)
class Outcome:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    offered: int = 0
    accepted: int = 0


class Counting:
    """A StepControl: how much the drafter proposes after each step, what is put in its place, what came of it."""

    def __init__(self, depth: Callable[[int], int], instead: Callable[[int, Any], list[int] | None]) -> None:
        self._depth, self._instead, self._step = depth, instead, 0
        self.outcome = Outcome()

    def before_schedule(self, running: list[Any]) -> None:
        for request in running:
            if request.num_output_tokens and (drafts := self._instead(self._step, request)) is not None:
                request.spec_token_ids = drafts

    def verifies_network(self) -> bool:
        return False

    def drafts_to_make(self) -> int:
        self._step += 1
        return self._depth(self._step)

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.outcome.offered += len(drafts)
            self.outcome.accepted += len(output.sampled_token_ids[output.req_id_to_index[request_id]]) - 1
        return set()


class Engine:
    def __init__(self, target: Path, drafter: Any, **arguments: Any) -> None:
        from actors.engine.vllm.weights import WeightsLoader
        from actors.engine.vllm.worker import EXTENSION

        self.drafter = drafter
        self.raw = RawEngine(
            target,
            block_size=32,
            worker_extension_cls=EXTENSION,
            speculative_config=drafter.speculative_config(DEPTH),
            **arguments,
        )
        self.raw.core.collective_rpc("paceline_hold_drafter", args=(drafter.copies_target,))
        follower = drafter.convert if drafter.copies_target else None
        self.loader = WeightsLoader(self.raw.core, target, follower=follower)

    def run(
        self,
        depth: Callable[[int], int] = lambda step: DEPTH,
        instead: Callable[[int, Any], list[int] | None] = lambda step, request: None,
    ) -> Outcome:
        control = self.raw.scheduler.control = Counting(depth, instead)
        for i, prompt in enumerate(PROMPTS):
            self.raw.add(str(i), prompt.tolist(), TOKENS, temperature=0.0)
        drawn: dict[str, Drawn] = self.raw.run()
        control.outcome.tokens = {name: one.tokens for name, one in drawn.items()}
        return control.outcome

    def load_target(self, model: Transformer) -> None:
        self.loader.load_target(*pack(hf_state_dict(model), 1))

    def load_drafter(self, directory: Path, **changes: torch.Tensor) -> None:
        config = ModelConfig.from_hf(read_config(self.loader.model))
        own = load_eagle(directory, config, dtype=torch.float32, device="cpu", batch_invariant=False)
        packed = pack(own.state_dict() | changes, 2)
        self.loader.load_drafter(*packed, self.drafter.convert, self.drafter.shapes)

    def close(self) -> None:
        self.raw.close()


def started(target: Path, drafter: Any) -> Outcome:
    """What an engine draws that is started so."""
    engine = Engine(target, drafter)
    outcome = engine.run()
    engine.close()
    return outcome


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_eagle_drafter_is_swapped_in_place_and_reads_the_targets_own_embedding_and_head(
    tmp_path: Path, method: Literal["eagle", "eagle3"]
) -> None:
    from actors.engine.vllm.model_drafters import eagle_drafter

    targets = {seed: tiny_checkpoint(tmp_path / str(seed), "llama", seed=seed, **SHAPE) for seed in range(2)}
    (first, model), (second, other) = targets[0], targets[1]
    fitted(model, PROMPTS, method, tmp_path / "trained")
    fresh = {"eagle": "random", "eagle3": "random:eagle3"}[method]
    untrained = eagle_drafter(fresh, first, tmp_path / "untrained", dtype=torch.float32)
    trained = eagle_drafter(str(tmp_path / "trained"), first, tmp_path / "exported", dtype=torch.float32)
    assert trained.method == untrained.method == method
    wanted, elsewhere = started(first, trained), started(second, trained)
    assert wanted.accepted > 0.08 * wanted.offered, "the fit failed: nothing would be compared"

    engine = Engine(first, untrained)
    before = engine.run()
    assert before.tokens == wanted.tokens
    assert before.accepted < 0.5 * wanted.accepted
    engine.load_drafter(tmp_path / "trained")
    assert engine.run() == wanted

    with pytest.raises(WeightsMismatchError, match=r"fuse\.weight has shape"):
        engine.load_drafter(tmp_path / "trained", **{"fuse.weight": torch.zeros(3, 3)})
    with pytest.raises(WeightsMismatchError, match="unexpected tensor nothing"):
        engine.load_drafter(tmp_path / "trained", nothing=torch.zeros(3))
    assert engine.run() == wanted

    engine.load_target(other)
    assert engine.run() == elsewhere
    engine.load_target(model)
    assert engine.run() == wanted
    engine.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_copy_follows_its_target_and_may_be_off_for_any_number_of_steps(tmp_path: Path, dtype: str) -> None:
    from actors.engine.vllm.drafter_passes import NOT_AT_ALL
    from actors.engine.vllm.model_drafters import self_drafter

    first, _ = tiny_checkpoint(tmp_path / "0", seed=0, **SHAPE)
    second, other = tiny_checkpoint(tmp_path / "1", seed=1, **SHAPE)
    elsewhere = Engine(second, self_drafter(second, tmp_path / "copy1"), dtype=dtype)
    wanted = elsewhere.run()
    elsewhere.close()

    engine = Engine(first, self_drafter(first, tmp_path / "copy0"), dtype=dtype)
    always = engine.run()
    assert always.accepted > 0.7 * always.offered
    never = engine.run(lambda step: NOT_AT_ALL)
    assert (never.offered, never.tokens) == (0, always.tokens)
    for depth in (
        lambda step: NOT_AT_ALL if step < 20 else DEPTH,
        lambda step: DEPTH if step % 3 == 0 else NOT_AT_ALL,
        lambda step: (DEPTH, 0, 2, NOT_AT_ALL)[step % 4],
    ):
        off = engine.run(depth)
        assert off.tokens == always.tokens
        assert 0.7 * off.offered < off.accepted
    engine.load_target(other)
    assert engine.run() == wanted
    engine.close()


@pytest.mark.timeout(300)
def test_drafts_of_the_scheduler_may_take_the_place_of_the_drafters(tmp_path: Path) -> None:
    from actors.engine.vllm.model_drafters import self_drafter

    target, _ = tiny_checkpoint(tmp_path, **SHAPE)
    engine = Engine(target, self_drafter(target, tmp_path / "copy"))
    wanted = engine.run()

    def some(step: int, request: Any) -> list[int] | None:
        """Of three requests one has the drafter's, one has what comes (wrong at its third token), one has none."""
        index, known = int(request.request_id), request.num_output_tokens
        if (step + index) % 3 == 0:
            return None
        coming = list(wanted.tokens[str(index)][known : known + DEPTH])
        if len(coming) > 2:
            coming[2] = (coming[2] + 1) % VOCAB
        return coming if (step + index) % 3 == 1 else []

    mixed = engine.run(instead=some)
    assert mixed.tokens == wanted.tokens
    assert 0 < mixed.accepted < mixed.offered
    none = engine.run(instead=lambda step, request: [])
    assert (none.tokens, none.offered) == (wanted.tokens, 0)
    engine.close()


def test_drafts_are_never_sampled(tmp_path: Path) -> None:
    """Their probabilities would be taken for those of drafts that the scheduler put in their place."""
    from actors.engine.vllm.model_drafters import self_drafter

    target, _ = tiny_checkpoint(tmp_path)
    assert self_drafter(target, tmp_path / "copy").speculative_config(4)["draft_sample_method"] == "greedy"


def test_what_is_no_drafter_of_the_target_is_refused(tmp_path: Path) -> None:
    from actors.engine.vllm.model_drafters import eagle_drafter, self_drafter

    target, model = tiny_checkpoint(tmp_path)
    with pytest.raises(EagleWeightsError, match="holds no EAGLE drafter"):
        eagle_drafter(str(tmp_path), target, tmp_path / "out", dtype=torch.float32)
    gemma = read_config(target) | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    write_checkpoint(gemma, hf_state_dict(model).items(), tmp_path / "gemma")
    with pytest.raises(UnsupportedModelError):
        self_drafter(tmp_path / "gemma", tmp_path / "copy")
