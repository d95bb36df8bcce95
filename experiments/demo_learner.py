"""What the demo asks for and learns from, in this process: a run's own batches, groups and learner, without Ray.

Never decodes: whoever asks brings the rollouts.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from actors.data import Prompt, load_prompts, load_tokenizer
from actors.data.order import PromptOrder
from actors.rewards.grader import build
from actors.training.trainer import Trainer
from benchmarks.harness import DEMO
from benchmarks.tools.targets import Target
from config.model import ModelOptions
from contracts.rewards import GradeItem
from contracts.rollout import Rollout
from contracts.training import TrainSequence
from launch.batch import Batch, Pick, sampling_params
from launch.config import load_config
from launch.run.groups import Graded, Group, training_sequences
from launch.run.inputs import stop_tokens_of
from models.checkpoint import save_model
from models.manifest import WeightsManifest
from models.weights import Buffer


class DemoLearner:
    """The demo's config with another target, in float32 on this process's threads."""

    def __init__(self, target: Target, tokenizer: Path, steps: int, *, rate: float = 1.0, seed: int = 0) -> None:
        """rate: times the config's learning rate."""
        config = load_config(DEMO / "config.yaml").config
        self._config, self._seed = config, seed
        self._tokenizer = load_tokenizer(str(tokenizer))
        self.train = list(load_prompts(config.data, "train", self._tokenizer))
        self.held_out = list(load_prompts(config.data, "eval", self._tokenizer))
        self._order = PromptOrder(len(self.train), seed, config.data.shuffle)
        self._grader = build(config.reward)
        with tempfile.TemporaryDirectory() as folder:
            save_model(target.model, folder, tokenizer_dir=tokenizer, source_dir=tokenizer)
            model = ModelOptions(path=folder, batch_invariant=False)
            self._trainer = Trainer(model, config.learner, config.objective, seed=seed)
        optimizer = config.learner.optimizer
        optimizer = optimizer.model_copy(update={"lr": rate * optimizer.lr})
        self._trainer.begin(optimizer, steps * config.learner.mini_batches)

    def next_batch(self, prompts: int) -> Batch:
        """Of the next RL step."""
        picks = [Pick(epoch, self.train[index]) for epoch, index in self._order.take(prompts)]
        return self._batch(picks, self._config.rollout.rollouts_per_prompt)

    def sample(self, prompts: Sequence[Prompt], samples: int, epoch: int) -> Batch:
        """Other rollouts; `epoch` is below -1, so that their noise never meets that of learning."""
        return self._batch([Pick(epoch, prompt) for prompt in prompts], samples)

    def _batch(self, picks: Sequence[Pick], samples: int) -> Batch:
        sampling = sampling_params(self._config.rollout.sampling, stop_tokens_of(self._config, self._tokenizer))
        lengths = [float(sampling.max_new_tokens)] * len(picks)
        return Batch(picks, [samples] * len(picks), sampling, seed=self._seed, expected_tokens=lengths)

    def learn(self, batch: Batch, rollouts: Mapping[int, Rollout]) -> float:
        """Grade and learn; returns the mean reward."""
        groups = self._groups(batch, rollouts)
        self._trainer.rl_step(self._sequences(groups), temperature=self._config.rollout.sampling.temperature)
        return _mean_reward(groups)

    def reward(self, batch: Batch, rollouts: Mapping[int, Rollout]) -> float:
        """The mean; nothing learns."""
        return _mean_reward(self._groups(batch, rollouts))

    def sequences(self, batch: Batch, rollouts: Mapping[int, Rollout]) -> list[TrainSequence]:
        """What `learn` would learn from, graded; nothing learns."""
        return self._sequences(self._groups(batch, rollouts))

    def _groups(self, batch: Batch, rollouts: Mapping[int, Rollout]) -> list[Group]:
        return [
            Group(pick, [self._graded(pick.prompt, rollouts[number]) for number in batch.ids(index)])
            for index, pick in enumerate(batch.picks)
        ]

    def _sequences(self, groups: Sequence[Group]) -> list[TrainSequence]:
        limit = self._config.rollout.sampling.max_new_tokens
        options = self._config.objective
        return training_sequences(groups, options, prompts_per_step=len(groups), max_new_tokens=limit)[0]

    def _graded(self, prompt: Prompt, rollout: Rollout) -> Graded:
        text = self._tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        item = GradeItem(
            prompt=prompt.text,
            response=text,
            record=prompt.record,
            finish_reason=rollout.finish_reason,
            tokens=rollout.tokens,
        )
        return Graded(rollout=rollout, grade=self._grader.grade(item), text=text)

    def weights(self, version: int) -> tuple[WeightsManifest, Buffer]:
        """As engines take them."""
        published = self._trainer.publish(version)
        assert published is not None
        return published


def _mean_reward(groups: Sequence[Group]) -> float:
    return fmean(member.grade.value for group in groups for member in group.members)
