"""A learner of adapters: what it trains, hands over, compares with, keeps and exports; and engines that merge them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.engine.native.core import build
from actors.engine.wire import Start
from actors.training.checkpoint import CheckpointError
from actors.training.trainer import Trainer
from config.learner import LearnerOptions, OptimizerOptions
from config.model import LoraOptions, ModelOptions
from config.objective import ObjectiveOptions
from config.rollout import EngineOptions
from config.speculation import SpeculationOptions
from contracts.engine import UpdateWeights
from models import ops
from models.checkpoint import hf_targets, load_model
from models.dtypes import DTYPES
from models.manifest import WeightsManifest
from models.ops.native import kernels
from models.peft import AdapterError, are_adapters, read_adapter
from models.transformer import Transformer
from models.weights import Buffer, WeightsCorruptError, unpack
from tests.learner.tiny import make_sequences, make_trainer, write_config
from tests.native import needs_native

KL = ObjectiveOptions(name="reinforce_pp", kl="k3", kl_coef=0.1)
LORA = LoraOptions(rank=2, alpha=4)
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # groups of 128 inputs divide all of it


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with weights."""
    root = tmp_path_factory.mktemp("base")
    make_trainer(write_config(root / "config", **WIDE)).weights.export(root / "model")
    return root / "model"


def trainer_of(
    path: Path, *, dtype: str = "float32", form: Any = "none", lora: LoraOptions = LORA, **more: Any
) -> Trainer:
    trainer = Trainer(
        ModelOptions(path=str(path), dtype=dtype),
        LearnerOptions(lora=lora, mini_batches=2, **more),
        KL,
        seed=5,
        quantization=form,
        adapters_only=True,
    )
    trainer.begin(OptimizerOptions(lr=3e-2), 20)
    return trainer


def step(trainer: Trainer, seed: int = 0) -> tuple[float, ...]:
    return trainer.rl_step(make_sequences(seed=seed), temperature=1.0).losses


def published(trainer: Trainer, version: int, *, masters: bool = False) -> tuple[WeightsManifest, Buffer]:
    found = trainer.weights.publish(version, masters=masters)
    assert found is not None
    return found


def gradients(path: Path, monkeypatch: pytest.MonkeyPatch, **lora: Any) -> tuple[Tensor, float]:
    """Return the first gradient of random adapters, in one row, and the loss."""
    trainer = trainer_of(path, lora=LoraOptions(rank=2, alpha=4, **lora))
    found, generator, update = list[Tensor](), torch.Generator().manual_seed(3), trainer._update
    with torch.no_grad():
        for _, parameter in trainer._trained:
            parameter.normal_(0, 0.1, generator=generator)

    def recorded(loss: Tensor) -> tuple[float, float, float]:
        found.append(torch.cat([p.grad.flatten() for _, p in trainer._trained if p.grad is not None]))
        return update(loss)

    monkeypatch.setattr(trainer, "_update", recorded)
    losses = step(trainer)
    return found[0], losses[0]


def test_gradients_in_bfloat16_are_near_and_the_loss_is_the_same(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, loss = gradients(base, monkeypatch)
    near, same = gradients(base, monkeypatch, bf16_gradients=True)
    assert same == loss
    assert not torch.equal(near, exact)
    torch.testing.assert_close(near, exact, rtol=0, atol=0.02 * float(exact.norm()))
    assert torch.cosine_similarity(near, exact, dim=0) > 0.999


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_bfloat16_instructions_gradients_are_multiplied_in_float32(
    base: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """There torch's bfloat16 products take up to 40 times as long."""
    monkeypatch.setattr(kernels, "cpu_level", lambda: "avx2")
    factors = [torch.randn(n, 3, dtype=torch.float32) for n in (8, 24)]
    update = ops.LowRank(factors[0].t().contiguous().requires_grad_(), factors[1].requires_grad_(), 0.5, 0, 24)
    x, weight = torch.randn(5, 8).to(DTYPES[dtype]).requires_grad_(), torch.randn(24, 8).to(DTYPES[dtype])
    y = ops.adapted_linear(x, weight, None, [update], invariant=True, bf16_gradients=True)
    grad = torch.randn(5, 24).to(y.dtype)
    y.backward(grad)
    merged = weight.float() + 0.5 * (factors[1] @ factors[0].t()).detach()
    assert x.grad is not None
    assert x.grad.dtype is x.dtype
    torch.testing.assert_close(
        x.grad, (grad.float() @ merged).to(x.dtype), rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-4
    )
    if dtype == "float32":
        exact = gradients(base, monkeypatch)[0]
        assert torch.equal(gradients(base, monkeypatch, bf16_gradients=True)[0], exact)


class Engine:
    """The native engine in this process, and the model that it holds."""

    def __init__(self, path: Path, dtype: str, form: Any = "none", lora: LoraOptions | None = LORA) -> None:
        self.core = build(
            Start(
                model=ModelOptions(path=str(path), dtype=dtype),
                options=EngineOptions(max_running=4, kv_tokens=1024),
                seed=0,
                weights_version=0,
                niceness=0,
                speculation=SpeculationOptions(mode="off"),
                quantization=form,
                lora=lora,
            )
        )

    def load(self, weights: tuple[WeightsManifest, Buffer]) -> dict[str, Tensor]:
        self.core.apply(UpdateWeights(weights[0]), weights[1])
        model: Transformer = self.core._model
        return {name: tensor.clone() for name, tensor in hf_targets(model).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("dtype", "form"), [("float32", "none"), ("bfloat16", "none"), ("float32", "w8a8"), ("bfloat16", "w4a8")]
)
def test_engines_hold_what_the_learner_computes_with(base: Path, dtype: str, form: str) -> None:
    trainer, engine = trainer_of(base, dtype=dtype, form=form), Engine(base, dtype, form)
    whole = Trainer(  # hands over what adapters make of the weights, as vLLM is served
        ModelOptions(path=str(base), dtype=dtype),
        LearnerOptions(lora=LORA, mini_batches=2),
        KL,
        seed=5,
        quantization=form,
    )
    whole.begin(OptimizerOptions(lr=3e-2), 20)
    for version in (1, 2):
        assert step(trainer, version) == step(whole, version)
        adapters, weights = published(trainer, version), published(whole, version)
        assert are_adapters(adapters[0].tensors)
        held = engine.load(adapters)
        assert same(held, dict(unpack(*weights)))
        assert adapters[0].total_bytes < (0.5 if form == "none" else 0.9) * weights[0].total_bytes
    # A joining worker: the base and the newest ones. And one that evaluated in full precision, then goes on.
    assert same(Engine(base, dtype, form).load(adapters), held)
    masters = engine.load(published(trainer, 3, masters=True))
    assert all(tensor.is_floating_point() for tensor in masters.values())
    assert same(engine.load(adapters), held)


def test_adapters_that_are_damaged_or_not_asked_for_are_refused(base: Path) -> None:
    manifest, buffer = published(trainer_of(base), 1)
    damaged = buffer.copy()
    damaged[3] ^= 1
    with pytest.raises(WeightsCorruptError):
        Engine(base, "float32").load((manifest, damaged))
    with pytest.raises(AdapterError, match="started without"):
        Engine(base, "float32", lora=None).load((manifest, buffer))
    with pytest.raises(AdapterError, match="another model"):
        Engine(base, "float32", lora=LoraOptions(rank=1)).load((manifest, buffer))


def test_only_adapters_are_trained_and_a_seed_decides(base: Path) -> None:
    one, other = trainer_of(base), trainer_of(base)
    begun = {name: p.detach().clone() for name, p in one.module.named_parameters()}
    assert [step(one, i) for i in range(2)] == [step(other, i) for i in range(2)]
    for name, p in one.module.named_parameters():
        assert torch.equal(p, begun[name]) == (".adapters." not in name), name
        assert p.grad is None, "gradients are dropped after the update"
    assert all(".adapters." in name for name in one.optimizers.state())


def test_the_reference_is_the_model_without_what_was_learned_since(base: Path, tmp_path: Path) -> None:
    trainer, sequences = trainer_of(base), make_sequences()
    assert not any(values.any() for values in trainer.reference_kl(sequences, temperature=1.0).values())
    step(trainer)
    far = trainer.reference_kl(sequences, temperature=1.0)
    assert any(values.any() for values in far.values())
    # As far as a frozen copy of the base is from the merged model.
    frozen = Trainer(ModelOptions(path=str(base)), LearnerOptions(), KL, seed=5)
    frozen.begin(OptimizerOptions(), 20)
    merged = load_model_into(frozen, trainer, tmp_path)
    assert all((merged[i] == values).all() for i, values in far.items())
    trainer.begin(OptimizerOptions(lr=3e-2), 20)  # another phase: what is there now
    assert not any(values.any() for values in trainer.reference_kl(sequences, temperature=1.0).values())


def load_model_into(full: Trainer, trained: Trainer, folder: Path) -> dict[int, Any]:
    """KL of the merged model by a trainer of all weights, whose reference is the base."""
    trained.weights.export(folder / "merged")
    weights = load_model(folder / "merged")
    with torch.no_grad():
        for p, new in zip(full.network.parameters(), weights.parameters(), strict=True):
            p.copy_(new)
    return full.reference_kl(make_sequences(), temperature=1.0)


def test_a_resumed_learner_goes_on_bit_for_bit(base: Path, tmp_path: Path) -> None:
    whole = trainer_of(base)
    step(whole)
    (tmp_path / "saved").mkdir()
    whole.save(tmp_path / "saved")
    expected = step(whole, 1), published(whole, 2)[0].checksum
    resumed = trainer_of(base, lora=LORA.model_copy(update={"targets": LORA.targets}))
    step(resumed, 7)
    resumed.load(tmp_path / "saved")
    assert (step(resumed, 1), published(resumed, 2)[0].checksum) == expected
    saved = sum(file.stat().st_size for file in (tmp_path / "saved").iterdir())
    model = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert saved < model, "of the base there is nothing in it"


def test_adapters_of_other_weights_are_refused(base: Path, tmp_path: Path) -> None:
    trainer = trainer_of(base)
    (tmp_path / "saved").mkdir()
    trainer.save(tmp_path / "saved")
    other = Trainer(ModelOptions(path=str(base)), LearnerOptions(lora=LORA), KL, init="random", seed=6)
    other.begin(OptimizerOptions(), 20)
    with pytest.raises(CheckpointError, match="adapters of other weights"):
        other.load(tmp_path / "saved")


def test_an_export_is_merged_with_the_adapters_beside_it_and_both_go_on(base: Path, tmp_path: Path) -> None:
    trainer = trainer_of(base)
    step(trainer)
    trainer.weights.export(tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert same(found, dict(unpack(*published(trainer, 1, masters=True))))
    adapters = read_adapter(tmp_path / "out/adapter", trainer.network.config, LORA)
    assert same(adapters, dict(unpack(*published(trainer, 1))))
    again = trainer_of(base, lora=LORA.model_copy(update={"path": str(tmp_path / "out/adapter")}))
    assert published(again, 1)[0].checksum == published(trainer, 1)[0].checksum
    assert not any(v.any() for v in again.reference_kl(make_sequences(), temperature=1.0).values()), "it begins there"
