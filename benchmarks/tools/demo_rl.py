"""The demo's reinforcement learning in this process: its prompts, rewards and learner, a step at a time. No Ray.

Owns what an RL step asks for and what is learned from it, as a run does; never decodes.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from actors.data import Prompt, load_prompts, load_tokenizer
from actors.engine.types import Request, Rollout
from actors.rewards.grader import build
from actors.rewards.types import GradeItem
from actors.training.trainer import Trainer
from actors.training.types import TrainSequence
from benchmarks.tools.targets import ROOT, Target
from launch.config import load_config
from launch.run.batch import Batch, Pick, sampling_params
from launch.run.inputs import stop_tokens_of
from models.checkpoint import save_model
from models.manifest import WeightsManifest
from models.options import ModelOptions
from models.weights import Buffer
from policies.advantages import group_advantages

CONFIG = ROOT / "examples" / "guess_and_check" / "config.yaml"


@dataclass(frozen=True, slots=True)
class Asked:
    """The rollouts of one RL step: `samples` of each prompt."""

    prompts: list[Prompt]
    requests: Sequence[Request]


class DemoRl:
    """The demo's config with another target, in float32 on this process's threads."""

    def __init__(self, target: Target, tokenizer: Path, steps: int, *, rate: float = 1.0, seed: int = 0) -> None:
        """rate: times the config's learning rate."""
        config = load_config(CONFIG).config
        self._config, self._seed = config, seed
        self._tokenizer = load_tokenizer(str(tokenizer))
        self.train = list(load_prompts(config.data, "train", self._tokenizer))
        self.held_out = list(load_prompts(config.data, "eval", self._tokenizer))
        self._grader = build(config.reward)
        with tempfile.TemporaryDirectory() as folder:
            save_model(target.model, folder, tokenizer_dir=tokenizer, source_dir=tokenizer)
            model = ModelOptions(path=folder, batch_invariant=False)
            self._trainer = Trainer(model, config.learner, config.objective, seed=seed)
        optimizer = config.learner.optimizer
        optimizer = optimizer.model_copy(update={"lr": rate * optimizer.lr})
        self._trainer.begin(optimizer, steps * config.learner.mini_batches)

    def step(self, number: int, prompts: int) -> Asked:
        """Of RL step `number` (from 0): the next prompts in the seed's order, new in each epoch."""
        first = number * prompts
        epochs = {
            epoch: np.random.default_rng((self._seed, epoch)).permutation(len(self.train))
            for epoch in range(first // len(self.train), (first + prompts - 1) // len(self.train) + 1)
        }
        places = [divmod(i, len(self.train)) for i in range(first, first + prompts)]
        picks = [Pick(epoch, self.train[int(epochs[epoch][place])]) for epoch, place in places]
        return self._ask(picks, self._config.rollout.rollouts_per_prompt)

    def sample(self, prompts: Sequence[Prompt], samples: int, epoch: int) -> Asked:
        """Other rollouts; `epoch` is negative, so that their noise never meets that of learning."""
        return self._ask([Pick(epoch, prompt) for prompt in prompts], samples)

    def learn(self, asked: Asked, rollouts: Mapping[int, Rollout]) -> float:
        """Grade and learn, as an RL step does; returns the mean reward."""
        rewards = [
            self._reward(asked.prompts[i], rollouts[request.request_id]) for i, request in self._by_prompt(asked)
        ]
        samples = len(asked.requests) // len(asked.prompts)
        objective = self._config.objective
        sequences: list[TrainSequence] = []
        for start in range(0, len(rewards), samples):
            group = group_advantages(rewards[start : start + samples], normalize_std=objective.normalize == "group")
            if group.zero_variance and objective.drop_zero_variance and not objective.teaches_without_advantage:
                continue
            for request, advantage in zip(asked.requests[start : start + samples], group.advantages, strict=True):
                rollout = rollouts[request.request_id]
                prompt, gain = request.prompt_tokens, float(advantage)
                sequences.append(
                    TrainSequence(
                        prompt_tokens=prompt,
                        response_tokens=rollout.tokens,
                        sampler_logprobs=rollout.logprobs,
                        sampler_logprobs_t1=rollout.logprobs_t1,
                        advantage=gain,
                    )
                )
        self._trainer.rl_step(sequences, temperature=self._config.rollout.sampling.temperature)
        return fmean(rewards)

    def weights(self, version: int) -> tuple[WeightsManifest, Buffer]:
        """As engines take them."""
        published = self._trainer.publish(version)
        assert published is not None
        return published

    def _ask(self, picks: list[Pick], samples: int) -> Asked:
        sampling = sampling_params(self._config.rollout.sampling, stop_tokens_of(self._config, self._tokenizer))
        lengths = [float(sampling.max_new_tokens)] * len(picks)
        return Asked(
            [pick.prompt for pick in picks],
            Batch(picks, [samples] * len(picks), sampling, seed=self._seed, expected_tokens=lengths).requests,
        )

    @staticmethod
    def _by_prompt(asked: Asked) -> list[tuple[int, Request]]:
        samples = len(asked.requests) // len(asked.prompts)
        return [(place // samples, request) for place, request in enumerate(asked.requests)]

    def _reward(self, prompt: Prompt, rollout: Rollout) -> float:
        text = self._tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        return self._grader.grade(
            GradeItem(prompt=prompt.text, response=text, record=prompt.record, finish_reason=rollout.finish_reason)
        ).value
