"""The TRL half of `rl_step_vs_trl.py`: GRPOTrainer on a checkpoint, on CPU; runs in TRL's own interpreter.

Owns TRL's settings and its clock. It imports only the harness of Paceline, since it must run where only TRL is
installed.
One RL step = one generation batch = `--mini-batches` optimizer steps, as in Paceline.
"""

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness import command

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def boxed_answer(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Return 1 if the first closed box holds the answer. Cheaper than math-verify, which Paceline runs: in TRL's
    favour."""
    found = (BOXED.search(completion) for completion in completions)
    return [float(match is not None and match.group(1) == gold) for match, gold in zip(found, answer, strict=True)]


def last_number(prompts: list[Any], completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """Return 1 if the last number of the response is the answer."""
    found = (NUMBER.findall(completion[0]["content"]) for completion in completions)
    return [float(bool(numbers) and numbers[-1] == gold) for numbers, gold in zip(found, answer, strict=True)]


REWARDS = {"boxed": boxed_answer, "last_number": last_number}


def records(path: Path, system_prompt: str | None) -> Dataset:
    """Return prompts and answers. With a system prompt, prompts are messages, to which TRL applies the chat
    template."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows:
        prompt = row["prompt"]
        if system_prompt is not None:
            prompt = [{"role": "system", "content": system_prompt}, {"role": "user", "content": prompt}]
        found.append({"prompt": prompt, "answer": str(row["answer"])})
    return Dataset.from_list(found)


class Clock(TrainerCallback):  # type: ignore[misc]
    """Time stamps of optimizer steps; `ends[i]` is taken when optimizer step i is complete."""

    def __init__(self) -> None:
        self.start = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.ends.append(time.perf_counter())


def main(
    *,
    model: Path,
    train: Path,
    out: Path,
    work: Annotated[Path, "folder for the trainer's own files"],
    steps: Annotated[int, "RL steps"],
    threads: int = 2,
    prompts: int = 16,
    samples: int = 8,
    mini_batches: int = 2,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    lr: float = 3e-4,
    reward: Annotated[str, "", tuple(REWARDS)] = "boxed",
    system_prompt: str | None = None,
    lora_rank: Annotated[int, "of adapters on all linear layers, alpha 32; 0: all weights are trained"] = 0,
    dtype: Annotated[Literal["float32", "bfloat16"], "of the weights; bfloat16: with autocast"] = "float32",
    seed: int = 0,
) -> None:
    torch.set_num_threads(threads)
    rollouts = prompts * samples
    clock = Clock()
    lora = None
    if lora_rank:
        from peft import LoraConfig  # only installed where adapters are compared

        lora = LoraConfig(r=lora_rank, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=REWARDS[reward],
        train_dataset=records(train, system_prompt),
        peft_config=lora,
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(work),
            use_cpu=True,
            bf16=dtype == "bfloat16",
            seed=seed,
            max_steps=steps * mini_batches,
            per_device_train_batch_size=rollouts // mini_batches,
            steps_per_generation=mini_batches,
            gradient_accumulation_steps=1,
            num_generations=samples,
            max_completion_length=max_new_tokens,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="bnpo",  # mean over the batch's tokens
            scale_rewards="group",
            learning_rate=lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,  # TRL's default recomputes activations to save memory: slower, and not needed
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()

    ends = [clock.start, *clock.ends[mini_batches - 1 :: mini_batches]]
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]  # one per RL step
    result = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "steps": [
            {
                "seconds": after - before,
                "tokens": entry["completions/mean_length"] * rollouts,
                "reward": entry["reward"],
            }
            for before, after, entry in zip(ends, ends[1:], logs, strict=False)
        ],
    }
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    command(main, timed=False)
