"""The configuration tree: one typed object for a whole run. Each section is defined in a module of its own."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from config.catalogue import FRESH_WEIGHTS, fresh_path
from config.coordinator import CoordinatorOptions
from config.data import DataOptions, PromptsOptions, TrainSetOptions
from config.drafter import DrafterOptions
from config.environments import EnvironmentOptions
from config.learner import LearnerOptions, WarmupOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from config.rewards import RewardOptions
from config.rollout import RolloutOptions
from config.rules import Different, NotWith, OnlyWith
from config.speculation import SpeculationOptions
from config.spot import SpotOptions

TRAIN_SET, EVAL_SET = "train", "eval"  # names of the sets of data.train and data.eval


class RunOptions(BaseModel, frozen=True, extra="forbid"):
    """Identity and length of the run."""

    name: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=200, description="name of the run's folder in run.dir"
        ),
    ]
    dir: Annotated[str, Field(description="folder that holds the runs")] = "runs"
    seed: Annotated[int, Field(ge=0, description="seed of prompts, tokens and losses")] = 0
    steps: Annotated[int, Field(ge=1, le=10**9, description="RL steps")] = 100


class EvalSetOptions(PromptsOptions, frozen=True, extra="forbid"):
    """A held-out set; what it does not say is as the sections `eval` and `data` have it."""

    samples: Annotated[int | None, Field(ge=1, le=10**5, description="default: eval.samples")] = None
    temperature: Annotated[float | None, Field(ge=0, le=10, description="default: eval.temperature")] = None
    top_k: Annotated[int | None, Field(ge=0, description="default: eval.top_k")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="default: eval.top_p")] = None
    max_new_tokens: Annotated[int | None, Field(ge=1, le=10**8, description="default: eval.max_new_tokens")] = None


class EvalOptions(BaseModel, frozen=True, extra="forbid"):
    """Held-out evaluation on data.eval, or on several sets: mean reward, pass@k and maj@k of `samples` responses per
    prompt."""

    every: Annotated[int, Field(ge=0, description="RL steps between evaluations; 0: only before and after")] = 0
    samples: Annotated[int, Field(ge=1, le=10**5, description="responses per held-out prompt")] = 4
    at: Annotated[
        tuple[Annotated[int, Field(ge=1)], ...] | None,
        Field(min_length=1, description="values of k for pass@k and maj@k; default: 1 and samples"),
    ] = None
    temperature: Annotated[float, Field(ge=0, le=10, description="0: greedy")] = 1.0
    top_k: Annotated[int, Field(ge=0, description="0: off")] = 0
    top_p: Annotated[float, Field(gt=0, le=1, description="1: off")] = 1.0
    max_new_tokens: Annotated[
        int | None, Field(ge=1, le=10**8, description="default: rollout.sampling.max_new_tokens")
    ] = None
    sets: Annotated[
        tuple[EvalSetOptions, ...],
        Field(description="Several named held-out sets, in place of data.eval."),
        NotWith(
            "data.eval",
            said="is set, and so is data.eval, which is one set",
            remedy="make it one of eval.sets, or leave it out",
        ),
        Different("name", "sets"),
    ] = ()


class CheckpointOptions(BaseModel, frozen=True, extra="forbid"):
    """Whole-run checkpoints, written atomically."""

    every: Annotated[int, Field(ge=0, description="RL steps between checkpoints; 0: only at the end")] = 10
    keep: Annotated[int, Field(ge=1, description="number that is kept")] = 2
    best: Annotated[bool, Field(description="with eval.every: keep the best model in the run's best/")] = True
    best_metric: Annotated[
        str, Field(pattern=r"^eval/.+$", description="metric that decides, higher is better, e.g. eval/aime/pass@8")
    ] = "eval/reward"


class ClusterOptions(BaseModel, frozen=True, extra="forbid"):
    """Where the actors run."""

    address: Annotated[str | None, Field(description="Ray address; default: RAY_ADDRESS, else a Ray of its own")] = None
    layout: Annotated[
        Literal["embedded", "colocated", "disaggregated"],
        Field(
            description="embedded: CPU only; colocated: learner and rollout share GPUs; disaggregated: separate GPUs"
        ),
    ] = "embedded"
    gpus_per_worker: Annotated[
        float,
        Field(ge=0, le=1024, description="GPUs per rollout worker; above 1: tensor parallel"),
    ] = 1
    gpus_per_learner: Annotated[float, Field(ge=0, le=1024, description="GPUs per learner rank")] = 1
    gpu: Annotated[
        str | None,
        Field(description="smallest GPU of the run, e.g. A10G, for the memory check; default: as found"),
        NotWith(
            "layout",
            ("embedded",),
            said="is set, but cluster.layout is embedded (CPU only)",
            remedy="leave it out, or set cluster.gpu=null",
        ),
    ] = None
    cpus_per_worker: Annotated[float, Field(ge=0, le=4096, description="CPUs that Ray reserves per rollout worker")] = 1
    cpus_per_learner: Annotated[float, Field(ge=0, le=4096, description="CPUs that Ray reserves per learner rank")] = 1
    rollout_resource: Annotated[
        str | None,
        Field(description="disaggregated: custom Ray resource of the rollout nodes"),
        OnlyWith("layout", ("disaggregated",)),
    ] = None
    learner_resource: Annotated[
        str | None,
        Field(description="disaggregated: custom Ray resource of the learner nodes"),
        OnlyWith("layout", ("disaggregated",)),
    ] = None
    weights: Annotated[
        Literal["auto", "store", "ipc", "broadcast"],
        Field(description="how engines get new weights (docs/concepts/fleet.md); auto: by layout"),
    ] = "auto"
    weights_delta: Annotated[
        Literal["auto", "never", "always"],
        Field(description="send only the elements that changed (docs/concepts/fleet.md); auto: to other nodes"),
    ] = "auto"
    offload: Annotated[
        Literal["auto", "never", "always"],
        Field(description="free memory of a shared GPU between phases; auto: if it needs it"),
        NotWith(
            "rollout.staleness",
            own="always",
            said="always has engines sleep while the learner works, when rollout.staleness={other} has them sample",
            remedy="leave it out, or set rollout.staleness=0",
        ),
    ] = "auto"
    start_timeout_s: Annotated[float, Field(gt=0, description="seconds to wait for nodes and actors")] = 600.0
    ray_timeout_s: Annotated[
        float,
        Field(gt=0, description="the run ends if Ray's servers (GCS, raylet) are silent for longer"),
    ] = 45.0
    spot: SpotOptions = SpotOptions()


class ObserveOptions(BaseModel, frozen=True, extra="forbid"):
    """What is shown and written beside metrics.jsonl."""

    live: Annotated[bool, Field(description="live view on a terminal; false: one line per step")] = True
    tensorboard: Annotated[bool, Field(description="write scalars and responses for TensorBoard")] = True
    wandb_project: Annotated[str | None, Field(description="W&B project; needs the extra `wandb`; null: off")] = None
    samples_per_step: Annotated[int, Field(ge=0, description="responses per RL step in samples.jsonl")] = 4
    eval_samples: Annotated[
        int | None,
        Field(
            ge=0,
            description="responses per held-out set in eval_samples.jsonl; null: all",
        ),
    ] = 16


class Config(BaseModel, frozen=True, extra="forbid"):
    """Everything a run needs."""

    run: RunOptions
    model: ModelOptions
    data: DataOptions
    rollout: RolloutOptions = RolloutOptions()
    drafter: DrafterOptions = DrafterOptions()
    coordinator: CoordinatorOptions = CoordinatorOptions()
    learner: LearnerOptions = LearnerOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    environment: EnvironmentOptions | None = None
    reward: RewardOptions = RewardOptions()
    warmup: WarmupOptions | None = None
    eval: EvalOptions = EvalOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    cluster: ClusterOptions = ClusterOptions()
    observe: ObserveOptions = ObserveOptions()

    @property
    def train_sets(self) -> dict[str, TrainSetOptions]:
        """All training sets, by the key of their path: data.sets, or data.train as the set `train`.

        Sets of data.reasoning_gym have no path before launch.config.gym has made their files."""
        sets = {f"data.sets.{index}.path": one for index, one in enumerate(self.data.sets)}
        for index, task in enumerate(self.data.reasoning_gym):
            sets[f"data.reasoning_gym.{index}"] = TrainSetOptions(name=task.name, path="", weight=task.weight)
        if not sets and self.data.train is not None:
            sets = {"data.train": TrainSetOptions(name=TRAIN_SET, path=self.data.train)}
        return sets

    @property
    def eval_sets(self) -> dict[str, EvalSetOptions]:
        """All evaluation sets, by the key of their path: eval.sets, or data.eval as the set `eval`, and the held-out
        part of data.reasoning_gym.

        Unset sample counts and sampling parameters of a set come from the section."""
        e = self.eval
        sets = {f"eval.sets.{index}.path": one for index, one in enumerate(e.sets)}
        if not sets and self.data.eval is not None:
            sets = {"data.eval": EvalSetOptions(name=EVAL_SET, path=self.data.eval)}
        for index, task in enumerate(self.data.reasoning_gym):
            if task.eval:
                sets[f"data.reasoning_gym.{index}"] = EvalSetOptions(name=task.name, path="")
        usual = {
            "samples": e.samples,
            "temperature": e.temperature,
            "top_k": e.top_k,
            "top_p": e.top_p,
            "max_new_tokens": e.max_new_tokens or self.rollout.sampling.max_new_tokens,
        }
        return {
            key: one.model_copy(update={name: value for name, value in usual.items() if getattr(one, name) is None})
            for key, one in sets.items()
        }

    @property
    def engine_ranks(self) -> int:
        """Number of ranks of each engine: rollout.engine.tensor_parallel, or a worker's GPUs."""
        engine, cluster = self.rollout.engine, self.cluster
        if engine.tensor_parallel is not None:
            return engine.tensor_parallel
        on_gpus = cluster.layout != "embedded" and engine.device != "cpu"
        return max(1, int(cluster.gpus_per_worker)) if on_gpus else 1

    @property
    def speculation(self) -> SpeculationOptions:
        """`rollout.speculation` as engines receive it. A drafter to be trained without given weights starts from fresh
        ones of the trained kind."""
        options, drafter = self.rollout.speculation, self.drafter
        if not drafter.train or options.eagle.path not in (None, FRESH_WEIGHTS):
            return options
        path = fresh_path("eagle3", drafter.layers) if drafter.algorithm == "eagle3" else FRESH_WEIGHTS
        return options.model_copy(update={"eagle": options.eagle.model_copy(update={"path": path})})
