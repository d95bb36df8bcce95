"""Every name of another trainer in the table is answered, with its value, by keys and values that exist here."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launch.commands.flags import as_overrides
from launch.config import ConfigError, load_config
from launch.config.document import Document
from launch.config.foreign.answers import ABSENT, LEFT, last, plain
from launch.config.foreign.lookup import UNKNOWN, elsewhere, table
from launch.config.foreign.table import rows
from launch.config.load import validate
from launch.config.overrides import apply_overrides, contradictions
from launch.config.schema import by_name
from tests.docs.pages import ROOT
from tests.docs.test_docs import unknown_keys
from tests.launch.test_config_check import Write

VERL = Path(__file__).with_name("verl_keys.tsv")  # verl 0.5 to 0.9: key, its default as JSON, what it is here
NAMES = {
    example.partition("=")[0]: (example, *row.beside)
    for row in rows()
    for example in (*row.verl, *row.trl)
    if "*" not in example
}
OURS = re.compile(r"[a-z_]+(?:\.\w+)+=\S+")


def refused(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_answered_by_what_exists(write_config: Write, name: str) -> None:
    """And whatever overrides the answer gives have a type and range that the tree accepts."""
    if name in by_name():
        pytest.skip("it is called so here")
    example, *beside = NAMES[name]
    given = [other for other in beside if other.partition("=")[0] != name]
    (issue,) = (issue for issue in refused(write_config(), example, *given).issues if issue.key == name)
    assert issue.remedy
    assert "did you mean" not in issue.remedy or last(name) == last(issue.ours.partition("=")[0])
    assert list(unknown_keys(issue.remedy)) == []
    accepted(issue.ours)


def accepted(ours: str) -> None:
    document = Document(values={"run": {"name": "x"}, "model": {"path": "m"}, "data": {"train": "t"}})
    apply_overrides(document, shlex.split(ours))
    assert (document.issues, validate(document, "test")[1]) == ([], []), ours


def verl_keys() -> dict[str, tuple[Any, str]]:
    lines = (line.split("\t") for line in VERL.read_text(encoding="utf-8").splitlines())
    return {key: (json.loads(default), wanted) for key, default, wanted in lines}


def test_every_key_of_verls_trainer_is_answered_as_wanted() -> None:
    """The files that verl generates of its whole configuration, versions 0.5 to 0.9, each key with its default."""
    keys = verl_keys()
    written = {plain(key): value for key, (value, _) in keys.items() if value != "$"}
    wrong = {}
    for key, (default, wanted) in keys.items():
        said, ours = elsewhere(key, "${other}" if default == "$" else default, written)
        kind = "absent" if ABSENT in said else "left" if said.startswith(LEFT) else "said"
        if (ours or (kind if said and said != UNKNOWN else "")) != wanted:
            wrong[key] = (said, wanted)
        accepted(ours)
    assert (len(keys), wrong) == (941, {})


OTHER_OBJECTS = ("critic.", "reward_model.", "reward.reward_model.", "actor_rollout_ref.ref.", "distillation.")


@pytest.mark.parametrize("value", [1, 0.7, True, False, "bfloat16", "RM", [1, 2]])
def test_a_key_of_another_object_is_never_ours(value: object) -> None:
    """The critic's learning rate is not the actor's, the reward model's path is not the model's: no key of theirs is
    answered by an override, whatever its value; a child that verl has not, either."""
    known = [key for key in verl_keys() if key.startswith(OTHER_OBJECTS)]
    assert len(known) > 400
    unheard = [f"{prefix}{word}" for prefix in OTHER_OBJECTS for word in ("lr", "model.path", "rollout.n", "top_p")]
    for key in (*known, *unheard, "algorithm.rollout_correction.unheard_of", "actor_rollout_ref.actor.sub.lr"):
        said, ours = elsewhere(key, value, {})
        assert (bool(said), ours) == (True, ""), key
    for key in (key for key in verl_keys() if ".val_kwargs." in key):
        ours = elsewhere(key, value, {})[1]
        assert not ours or ours.strip("'").startswith("eval."), key


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # the estimator is an advantage: loss and aggregation stay clipped PPO and token mean
        ("algorithm.adv_estimator=grpo", "baseline=group normalize=group clip_low=0.2 clip_high=0.2"),
        ("algorithm.adv_estimator=rloo", "baseline=leave_one_out normalize=none clip_low=0.2 clip_high=0.2"),
        ("algorithm.adv_estimator=reinforce_plus_plus", "baseline=none normalize=whiten clip_low=0.2 clip_high=0.2"),
        (
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
            "actor_rollout_ref.actor.clip_ratio=0.1",
            "baseline=group normalize=none clip_low=0.1 clip_high=0.1",
        ),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio_high=0.28",
            "baseline=group normalize=group clip_low=0.2 clip_high=0.28",
        ),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gpg",
            "baseline=group normalize=group loss=policy_gradient",
        ),
        # the KL term: in the loss, in the reward, in neither
        (
            "algorithm.use_kl_in_reward=False actor_rollout_ref.actor.use_kl_loss=True "
            "actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=mse",
            "kl=k2 kl_in=loss kl_coef=0.01",
        ),
        ("actor_rollout_ref.actor.use_kl_loss=True algorithm.kl_ctrl.kl_coef=0.5", "kl=k3 kl_in=loss kl_coef=0.001"),
        (
            "actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.01 "
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
            "",
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.02",
            "kl=k1 kl_in=reward kl_coef=0.02",
        ),
        ("loss_type=grpo epsilon=0.1 epsilon_high=null", "aggregation=seq_mean_token_mean clip_low=0.1 clip_high=0.1"),
        ("loss_type=cispo epsilon_high=5.0", "loss=cispo aggregation=token_mean clip_high=4.0"),
        ("delta=null", "clip_dual=null"),
        # DAPO's buffer, as its scripts write it
        (
            "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 "
            "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=2.0 "
            "+reward_model.reward_kwargs.max_resp_len=20480",
            "overlong.buffer_tokens=4096 overlong.penalty=2.0",
        ),
        ("reward_model.overlong_buffer.enable=False reward_model.overlong_buffer.len=4096", ""),
        (
            "algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=20",
            "dynamic_sampling.max_rounds=20",
        ),
        (
            "algorithm.rollout_correction.rollout_rs=seq_sum_k1 "
            "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
            "sampler_correction.mask=sequence sampler_correction.low=0.5 sampler_correction.high=2.0",
        ),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=4.0",
            "sampler_correction.weights=token sampler_correction.truncate=4.0",
        ),
        (
            "vllm_importance_sampling_correction=True",  # sequence_mask at 3 is TRL's default
            "sampler_correction.weights=sequence sampler_correction.mask=sequence sampler_correction.low=null "
            "sampler_correction.high=3.0",
        ),
        (
            "vllm_importance_sampling_mode=token_truncate vllm_importance_sampling_clip_max=2.0",
            "sampler_correction.weights=token sampler_correction.truncate=2.0 sampler_correction.floor=null",
        ),
    ],
)
def test_objectives_are_what_theirs_are(write_config: Write, theirs: str, ours: str) -> None:
    """What all keys together say; it loads, so no answer contradicts another."""
    error = refused(write_config(), *theirs.split())
    said = dict.fromkeys(each for issue in error.issues for each in shlex.split(issue.ours))
    assert set(said) == {f"objective.{each}" for each in ours.split()}
    accepted(" ".join(map(shlex.quote, said)))
    assert "choose one" not in str(error.remedy)


SCRIPTS = (  # as in its examples: GRPO with KL, RLOO with KL in the reward, DAPO with LoRA, PPO with a critic
    "algorithm.adv_estimator=grpo {a}.use_kl_loss=True {a}.kl_loss_coef=0.001 {a}.kl_loss_type=low_var_kl "
    "algorithm.use_kl_in_reward=False {a}.fsdp_config.optimizer_offload=False {r}.free_cache_engine=True",
    "algorithm.adv_estimator=rloo {a}.use_kl_loss=False algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl "
    "algorithm.kl_ctrl.kl_coef=0.001 {a}.kl_loss_coef=0.1 {a}.clip_ratio=0.2 {a}.clip_ratio_high=0.28",
    "algorithm.adv_estimator=grpo data.gen_batch_size=768 algorithm.filter_groups.enable=True "
    "algorithm.filter_groups.max_num_gen_batches=10 {a}.clip_ratio_c=10.0 {a}.fsdp_config.optimizer_offload=True "
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
    "+reward_model.reward_kwargs.overlong_buffer_cfg.len=512 {m}.lora_rank=32 {m}.lora_alpha=32 "
    "{m}.target_modules=all-linear {r}.val_kwargs.do_sample=True {r}.val_kwargs.temperature=0.6 "
    "{r}.val_kwargs.top_p=0.7 {r}.val_kwargs.n=32 algorithm.rollout_correction.rollout_is=token "
    "algorithm.rollout_correction.rollout_is_threshold=2.0 algorithm.rollout_correction.rollout_rs=null",
    "critic.optim.lr=1e-5 critic.model.path=RM reward_model.model.path=RM reward_model.enable=True "
    "reward_model.rollout.response_length=8 {a}.use_gpg_loss=True {a}.clip_ratio_low=0.2",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_line_to_be_pasted_is_accepted(script: str) -> None:
    """By one of the examples that are shipped: nothing in it clashes, and nothing is another object's."""
    own = "data.train_batch_size=256 {a}.ppo_mini_batch_size=64 {a}.optim.lr=2e-6 {m}.path=other {r}.n=4 {r}.name=vllm "
    prefix = "actor_rollout_ref."
    given = (own + script).format(a=f"{prefix}actor", r=f"{prefix}rollout", m=f"{prefix}model").split()
    example = ROOT / "examples/gsm8k/qwen2.5-0.5b.yaml"
    error = refused(example, *given)
    first = str(error.remedy).splitlines()[0]
    ours = shlex.split(first.removeprefix("in Paceline's keys: "))
    assert "choose one" not in str(error.remedy)
    assert contradictions(ours) == []
    config = load_config(example, ours).config
    assert (config.learner.optimizer.lr, config.rollout.sampling.top_p) == (2e-6, 1.0)
    assert (Path(config.model.path).name, config.learner.mini_batches) == ("other", 4)


def test_variables_of_a_chat_template_keep_their_nesting() -> None:
    written = {"data.apply_chat_template_kwargs.a.b": 1, "data.apply_chat_template_kwargs.enable_thinking": False}
    _, ours = elsewhere("data.apply_chat_template_kwargs.a.b", 1, written)
    assert shlex.split(ours) == ["data.chat_template_kwargs={a: {b: 1}, enable_thinking: false}"]


def test_adapters_are_there_only_where_they_are_switched_on(write_config: Write) -> None:
    """verl writes lora_alpha beside lora_rank=0: `learner.lora.alpha` alone would make adapters."""
    model = "actor_rollout_ref.model."
    off = [f"{model}lora_rank=0", f"{model}lora_alpha=16", f"{model}target_modules=[q_proj]"]
    for given in (off, off[1:], ["use_peft=False", "lora_r=16", "lora_alpha=32"]):
        assert [issue.ours for issue in refused(write_config(), *given).issues] == [""] * len(given), given
    on = [f"{model}lora_rank=8", *off[1:], f"{model}lora_adapter_path=a"]
    said = [shlex.split(issue.ours) for issue in refused(write_config(), *on).issues]
    assert said == [[f"learner.lora.{each}"] for each in ("rank=8", "alpha=16", "targets=[q_proj]", "path=a")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("rollout.batch_size=8", "rollout.prompts_per_step (prompts) x rollout.rollouts_per_prompt"),
        ("batch_size=32", "rollout.prompts_per_step (prompts) x rollout.rollouts_per_prompt"),
        ("drafter=null", "set drafter.train=false"),
        ("learner=null", "leave it out: its keys then have their defaults"),
        ("optim=adamw_8bit", "is not supported"),
        ("algorithm.adv_estimator=opo", "is not supported"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "is not supported"),
        ("algorithm.rollout_correction.loss_type=ppo_clip", "leave it out"),
        ("actor_rollout_ref.actor.unheard_of=1", "Paceline has no known equivalent"),
        ("fp16=True", "is not supported: learner.autocast_bf16"),
        (
            "vllm_server_host=10.0.0.2",
            "leave it out: engines are workers of the run; vllm_mode=server is cluster.layout=",
        ),
        ("vllm_server_base_url=http://10.0.0.2:8000", "leave it out: engines are workers of the run"),
    ],
)
def test_a_key_is_answered_in_words(write_config: Write, given: str, words: str) -> None:
    (issue,) = refused(write_config(), given).issues
    assert words in issue.remedy
    assert (issue.ours, list(unknown_keys(issue.remedy))) == ("", [])


def test_values_are_translated_where_units_differ(write_config: Write) -> None:
    path = write_config("run: {name: x}\nmodel: {path: m}\ndata: {train: t}")
    rows = {
        # verl: prompts of an optimizer step; here: optimizer steps of an RL step
        "data.train_batch_size=1024 actor_rollout_ref.actor.ppo_mini_batch_size=256": "learner.mini_batches=4",
        "generation_batch_size=64 num_generations=16": "rollout.prompts_per_step=4",  # completions; prompts
        "trainer.save_freq=-1": "checkpoint.every=0",
        "actor_rollout_ref.rollout.top_k=-1": "rollout.sampling.top_k=0",
        "actor_rollout_ref.rollout.enforce_eager=True": "rollout.engine.cuda_graphs=false",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum": "objective.aggregation=seq_mean_token_sum",
        "scale_rewards=False": "objective.normalize=none",
        "beta=0.04": "objective.kl=k3 objective.kl_in=loss objective.kl_coef=0.04",
        "steps_per_generation=8 gradient_accumulation_steps=4": "learner.mini_batches=2",
        # TRL samples per_device x devices x steps_per_generation completions, by default the accumulated passes
        "per_device_train_batch_size=16 gradient_accumulation_steps=4 num_generations=8": "rollout.prompts_per_step=8",
        "per_device_train_batch_size=16 gradient_accumulation_steps=4 learner.ranks=4": "rollout.prompts_per_step=32",
        "per_device_train_batch_size=8 steps_per_generation=4 gradient_accumulation_steps=2": "learner.mini_batches=2",
        "per_device_train_batch_size=8 steps_per_generation=6 num_generations=4": "rollout.prompts_per_step=12",
        "per_device_train_batch_size=8 generation_batch_size=64": "learner.mini_batches=8",
        "eval_strategy=steps eval_steps=7": "eval.every=7",
        "eval_strategy=no": "eval.every=0",
        "vllm_mode=server": "cluster.layout=disaggregated",
        "vllm_mode=colocate": "cluster.layout=colocated",
        "bf16=False": "learner.autocast_bf16=false",
        "r=8": "learner.lora.rank=8",
        "trainer.experiment_name=a/b": "run.name=a_b",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True": "eval.temperature=0",
        "actor_rollout_ref.rollout.quantization=fp8": "rollout.quantization=fp8",
        "data.train_batch_size=512 data.gen_batch_size=1536": "rollout.prompts_per_step=512",
        "epsilon=0.1": "objective.clip_low=0.1 objective.clip_high=0.1",
        "data.train_files=[a.parquet]": "data.train=a.parquet",
    }
    for theirs, ours in rows.items():
        assert ours in [issue.ours for issue in refused(path, *theirs.split()).issues], theirs
    assert "(TRL's default: 8) x devices x this" in str(refused(path, "gradient_accumulation_steps=4"))
    assert "devices x steps_per_generation / num_generations" in str(refused(path, "per_device_train_batch_size=3"))
    assert "leave it out" in str(refused(path, "beta=0.0"))
    assert "no critic" in str(refused(path, "algorithm.adv_estimator=gae"))


def test_trls_bf16_goes_with_adapters_and_few_bits(write_config: Write) -> None:
    """autocast alone would leave float32 engines, which both refuse."""
    (issue,) = refused(write_config(), "bf16=True").issues
    ours = shlex.split(issue.ours)
    assert ours == ["model.dtype=bfloat16", "learner.autocast_bf16=true"]
    for other in ("learner.lora.rank=4", "rollout.quantization=w8a8"):
        load_config(write_config(), [*ours, other])
        assert "learner.autocast_bf16" in str(refused(write_config(), ours[1], other))


def test_a_whole_command_line_of_verls_comes_back_in_our_names(write_config: Write) -> None:
    """Every key by itself, and all that is the same here together, to be pasted."""
    theirs = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=5",
        "trainer.save_freq=20",
        "trainer.nnodes=1",
    ]
    error = refused(write_config(), *theirs, "actor_rollout_ref.actor.unheard_of=1", "rollout.n=[1, 2]")
    assert [issue.key for issue in error.issues] == [
        "rollout.n", "algorithm.adv_estimator", "actor_rollout_ref.rollout.n", "actor_rollout_ref.actor.unheard_of",
        "trainer.save_freq", "trainer.nnodes",
    ]  # fmt: skip
    assert error.remedy is not None
    assert error.remedy.startswith("in Paceline's keys: ")
    assert "objective.clip_high=0.2 checkpoint.every=20" in error.remedy
    assert "choose one: rollout.rollouts_per_prompt=[1, 2] or rollout.rollouts_per_prompt=5" in error.remedy


SLIME = """--hf-checkpoint Qwen/Qwen3-4B --prompt-data train.jsonl --input-key prompt --num-rollout 300
--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 2 --rollout-max-response-len 8192
--rollout-temperature 0.8 --rollout-top-k -1 --max-tokens-per-gpu 9216 --use-dynamic-batch-size --lr 1e-6
--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k1 --eps-clip-high 0.28 --eval-interval 20 --save-interval 50
--colocate --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --partial-rollout --use-tis
--unheard-of 3"""


def test_slimes_flags_come_back_in_our_names(write_config: Write) -> None:
    """As in its scripts, with hyphens, for train.py and train_async.py alike."""
    overrides = as_overrides(SLIME.split(), {"--resume": False, "--step": True})
    error = refused(write_config(), *overrides)
    said = {issue.key: issue for issue in error.issues}
    assert len(said) == SLIME.count("--")
    assert {key for key, issue in said.items() if not issue.remedy} <= {"unheard_of"}
    ours = " ".join(issue.ours for issue in error.issues if issue.ours)
    for one in (
        *("model.path=Qwen/Qwen3-4B", "run.steps=300", "rollout.prompts_per_step=32", "learner.mini_batches=2"),
        *("rollout.sampling.top_k=0", "learner.micro_batch_tokens=9216", "cluster.layout=colocated", "eval.every=20"),
        *("objective.kl=k1", "objective.kl_coef=0.01", "objective.clip_high=0.28", "cluster.gpus_per_worker=2"),
    ):
        assert one in ours.split(), one
    accepted(ours)
    assert "rollout.partial.tokens_per_step" in (said["partial_rollout"].remedy or "")


@pytest.mark.parametrize("flag", ["tensor-model", "pipeline-model", "context", "expert-model"])
def test_slimes_parallel_sizes_are_the_learners(write_config: Write, flag: str) -> None:
    """Not the engines', as verl's key with the same last word."""
    for size, answer in ((1, "leave it out"), (2, "is not supported: the learner is FSDP2")):
        (issue,) = refused(write_config(), *as_overrides([f"--{flag}-parallel-size", str(size)], {})).issues
        assert (answer in issue.remedy, issue.ours) == (True, ""), size
    said = elsewhere("actor_rollout_ref.rollout.tensor_model_parallel_size", 2, {})
    assert said[1] == "cluster.gpus_per_worker=2"


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        ("grpo --eps-clip 0.2 --eps-clip-high 0.28", "baseline=group normalize=group clip_low=0.2 clip_high=0.28"),
        ("grpo --eps-clip 0.1", "baseline=group normalize=group clip_low=0.1 clip_high=0.1"),
        ("grpo --eps-clip-high 0.28", "baseline=group normalize=group clip_low=0.2 clip_high=0.28"),
        ("gspo", "name=gspo"),
        ("gspo --eps-clip 3e-4 --eps-clip-high 4e-4", "name=gspo clip_low=0.0003 clip_high=0.0004"),
        ("cispo --eps-clip 1.0 --eps-clip-high 4.0", "name=cispo clip_low=null clip_high=4.0"),
        ("reinforce_plus_plus", "baseline=none normalize=whiten clip_low=0.2 clip_high=0.2"),
        ("reinforce_plus_plus_baseline", "baseline=group normalize=whiten clip_low=0.2 clip_high=0.2"),
        ("ppo", ""),
    ],
)
def test_slimes_estimators_are_objectives(write_config: Write, flags: str, ours: str) -> None:
    """Each of its choices, with the bounds beside it; none contradicts another. There is no critic."""
    overrides = as_overrides(f"--advantage-estimator {flags}".split(), {})
    error = refused(write_config(), *overrides)
    said = dict.fromkeys(each for issue in error.issues for each in shlex.split(issue.ours))
    assert set(said) == {f"objective.{each}" for each in ours.split()}
    assert "choose one" not in str(error.remedy)
    assert ("there is no critic" in str(error)) == (flags == "ppo")
    accepted(" ".join(map(shlex.quote, said)))


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.ppo_epochs", "num_iterations"])
def test_a_response_is_learned_from_once(write_config: Write, key: str) -> None:
    for value, answer in ((1, "leave it out: it is always 1, never more"), (4, "is not supported")):
        (issue,) = refused(write_config(), f"{key}={value}").issues
        assert (answer in issue.remedy, issue.ours) == (True, ""), value


def test_a_name_that_is_ours_is_never_in_the_table() -> None:
    known = by_name()
    assert [name for name in NAMES if "." in name and name in known and name != "data.train"] == []
    assert [plain(name) for name in NAMES if plain(name) in known] == [
        "model.path",
        "rollout.quantization",
    ]  # with verl's section before them


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "reference" / "coming_from.md").read_text(encoding="utf-8")
    lines = "\n".join(table())
    assert lines in page, "run: python -m tests.docs.reference"
    here = [line.rsplit("|", 2)[1] for line in page.splitlines() if line.startswith("|")]
    assert [key for cell in here for key in unknown_keys(cell)] == []
