"""Systems that do not go together: every row of docs/systems/README.md's table is refused when the configuration is
read, with its key, a reason and a remedy."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.config import ConfigError, load_config

Write = Callable[..., Path]
PAGE = Path(__file__).parents[2] / "docs/systems/README.md"
S, Q, B = "rollout.speculation", "rollout.quantization", "rollout.budget"
VLLM = ["rollout.engine.backend=vllm"]
ON_GPU = ["cluster.layout=colocated"]
TRAINED = ["rollout.workers=2", "drafter.train=true"]
TREE = [f"{S}.strategies=['suffix:8x2/12']"]
ROOFLINE, LENGTHS = [f"{S}.mode=roofline"], [f"{S}.budget=length_aware"]
SHARE = [f"{B}.share=0.5"]
NETWORKS = [f"{S}={{strategies: ['eagle:4', 'self:4'], eagle: {{path: random}}}}"]
ABORT = ["rollout.abort.enabled=true"]
PYTHON = ["reward.terms=[{kind: python, function: 'a.b:grade'}]"]
P = "rollout.partial"
PARTIAL = [f"{P}.tokens_per_step=16"]
STALE = ["rollout.staleness=1"]
INVARIANT = ["model.batch_invariant=true"]

# Row of the table (its first two cells); this; beside; the key that is refused.
CASES: list[tuple[str, list[str], list[str], str]] = [
    ("self-drafter|quantization", [f"{S}.strategies=['self:5']"], [f"{Q}=w8a8"], f"{S}.strategies"),
    ("self.format|quantization", [f"{S}.self.format=w4a8"], [f"{Q}=w8a8"], f"{S}.self.format"),
    ("roofline|several drafters", ROOFLINE, [f"{S}.strategies=['suffix:4', 'ngram:4']"], f"{S}.strategies"),
    ("roofline|several drafters", ROOFLINE, TREE, f"{S}.strategies"),
    ("roofline|drafter.train", ROOFLINE, TRAINED, f"{S}.mode"),
    ("roofline|drafter.train", [*ROOFLINE, f"{Q}=w8a8"], TRAINED, f"{S}.mode"),
    ("roofline|eagle.path", ROOFLINE, [f"{S}.eagle.path=random"], f"{S}.eagle.path"),
    ("length_aware|mode", LENGTHS, [f"{S}.mode=paper"], f"{S}.budget"),
    ("length_aware|mode", LENGTHS, ROOFLINE, f"{S}.budget"),
    ("length_aware|trees", LENGTHS, TREE, f"{S}.budget"),
    ("length_aware|vLLM", LENGTHS, VLLM, f"{S}.budget"),
    ("drafter.train|mode: off", TRAINED, [f"{S}.mode=off"], f"{S}.mode"),
    ("drafter.train|mode: off", TRAINED, [f"{S}.strategies=['suffix:4']"], f"{S}.strategies"),
    ("drafter.train|one rollout worker", ["drafter.train=true"], ["rollout.workers=1"], "drafter.train"),
    (
        "`eagle` and `self`|vLLM",
        [f"{S}={{strategies: ['eagle:4', 'self:4'], eagle: {{path: random}}}}"],
        VLLM,
        f"{S}.strategies",
    ),
    ("trees|vLLM", TREE, VLLM, f"{S}.strategies"),
    ("trees|batch_invariant", TREE, [*ON_GPU, "model.batch_invariant=engine"], f"{S}.strategies"),
    ("batch_invariant|vLLM", INVARIANT, VLLM, "model.batch_invariant"),
    ("batch_invariant: true|GPU", INVARIANT, ON_GPU, "model.batch_invariant"),
    ("rejection|batch_invariant", [f"{S}.verification=rejection"], INVARIANT, f"{S}.verification"),
    ("coupled|vLLM", [f"{S}.verification=coupled"], VLLM, f"{S}.verification"),
    ("2 to 4 bits|vLLM", [f"{Q}=w4a8"], VLLM, Q),
    ("fp8|CPU", [f"{Q}=fp8"], ["cluster.layout=embedded"], Q),
    ("fp8|A100", [*ON_GPU, f"{Q}=fp8"], ["cluster.gpu=A100"], Q),
    ("quantization|transformers", [f"{Q}=w8a8"], ["model.implementation=transformers"], "model.implementation"),
    ("quantization|autocast", [f"{Q}=w8a8"], ["learner.autocast_bf16=true"], "learner.autocast_bf16"),
    (
        "staleness|weights: none",
        STALE,
        ["objective.sampler_correction.weights=none"],
        "objective.sampler_correction.weights",
    ),
    (
        "staleness|weights: none",
        PARTIAL,
        ["objective.sampler_correction.weights=none"],
        "objective.sampler_correction.weights",
    ),
    ("partial|`rollout.abort`", PARTIAL, ABORT, f"{P}.tokens_per_step"),
    ("partial|`rollout.abort`", PARTIAL, [*SHARE, "learner.mini_batches=1"], f"{P}.tokens_per_step"),
    ("partial|`rollout.abort`", PARTIAL, ["objective.name=dapo"], f"{P}.tokens_per_step"),
    ("staleness|colocated", STALE, ON_GPU, "rollout.staleness"),
    ("staleness|colocated", STALE, ["cluster.offload=always"], "cluster.offload"),
    ("tbpo|mini-batch", ["objective.name=tbpo"], ["learner.mini_batches=1"], "learner.mini_batches"),
    ("budget|dynamic_sampling", SHARE, ["objective.name=dapo"], "objective.dynamic_sampling.max_rounds"),
    ("budget|`min_rollouts` beyond", SHARE, [f"{B}.min_rollouts=6"], f"{B}.share"),
    ("budget|`min_rollouts` beyond", [f"{B}.tokens_per_step=100"], [f"{B}.min_rollouts=8"], f"{B}.tokens_per_step"),
    (
        "budget|`max_rollouts` below",
        [f"{B}.share=1.0", f"{B}.min_rollouts=4"],
        [f"{B}.max_rollouts=3"],
        f"{B}.max_rollouts",
    ),
    ("abort|`format`", ABORT, ["reward.terms=[{kind: format, pattern: a}, {kind: math}]"], "reward.terms.0.kind"),
    ("abort|`format`", ABORT, ["reward.terms=[{kind: math}, {kind: code}]"], "reward.terms"),
    ("abort|`python`", [*ABORT, "rollout.abort.marker=boxed"], PYTHON, "reward.terms.0.prefix_sufficient"),
    ("abort|`fallback`", ABORT, ["reward.terms=[{kind: math, fallback: gsm8k}]"], "reward.terms.0.fallback"),
    ("abort|`fallback`", ABORT, ["reward.terms=[{kind: math, answer: last}]"], "reward.terms.0.answer"),
    (
        "abort|`objective.overlong`",
        ABORT,
        ["objective.overlong.buffer_tokens=16"],
        "objective.overlong.buffer_tokens",
    ),
    ("abort|`objective.overlong`", ABORT, ["objective.length_penalty=0.1"], "objective.length_penalty"),
    ("abort|`objective.overlong`", ABORT, ["objective.mask_truncated=true"], "objective.mask_truncated"),
]


@pytest.mark.parametrize(("row", "this", "beside", "key"), CASES)
def test_is_refused_with_a_reason_and_a_remedy(
    write_config: Write, row: str, this: list[str], beside: list[str], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), [*this, *beside])
    (issue,) = caught.value.issues
    assert issue.key == key
    assert len(issue.message) > 20
    assert issue.remedy


@pytest.mark.parametrize("row", sorted({row for row, *_ in CASES}))
def test_the_table_has_it(row: str) -> None:
    this, _, beside = row.partition("|")
    found = [cells for cells in table() if this in cells[0] and beside in cells[1]]
    assert len(found) == 1, [cells[:2] for cells in found]
    for case, _, _, key in CASES:
        assert case != row or f"`{key}`" in found[0][3]


def test_every_row_of_the_table_is_tried() -> None:
    tried = [case.partition("|") for case, *_ in CASES]
    for cells in table():
        assert any(this in cells[0] and beside in cells[1] for this, _, beside in tried), cells
        for key in re.findall(r"`([\w.]+)`", cells[3]):
            assert any(key == case[3] for case in CASES if case[0].partition("|")[0] in cells[0]), (cells, key)


def table() -> list[list[str]]:
    """The cells of each row."""
    section = PAGE.read_text(encoding="utf-8").partition("## What does not go together")[2]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
