"""A learner that mirrors low-bit rollouts: the engine's very products, masters that are trained, what is published."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.engine.native.core import build
from actors.engine.wire import Start
from actors.training.parallel import Rank
from actors.training.recording import RecordingPlan, StepRecording
from actors.training.reference import Frozen
from actors.training.trainer import Trainer
from config.formats import FORMATS
from config.learner import LearnerOptions, OptimizerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from contracts.engine import Submit, UpdateWeights
from contracts.rollout import Finished, Request, Rollout, SamplingParams
from contracts.training import TrainSequence
from launch.run.agreement import LOW_BIT_LIMITS
from models.checkpoint import hf_tensors, load_model
from models.config import ModelConfigError, UnsupportedModelError
from models.low_bit import quantised
from models.noise import noise_key
from models.transformer import Transformer
from models.weights import unpack
from tests.engine.test_recording import check
from tests.learner.ranks import run_ranks
from tests.learner.tiny import VOCAB, make_demonstrations, make_sequences, write_config

WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}  # of groups of 128 and of 64
KL = ObjectiveOptions(kl="k3", kl_coef=0.1)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with weights."""
    root = tmp_path_factory.mktemp("wide")
    trainer_of(write_config(root / "config", **WIDE), "none", init="random").weights.export(root / "model")
    return root / "model"


def trainer_of(
    path: Path,
    form: str,
    *,
    init: str = "checkpoint",
    dtype: str = "float32",
    objective: ObjectiveOptions = KL,
    rank: Rank | None = None,
    lr: float = 1e-3,
    **learner: Any,
) -> Trainer:
    trainer = Trainer(
        ModelOptions(path=str(path), dtype=dtype),
        LearnerOptions(**learner),
        objective,
        rank=rank,
        init=init,
        seed=5,
        quantization=form,
    )
    trainer.begin(OptimizerOptions(lr=lr), 20)
    return trainer


class Sampler:
    """The native engine in this process."""

    def __init__(self, path: Path, quantization: str, dtype: str = "float32") -> None:
        options = EngineOptions(max_running=8, kv_tokens=2048)
        self._core = build(
            Start(
                model=ModelOptions(path=str(path), dtype=dtype),
                options=options,
                seed=0,
                weights_version=0,
                niceness=0,
                speculation=SpeculationOptions(mode="off"),
                quantization=quantization,
            )
        )

    def rollouts(self, step: int, count: int = 6) -> list[TrainSequence]:
        rng = np.random.default_rng(step)
        params = SamplingParams(24, 1.0, 0, 1.0)
        requests = [
            Request(
                request_id=100 * step + i,
                prompt_id=i,
                prompt_tokens=rng.integers(0, VOCAB, 5).astype(np.int32),
                noise_key=noise_key(0, step, i, 0),
                sampling=params,
                expected_tokens=24.0,
            )
            for i in range(count)
        ]
        self._core.apply(Submit(tuple(requests)), None)
        done: dict[int, Rollout] = {}
        while self._core.has_work:
            for event in self._core.step():
                if isinstance(event, Finished):
                    done[event.rollout.request_id] = event.rollout
        return [
            TrainSequence(
                prompt_tokens=request.prompt_tokens,
                response_tokens=done[request.request_id].tokens,
                sampler_logprobs=done[request.request_id].logprobs,
                sampler_logprobs_t1=done[request.request_id].logprobs_t1,
                advantage=(-1.0) ** i,
            )
            for i, request in enumerate(requests)
        ]

    def update(self, trainer: Trainer, version: int, *, masters: bool = False) -> None:
        published = trainer.weights.publish(version, masters=masters)
        assert published is not None
        self._core.apply(UpdateWeights(published[0]), np.asarray(published[1]))


def gaps(path: Path, form: str, *, steps: int = 3, **learner: Any) -> list[dict[str, float]]:
    """The metrics of RL steps: engine and learner in this process, weights handed over after each."""
    trainer = trainer_of(path, form, **learner)
    sampler = Sampler(path, form, learner.get("dtype", "float32"))
    found = []
    for step in range(steps):
        found.append(trainer.rl_step(sampler.rollouts(step), temperature=1.0).metrics)
        sampler.update(trainer, step + 1)
    return found


@pytest.mark.parametrize("form", ["w8a8", "w4a8", "w3a8", "w2a8"])
def test_an_aligned_learner_agrees_with_the_engine_after_every_update(wide: Path, form: str) -> None:
    found = gaps(wide, form, mini_batches=2)
    assert max(metrics["logprob_gap/mean"] for metrics in found) <= 1e-6
    assert max(metrics["logprob_gap/max"] for metrics in found) <= 1e-5


@pytest.mark.parametrize(
    "learner",
    [{"activation_checkpointing": True}, {"micro_batch_tokens": 40}, {"packing": False, "micro_batch_tokens": 64}],
    ids=str,
)
def test_how_the_learner_computes_does_not_take_them_apart(wide: Path, learner: dict[str, Any]) -> None:
    assert max(metrics["logprob_gap/mean"] for metrics in gaps(wide, "w4a8", **learner)) <= 1e-6


@pytest.mark.parametrize(("form", "least"), [("w8a8", 1e-3), ("w4a8", 1e-2)])
def test_an_unaligned_learner_is_as_far_away_as_the_format_is_coarse(wide: Path, form: str, least: float) -> None:
    """These fresh weights make it larger than trained ones do; the limit lets them."""
    for metrics in gaps(wide, form, quantization="none"):
        assert least < metrics["logprob_gap/mean"] < LOW_BIT_LIMITS[form]


def test_bfloat16_compute_quantises_what_is_published(wide: Path) -> None:
    """The cast of a micro-batch, whose copies are new every time, and weights that are stored in bfloat16."""
    aligned = gaps(wide, "w8a8", dtype="bfloat16", autocast_bf16=True, micro_batch_tokens=40)
    plain = gaps(wide, "none", dtype="bfloat16", autocast_bf16=True, micro_batch_tokens=40)
    for low, full in zip(aligned, plain, strict=True):
        assert low["logprob_gap/mean"] <= max(2 * full["logprob_gap/mean"], 1e-6)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_published_is_what_the_forward_pass_multiplied(wide: Path, form: str) -> None:
    trainer = trainer_of(wide, form)
    trainer.rl_step(make_sequences(), temperature=1.0)
    published = trainer.weights.publish(3)
    assert published is not None
    manifest, buffer = published
    tensors = dict(unpack(manifest, buffer))
    assert (manifest.tensors, manifest.total_bytes) == trainer.weights.layout()
    network = trainer.network
    assert isinstance(network, Transformer)
    engine = Transformer(network.config, low_bit=FORMATS[form])
    assert {piece.hf_name for piece in engine.layout()} == tensors.keys()
    for piece in engine.layout():
        parameter, _, kind = piece.parameter.rpartition(".")
        projection: Any = network.get_submodule(parameter)
        if parameter.endswith("_proj") and kind.startswith("weight"):
            low_bit = projection.mirror.of(projection.weight)
            fused = {"weight": low_bit.values, "weight_scale": low_bit.scales, "weight_zero": low_bit.zeros}[kind]
        else:
            fused = getattr(projection, kind).detach()
        assert same(tensors[piece.hf_name], fused[piece.start : piece.stop]), piece.hf_name


def same(one: Tensor, other: Tensor) -> bool:
    """Bitwise, of one dtype."""
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def test_fewer_bytes_are_published_and_the_masters_on_request(wide: Path) -> None:
    trainer = trainer_of(wide, "w8a8")
    low, full, plain = (
        trainer.weights.publish(1),
        trainer.weights.publish(1, masters=True),
        trainer_of(wide, "none").weights.publish(1),
    )
    assert low is not None
    assert full is not None
    assert plain is not None
    assert full[0] == plain[0]
    assert np.array_equal(full[1], plain[1])
    assert full[0].total_bytes > 3 * low[0].total_bytes
    assert trainer.weights.quantise_s == 0.0, "the masters were not rounded"
    trainer.weights.publish(2)
    assert trainer.weights.quantise_s > 0


def test_an_export_holds_the_masters(wide: Path, tmp_path: Path) -> None:
    trainer = trainer_of(wide, "w4a8")
    trainer.rl_step(make_sequences(), temperature=1.0)
    trainer.weights.export(tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(same(found[name], tensor.contiguous()) for name, tensor in hf_tensors(trainer.network))


def test_the_reference_is_mirrored_too_so_kl_begins_at_zero(wide: Path) -> None:
    trainer = trainer_of(wide, "w4a8", objective=ObjectiveOptions(name="reinforce_pp", kl="k3", kl_coef=0.1))
    sequences = make_sequences()
    first = trainer.reference_kl(sequences, temperature=1.0)
    assert all(not values.any() for values in first.values())
    trainer.rl_step(sequences, temperature=1.0)
    assert any(values.any() for values in trainer.reference_kl(sequences, temperature=1.0).values())
    # A reference in full precision would be as far away as the format is coarse.
    assert isinstance(trainer._reference, Frozen)
    network: Any = trainer._reference.copy.network
    trainer._reference.take()
    network.mirror(None, torch.float32)
    apart = trainer.reference_kl(sequences, temperature=1.0)
    assert np.mean(np.concatenate(list(apart.values()))) > 1e-5


def test_a_resumed_trainer_goes_on_bit_for_bit_and_the_checkpoint_holds_masters(wide: Path, tmp_path: Path) -> None:
    def step(trainer: Trainer, seed: int) -> tuple[float, ...]:
        return trainer.rl_step(make_sequences(seed=seed), temperature=1.0).losses

    whole = trainer_of(wide, "w4a8", mini_batches=2)
    step(whole, 0)
    (tmp_path / "saved").mkdir()
    whole.save(tmp_path / "saved")
    masters = [p.detach().clone() for p in whole.module.parameters()]
    expected = step(whole, 1)
    resumed = trainer_of(wide, "w4a8", mini_batches=2)
    step(resumed, 7)  # whatever was cached of other weights must not be used
    resumed.load(tmp_path / "saved")
    assert all(same(p.detach(), master) for p, master in zip(resumed.module.parameters(), masters, strict=True))
    assert step(resumed, 1) == expected
    one, other = resumed.weights.publish(2), whole.weights.publish(2)
    assert one is not None
    assert other is not None
    assert one[0] == other[0]
    plain = trainer_of(wide, "none", mini_batches=2)  # the same file, whatever computes with it
    plain.load(tmp_path / "saved")
    assert all(same(p.detach(), master) for p, master in zip(plain.module.parameters(), masters, strict=True))


def test_supervised_steps_are_mirrored_where_the_trainer_is(wide: Path) -> None:
    """launch.run.warmup makes a trainer without a format: its warm start is shared by runs of every precision."""
    losses = [trainer_of(wide, form).sft_step(make_demonstrations()).losses[0] for form in ("none", "w4a8")]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize("layers", [(), (0, 1)])
def test_recorded_hidden_states_are_those_of_the_low_bit_engine(wide: Path, layers: tuple[int, ...]) -> None:
    recording = StepRecording(RecordingPlan(1 << 30, layers), 3, torch.float32)
    trainer_of(wide, "w4a8").rl_step(make_sequences(4), temperature=0.8, recording=recording)
    engine = load_model(wide, low_bit=FORMATS["w4a8"])
    assert len(recording.records) == 4
    for record in recording.records:
        check(engine, record, version=3, layers=layers)


def test_a_network_of_transformers_is_refused_with_the_remedy(wide: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"rollout.quantization=w8a8 .* set rollout.quantization=none"):
        Trainer(
            ModelOptions(path=str(wide), implementation="transformers"),
            LearnerOptions(),
            ObjectiveOptions(),
            quantization="w8a8",
        )


def test_groups_that_do_not_divide_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"groups of 128 or 64"):
        trainer_of(write_config(tmp_path), "w4a8", init="random")


BFLOAT16 = {"dtype": "bfloat16", "autocast_bf16": True, "activation_checkpointing": True}
SHARDED: dict[str, dict[str, Any]] = {"w8a8": {}, "w4a8": {}, "w4a8, bfloat16": BFLOAT16}


def sharded(rank: Rank, path: Path, name: str) -> dict[str, Any]:
    """What two ranks publish before and after steps, and the numbers of the steps."""
    form = name.partition(",")[0]
    trainer = trainer_of(path, form, rank=rank, ranks=rank.size, micro_batch_tokens=60, **SHARDED[name])
    before = trainer.weights.publish(0)
    results = [trainer.rl_step(make_sequences(seed=i), temperature=1.0) for i in range(2)]
    after, masters = trainer.weights.publish(1), trainer.weights.publish(1, masters=True)
    return {
        "losses": [loss for result in results for loss in result.losses],
        "kl": results[0].metrics["kl"],
        "weights": [None if sent is None else (sent[0], np.asarray(sent[1])) for sent in (before, after, masters)],
    }


def both(rank: Rank, path: Path) -> dict[str, Any]:
    return {name: sharded(rank, path, name) for name in SHARDED}


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_compute_and_publish_what_one_does(wide: Path) -> None:
    """Each quantises whole matrices that it gathers: scales are never those of a shard."""
    first, second = run_ranks(2, both, wide)
    for name, learner in SHARDED.items():
        one, two = sharded(Rank(), wide, name), first[name]
        assert two["losses"] == second[name]["losses"]
        assert two["losses"][0] == pytest.approx(one["losses"][0], rel=5e-2 if learner else 1e-4)
        assert two["losses"][1] == pytest.approx(one["losses"][1], rel=0.2)  # values may round to their neighbours
        assert two["kl"] == second[name]["kl"] == 0.0
        assert second[name]["weights"] == [None] * 3
        before, after, masters = two["weights"]
        assert before[0] == one["weights"][0][0], "before the first update: bit for bit"
        expected = quantised(unpack(*masters), FORMATS[name.partition(",")[0]])
        for (tensor_name, tensor), (wanted_name, wanted) in zip(unpack(*after), expected, strict=True):
            assert tensor_name == wanted_name
            assert same(tensor, wanted), tensor_name
