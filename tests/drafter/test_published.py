"""EAGLE-3 heads that others publish: read, drafted with, trained and written back; and what is wrong with one is named.

`speculators` itself is the oracle where an interpreter has it: PACELINE_SPECULATORS_PYTHON names one.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engine.native.engine import NativeEngine
from actors.spot.checkpoints import Checkpoints
from config.drafter import DrafterOptions
from config.speculation import EagleOptions
from config.strategy import Strategy
from drafter.eagle import EagleDrafter, load_eagle, save_eagle
from drafter.eagle.model import Eagle3Model, copy_of
from drafter.export import export_drafter
from drafter.published import EagleWeightsError
from drafter.training.collect import collect_records
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from launch.drafter.export import export
from launch.drafter.training import CHECKPOINTS_DIR
from launch.errors import UsageError
from models.checkpoint import init_model, save_model
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.drafter.published_support import FLAGS, IDS, H, chain_logits, write_head
from tests.drafter.test_eagle_device import Compared, engine_with, planned
from tests.engine.support import VOCAB, assert_same, make_requests, options_of, run, write_config

SETTINGS: Any = {"dtype": torch.float32, "device": "cpu", "batch_invariant": True}
TOKENS = torch.tensor([0, 3, 4, 9, 17, 18, 20, 33, 41, 60])
CASES: list[tuple[str, str, torch.Tensor | None, dict[str, bool]]] = [
    ("speculators", "llama", TOKENS, {}),
    ("speculators", "qwen3", None, {"norm_before_residual": True}),
    ("speculators", "llama", TOKENS, {"norm_before_fc": True}),
    ("specforge", "llama", TOKENS, {"fc_norm": True, "norm_output": True}),
    ("specforge", "llama", None, {}),
    ("authors", "llama", TOKENS, {}),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("target")
    model = init_model(write_config(folder / "source", num_hidden_layers=8), 0, batch_invariant=True)
    save_model(model, folder / "model")
    return model.requires_grad_(False)


@pytest.fixture
def folder(target: Transformer, tmp_path: Path) -> Path:
    save_model(target, tmp_path / "target")
    return tmp_path


def loaded(path: Path, target: Transformer) -> Eagle3Model:
    model = load_eagle(path, target.config, **SETTINGS)
    assert isinstance(model, Eagle3Model)
    return model


def logits_of(model: Eagle3Model, target: Transformer) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(19, 3 * H, generator=generator)
    tokens = torch.randint(0, VOCAB, (19,), generator=generator)
    with torch.no_grad():
        return chain_logits(model, target.embed_tokens.weight, hidden, tokens, 3)


@pytest.mark.parametrize(("form", "kind", "tokens", "flags"), CASES)
def test_a_head_is_read_and_written_back(
    target: Transformer, folder: Path, form: str, kind: str, tokens: torch.Tensor | None, flags: dict[str, bool]
) -> None:
    """Every tensor of the file has its place, and comes back under its name: in both forms, and in ours."""
    given = write_head(folder / "head", form, VOCAB, tokens, kind, **flags)
    model = loaded(folder / "head", target)
    assert model.layers == ((1, 3, 4) if form == "authors" else (1, 2, 4))
    assert (None if model.ids is None else model.ids.tolist()) == (None if tokens is None else tokens.tolist())
    assert {flag: getattr(model.shape, flag) for flag in FLAGS} == {flag: flags.get(flag, False) for flag in FLAGS}
    wanted = logits_of(model, target)
    save_eagle(model, folder / "ours")
    copies = [copy_of(model, **SETTINGS), loaded(folder / "ours", target)]
    for to in ("vllm", "speculators"):
        export_drafter(folder / "ours", folder / "target", folder / to, form=to)
        back = load_file(folder / to / "model.safetensors")
        names = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in back.items()}
        more = {"embed_tokens.weight"} if to == "speculators" else set()
        assert names.keys() == {name.replace("midlayer.", "layers.0.") for name in given} | more
        for name, tensor in given.items():
            assert torch.equal(names[name.replace("midlayer.", "layers.0.")], tensor), name
        copies.append(loaded(folder / to, target))
    for copy in copies:
        for one, other in zip(logits_of(copy, target), wanted, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("strategy", ["eagle:3", "eagle:3x2/5"])
@pytest.mark.parametrize(("form", "kind", "tokens", "flags"), CASES)
def test_no_token_changes(
    target: Transformer,
    tmp_path: Path,
    form: str,
    kind: str,
    tokens: torch.Tensor | None,
    flags: dict[str, bool],
    strategy: str,
) -> None:
    """Drafts of ten tokens of sixty-one, truncated and at temperatures of 0 and 1: the target's own text."""
    write_head(tmp_path / "head", form, VOCAB, tokens, kind, **flags)
    options = options_of()
    blocks = options.kv_tokens // options.block_tokens
    drafter = EagleDrafter(
        target,
        EagleOptions(path=str(tmp_path / "head"), min_probability=0),
        options.max_running,
        blocks,
        options.block_tokens,
    )
    requests = make_requests(5, seed=3, max_new_tokens=30)
    for sampling in ({"temperature": 0.0}, {"top_p": 0.9, "top_k": 12}):
        more = make_requests(3, seed=8, max_new_tokens=30, **sampling)
        requests += [replace(request, request_id=request.request_id + 50 * len(requests)) for request in more]
    policy = FixedPolicy(Strategy.parse(strategy))
    core = NativeEngine(target, options, drafters={"eagle": drafter}, policy=policy, hidden_tokens=16)
    assert_same(run(core, requests), run(NativeEngine(target, options), requests))


@pytest.mark.parametrize("strategy", ["eagle:3", "eagle:3x2/5"])
@pytest.mark.parametrize(("form", "kind", "tokens", "flags"), CASES[:4])
def test_passes_of_a_device_draft_the_same(
    target: Transformer,
    tmp_path: Path,
    form: str,
    kind: str,
    tokens: torch.Tensor | None,
    flags: dict[str, bool],
    strategy: str,
) -> None:
    """Those that a GPU makes, run by torch here: own widths, norms, RoPE and vocabulary, as replays."""
    write_head(tmp_path / "head", form, VOCAB, tokens, kind, **flags)
    drafter = Compared(target, EagleOptions(path=str(tmp_path / "head"), min_probability=0))
    planned(drafter, strategy)
    run(engine_with(target, drafter, FixedPolicy(Strategy.parse(strategy))), make_requests(5, seed=3))
    assert drafter.drafted > 40


def test_drafts_are_of_the_vocabulary_and_are_accepted_once_fitted(target: Transformer, tmp_path: Path) -> None:
    """A few updates on the target's own texts: the head drafts only its ten tokens, and they are taken far more often.

    What is not trained (d2t) stays, and the state goes into the engine by `update`."""
    write_head(tmp_path / "head", "speculators", VOCAB, TOKENS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 6).astype(np.int32) for _ in range(12)]
    texts = [np.resize(TOKENS.numpy()[rng.integers(0, 10, 5)], 30).astype(np.int32) for _ in prompts]
    trainer = DrafterTrainer(
        TargetHead.of(target, 0),
        DrafterOptions(algorithm="eagle3", learning_rate=3e-3),
        model=load_eagle(tmp_path / "head", target.config, **SETTINGS),
    )
    records = list(collect_records(target, prompts, texts, layers=trainer.model.layers, version=1))
    before = trainer.evaluate(records)
    for _ in range(25):
        trainer.micro_step(records)
    after = trainer.evaluate(records)
    assert after.loss < before.loss
    assert after.accuracy > before.accuracy + 0.1
    assert trainer.model.ids is not None
    assert trainer.model.ids.tolist() == TOKENS.tolist()
    options = options_of()
    blocks = options.kv_tokens // options.block_tokens
    drafter = EagleDrafter(
        target, EagleOptions(path=str(tmp_path / "head")), options.max_running, blocks, options.block_tokens
    )
    drafter.update(3, {name: tensor.detach() for name, tensor in trainer.model.state_dict().items()})
    assert torch.equal(drafter.model.state_dict()["lm_head.weight"], trainer.model.state_dict()["lm_head.weight"])


def test_a_soft_target_counts_by_what_the_head_can_draft(target: Transformer, tmp_path: Path) -> None:
    """The loss of one pass is -sum over its tokens of p log q, p of the whole vocabulary: by hand from the states."""
    write_head(tmp_path / "head", "speculators", VOCAB, TOKENS)
    model = loaded(tmp_path / "head", target)
    prompt, text = np.array([5], np.int32), np.arange(20, 26, dtype=np.int32)
    (record,) = collect_records(target, [prompt], [text], layers=model.layers)
    trainer = DrafterTrainer(TargetHead.of(target, 0), DrafterOptions(algorithm="eagle3"), model=model)
    trainer.variant = replace(trainer.variant, passes=1)
    states = torch.from_numpy(record.states).view(torch.float32)
    tokens = torch.from_numpy(record.tokens.astype(np.int64))
    with torch.no_grad():
        (drafted,) = chain_logits(model, target.embed_tokens.weight, states[:-1, : 3 * H], tokens[1:-1], 1)
        target_logits = target.logits(states[1:, -H:])
    expected = -(target_logits.softmax(-1)[:, TOKENS] * drafted.log_softmax(-1)).sum(-1).mean()
    assert trainer.evaluate([record]).loss == pytest.approx(expected.item(), rel=1e-5)


def _change(**changes: Any) -> Callable[[Path], None]:
    def write(head: Path) -> None:
        config = json.loads((head / "config.json").read_text())
        layer = config["transformer_layer_config"]
        for key, value in changes.items():
            (layer if key in layer else config)[key] = value
        (head / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))

    return write


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(head: Path) -> None:
        tensors = load_file(head / "model.safetensors")
        change(tensors)
        save_file(tensors, head / "model.safetensors")

    return write


def _cut(head: Path) -> None:
    whole = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return _tensors(lambda t: t.__setitem__(name, change(t[name])))


def _far(table: torch.Tensor) -> torch.Tensor:
    table[9] = 1000
    return table


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "kind": (_change(speculators_model_type="dflash"), "config.json: speculators_model_type is 'dflash'"),
    "algorithm": (_change(speculators_config={"algorithm": "mtp"}), "speculators_config.algorithm is 'mtp'"),
    "width": (_change(hidden_size=64), "another target: its hidden_size is 64, and the model has 32"),
    "vocabulary": (_change(vocab_size=99), "another target: its vocab_size is 99, and the model has 61"),
    "target's width": (_change(target_hidden_size=128), "its target_hidden_size is 128"),
    "depth": (_change(num_hidden_layers=2), "num_hidden_layers is 2"),
    "layers": (_change(eagle_aux_hidden_state_layer_ids=[2, 18, 33]), r"layer_ids is \[2, 18, 33\].* from 1 to 8"),
    "four layers": (_change(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]), "heads that fuse three layers"),
    "family": (_change(model_type="gemma3"), "model_type is 'gemma3'"),
    "rope": (_change(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "config.json: RoPE scaling 'yarn'"),
    "draft vocabulary": (_change(draft_vocab_size=100), "draft_vocab_size is 100"),
    "embedding": (_change(embed_requires_grad=True), "embed_requires_grad=true"),
    "parallel": (_change(mask_token_id=3), "mask_token_id"),
    "residual": (_change(norm_before_residual="gone"), "norm_before_residual is missing"),
    "norms": (_change(fc_norm=True, norm_before_fc=True), "exclude each other"),
    "architecture": (
        _change(speculators_model_type="gone", architectures=["MedusaModel"]),
        "architectures is 'MedusaModel', which is no EAGLE-3 head",
    ),
    "half": (_tensors(lambda t: t.pop("layers.0.mlp.up_proj.weight")), "safetensors: layers.0.mlp.up_proj.weight is"),
    "no table": (_tensors(lambda t: t.pop("d2t")), "safetensors: d2t is missing, and the head has 10 rows for 61"),
    "far": (_with("d2t", _far), r"d2t\[9\] = 1000 makes token 1009 of row 9, and the target has tokens 0 to 60"),
    "negative": (_with("d2t", lambda t: t - 1), r"d2t\[0\] = -1 makes token -1"),
    "twice": (_with("d2t", torch.zeros_like), "t2d and d2t name different tokens"),
    "short table": (_with("d2t", lambda t: t[:5].clone()), r"d2t is \[5\]"),
    "same token": (_with("d2t", lambda t: 3 - torch.arange(len(t))), "the same token"),
    "shape": (_with("fc.weight", lambda t: t[:, :H].contiguous()), r"fc.weight is \[32, 32\], .* make it \[32, 96\]"),
    "unknown": (_tensors(lambda t: t.__setitem__("medusa.weight", torch.ones(1))), "medusa.weight is no tensor of"),
    "not finite": (_with("norm.weight", lambda t: t * float("nan")), "norm.weight has values that are not finite"),
    "cut file": (_cut, "model.safetensors cannot be read"),
    "no file": (lambda head: (head / "model.safetensors").unlink(), "neither model.safetensors nor"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(target: Transformer, tmp_path: Path, name: str) -> None:
    break_it, message = WRONG[name]
    write_head(tmp_path / "head", "speculators", VOCAB, TOKENS)
    break_it(tmp_path / "head")
    with pytest.raises(EagleWeightsError, match=message) as caught:
        load_eagle(tmp_path / "head", target.config, **SETTINGS)
    assert str(tmp_path / "head") in str(caught.value)


def test_an_eagle_1_head_is_told_apart(target: Transformer, tmp_path: Path) -> None:
    write_head(tmp_path / "head", "authors", VOCAB, TOKENS)
    config = json.loads((tmp_path / "head/config.json").read_text())
    del config["draft_vocab_size"]
    (tmp_path / "head/config.json").write_text(json.dumps(config))
    with pytest.raises(EagleWeightsError, match="an EAGLE-1 or EAGLE-2 head"):
        load_eagle(tmp_path / "head", target.config, **SETTINGS)


def speculators(*arguments: str) -> None:
    script = Path(__file__).with_name("speculators_run.py")
    done = subprocess.run(
        [os.environ["PACELINE_SPECULATORS_PYTHON"], str(script), *arguments],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("PACELINE_SPECULATORS_PYTHON" not in os.environ, reason="it names no interpreter with speculators")
def test_speculators_computes_the_same(target: Transformer, folder: Path) -> None:
    """Heads that it makes are read, those written here are loaded by it, and logits of three passes agree to 1e-5."""
    speculators("make", str(folder), json.dumps(IDS), str(VOCAB))
    heads = sorted((folder / "made").iterdir())
    assert len(heads) == 5
    for head in heads:
        export_drafter(head, folder / "target", folder / "written" / head.name, form="speculators")
    for name in ("made", "written"):
        speculators("logits", str(folder), name, str(VOCAB))
        for head in heads:
            model, theirs = loaded(head, target), load_file(folder / "theirs" / f"{name}_{head.name}.safetensors")
            with torch.no_grad():
                ours = chain_logits(model, target.embed_tokens.weight, theirs["hidden"], theirs["tokens"], 3)
            for index in range(3):
                known = len(theirs["tokens"]) - index
                torch.testing.assert_close(ours[index][:known], theirs["logits"][index][:known], rtol=1e-5, atol=1e-5)


def test_what_a_run_trained_of_a_head_is_written_back(target: Transformer, folder: Path) -> None:
    """The newest of the trainers' checkpoints, in both forms: the trained tensors, and the tables of the file."""
    given = write_head(folder / "head", "speculators", VOCAB, TOKENS)
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        f"run: {{name: run, steps: 1}}\nmodel: {{path: {folder}/target}}\ndata: {{train: none.jsonl}}\n"
        f"rollout: {{workers: 2, speculation: {{eagle: {{path: {folder}/head}}}}}}\n"
        "drafter: {train: true, algorithm: eagle3}\n"
    )
    with pytest.raises(UsageError, match="no trained drafter of"):
        export(run, folder / "target", folder / "out", "eagle3")
    trainer = DrafterTrainer(
        TargetHead.of(target, 0),
        DrafterOptions(algorithm="eagle3", learning_rate=3e-3),
        model=load_eagle(folder / "head", target.config, **SETTINGS),
    )
    text = np.arange(40, dtype=np.int32) % VOCAB
    trainer.micro_step(list(collect_records(target, [text[:4]], [text[4:]], layers=trainer.model.layers)))
    saved = Checkpoints(run / CHECKPOINTS_DIR, 2, torch.float32, SimpleNamespace(send=len))
    assert saved.save(trainer.steps, trainer.state_dict())
    saved.wait()
    for form in ("vllm", "speculators"):
        export(run, folder / "target", folder / form, "eagle3", form)
        written = load_file(folder / form / "model.safetensors")
        assert torch.equal(written["d2t"], given["d2t"])
        assert torch.equal(written["lm_head.weight"], trainer.model.state_dict()["lm_head.weight"])
        assert not torch.equal(written["lm_head.weight"], given["lm_head.weight"])
        again = loaded(folder / form, target)
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
