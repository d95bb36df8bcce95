"""Offline training: packs, records made when asked for, the plateau rule, and the command that uses them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from config.drafter import DrafterOptions
from config.speculation import EagleOptions
from contracts.records import SequenceRecord
from drafter.eagle import EagleDrafter, load_eagle
from drafter.training.fit import PlateauRule, TargetRecords, _packs, fit
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer, MicroStepResult
from models.transformer import Transformer
from tests.engine.support import VOCAB, tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return tiny_model(tmp_path_factory.mktemp("target")).requires_grad_(False)


def sequences(lengths: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Counting sequences, which a drafter can learn: prompts of two tokens and the rest."""
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, VOCAB) + np.arange(n)).astype(np.int32) % VOCAB for n in lengths]
    return [text[:2] for text in texts], [text[2:] for text in texts]


def test_records_are_made_once_where_there_is_room(target: Transformer) -> None:
    lengths = [9, 30, 5, 17]
    pairs = sequences(lengths)
    everything, nothing = TargetRecords(target, *pairs, layers=(0, 1)), TargetRecords(target, *pairs, max_bytes=0)
    assert everything.tokens == nothing.tokens == lengths
    first, again = everything.take([3, 0, 3]), everything.take([0, 3])
    assert [len(record.tokens) for record in first] == [17, 9, 17]
    assert (again[0] is first[1], again[1] is first[0]) == (True, True)
    uncached = nothing.take([0, 3])
    assert nothing.take([0])[0] is not uncached[0]
    width = target.config.hidden_size
    assert first[1].width == 3 * width
    own, shared = (r.states.view(np.float32) for r in (uncached[0], first[1]))
    np.testing.assert_array_equal(own, shared[:, -width:])
    assert [record.rows for record in uncached] == [8, 16]


def test_packs_keep_order_and_cut_nothing(target: Transformer) -> None:
    records = TargetRecords(target, *sequences([5, 6, 40, 3, 4, 5]))
    assert list(_packs(records, [0, 1, 2, 3, 4, 5], 12)) == [[0, 1], [2], [3, 4, 5]]
    assert list(_packs(records, [2, 0], 45)) == [[2, 0]]
    assert list(_packs(records, [], 12)) == []


class Scripted(TargetRecords):
    """Records that are never looked at."""

    def __init__(self, tokens: Sequence[int] = (10,) * 40) -> None:
        self.tokens = list(tokens)
        self.taken: list[tuple[int, ...]] = []

    def take(self, indices: Sequence[int]) -> list[SequenceRecord]:
        self.taken.append(tuple(indices))
        return []


class ScriptedTrainer(DrafterTrainer):
    """Evaluations bring given losses; a micro-step adds one to the first weight."""

    losses: list[float]
    rates: list[float]

    def micro_step(self, records: Sequence[SequenceRecord], *, reduce: object = None) -> MicroStepResult:
        self.rates.append(self.rate_scale)
        with torch.no_grad():
            self.model.fuse.weight[0, 0] += 1
        return MicroStepResult(9.0, 0.0, 0.0, 10, True)

    def evaluate(self, records: Sequence[SequenceRecord]) -> MicroStepResult:
        return MicroStepResult(self.losses.pop(0), 0.5, 0.75, 10, False)


def scripted(target: Transformer, losses: list[float]) -> ScriptedTrainer:
    trainer = ScriptedTrainer(TargetHead.of(target, 0), DrafterOptions(micro_step_tokens=64))
    trainer.losses, trainer.rates = losses, []
    with torch.no_grad():
        trainer.model.fuse.weight[0, 0] = 0
    return trainer


def test_the_plateau_rule(target: Transformer) -> None:
    """Two evaluations without a gain of 10 %: once to the smaller rate, from the best weights, then the end."""
    rule = PlateauRule(every=3, patience=2, gain=0.1, rates=(1.0, 0.2))
    losses = [5.0, 4.0, 3.9, 3.8, 2.0, 1.9, 1.95, 99.0]
    trainer, records = scripted(target, list(losses)), Scripted()
    steps = list(fit(trainer, records, rule, held_out=2))
    history = [progress for progress in steps if progress is not None]
    assert len(steps) == 21
    assert [progress.held_out_loss for progress in history] == losses[:7]
    assert [progress.best for progress in history] == [True, True, True, True, True, True, False]
    assert [progress.step for progress in history] == [3, 6, 9, 12, 15, 18, 21]
    assert trainer.rates == [1.0] * 12 + [0.2] * 9
    assert trainer.rate_scale == 1.0
    assert trainer.model.fuse.weight[0, 0].item() == 18  # those of the sixth evaluation
    judged = records.taken[3]
    assert len(judged) == 2
    trained = {index for number, pack in enumerate(records.taken) if number % 4 != 3 for index in pack}
    assert not trained & set(judged)


def test_too_little_to_learn_from_is_an_error(target: Transformer) -> None:
    trainer = scripted(target, [])
    with pytest.raises(ValueError, match="1 sequences of more than 3 tokens"):
        next(fit(trainer, Scripted(tokens=[3, 10, 2])))


def test_it_fits_a_target(target: Transformer) -> None:
    """Through the whole path: forward passes, packs, updates, evaluations, best weights."""
    rng = np.random.default_rng(1)
    records = TargetRecords(target, *sequences(rng.integers(4, 40, 60).tolist()))
    trainer = DrafterTrainer(TargetHead.of(target, 0), DrafterOptions(micro_step_tokens=512, learning_rate=5e-3))
    rule = PlateauRule(every=20, max_steps=100)
    history = [progress for progress in fit(trainer, records, rule, held_out=6) if progress is not None]
    assert [progress.step for progress in history] == [20, 40, 60, 80, 100]
    assert history[-1].held_out_loss < 0.9 * history[0].held_out_loss
    best = min(history, key=lambda progress: progress.held_out_loss)
    assert best.held_out_top3 >= best.held_out_accuracy
    assert best.tokens > 20 * 400


def demo_files(directory: Path, target: Transformer) -> tuple[Path, Path]:
    """A model directory with a tokenizer, and prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from models.checkpoint import save_model

    save_model(target, directory / "model")
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<eos>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "model" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "unk_token": "w0"}
    (directory / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    prompts = directory / "prompts.jsonl"
    records = [{"prompt": f"w{i} w{i + 1} w{i + 2}", "response": f"w{i + 3} w{i + 4} w{i + 5}"} for i in range(12)]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory / "model", prompts


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3"])
def test_the_command_writes_what_engines_load(target: Transformer, tmp_path: Path, algorithm: str) -> None:
    from launch.drafter.fit import DrafterWarmup, warmup_drafter
    from launch.errors import UsageError

    model, prompts = demo_files(tmp_path, target)
    out = tmp_path / "drafter"
    settings = {"target": model, "data": prompts, "template": "plain", "device": "cpu", "max_new_tokens": 24}
    given = DrafterWarmup(out=out, algorithm=algorithm, samples=1, max_steps=55, **settings)
    said = list(warmup_drafter(given))
    assert "12 sequences" in said[1]
    told = json.loads((out / "training.json").read_text())
    assert [entry["step"] for entry in told["history"]] == [50, 55]
    assert not told["plateau"]
    assert told["drafter"]["algorithm"] == algorithm
    drafter = EagleDrafter(target, EagleOptions(path=str(out)), 4, 16, 8)
    assert drafter.model.kind == algorithm
    with pytest.raises(UsageError, match="holds a model or drafter already"):
        list(warmup_drafter(given))
    # Goes on from weights, on given texts.
    more = DrafterWarmup(
        out=tmp_path / "more",
        algorithm=algorithm,
        init=out,
        response_field="response",
        max_steps=1,
        learning_rate=1e-9,
        **settings,
    )
    assert list(warmup_drafter(more))
    place = {"dtype": torch.float32, "device": "cpu", "batch_invariant": True}
    before, after = (load_eagle(path, target.config, **place) for path in (out, more.out))
    torch.testing.assert_close(before.state_dict(), after.state_dict(), rtol=0, atol=1e-6)


def test_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    from launch.drafter.fit import DrafterWarmup, warmup_drafter
    from launch.errors import UsageError

    for given, wanted in (
        ({}, "--data FILE, or --run RUN"),
        ({"data": tmp_path, "run": tmp_path}, "--data FILE, or --run RUN"),
        ({"data": tmp_path}, "--data needs a target"),
        ({"data": tmp_path, "target": tmp_path / "none"}, "--target: there is no"),
        ({"run": tmp_path / "none"}, "--run: there is no"),
    ):
        with pytest.raises(UsageError, match=wanted):
            list(warmup_drafter(DrafterWarmup(out=tmp_path / "out", **given)))
