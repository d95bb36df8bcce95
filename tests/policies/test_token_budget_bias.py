"""Which objectives are called biased under a budget, and by which keys. How biased they are: test_duet_bias."""

from typing import Any

import pytest

from config.objective import ObjectiveOptions
from config.token_budget import AbortOptions, BudgetOptions
from policies.token_budget.bias import biases

BUDGET, ABORT = BudgetOptions(share=0.5), AbortOptions(enabled=True)
NO_BUDGET, NO_ABORT = BudgetOptions(), AbortOptions()
BOTH = (BUDGET, ABORT)


def keys(
    written: dict[str, Any], budget: BudgetOptions = BUDGET, abort: AbortOptions = NO_ABORT, mini_batches: int = 1
) -> list[str]:
    """The keys that the reasons begin with, below `objective`."""
    found = biases(ObjectiveOptions.model_validate(written), budget, abort, mini_batches)
    assert all(reason.isascii() for reason in found)
    return [reason.replace("=", " ").replace(":", " ").split()[0].removeprefix("objective.") for reason in found]


def test_duet_is_called_unbiased_and_so_is_everything_without_a_budget() -> None:
    assert keys({"name": "duet"}, *BOTH) == []
    for name in ("grpo", "dapo", "reinforce_pp", "dr_grpo"):
        assert keys({"name": name}, NO_BUDGET, NO_ABORT, mini_batches=4) == []


@pytest.mark.parametrize(
    ("written", "budget", "abort", "expected"),
    [
        ({"name": "grpo"}, BUDGET, NO_ABORT, ["normalize", "aggregation"]),
        ({"name": "grpo"}, NO_BUDGET, ABORT, ["normalize", "aggregation", "aggregation"]),
        ({"name": "dr_grpo"}, BUDGET, NO_ABORT, ["baseline", "aggregation"]),
        ({"name": "dr_grpo", "drop_zero_variance": False}, BUDGET, NO_ABORT, ["baseline"]),
        ({"name": "dr_grpo", "drop_zero_variance": False}, NO_BUDGET, ABORT, ["aggregation"]),
        ({"name": "rloo"}, BUDGET, NO_ABORT, ["aggregation"]),
        ({"name": "rloo", "drop_zero_variance": False}, BUDGET, NO_ABORT, []),
        ({"name": "reinforce_pp", "kl": "none"}, BUDGET, NO_ABORT, ["normalize", "aggregation"]),
        ({"name": "duet", "normalize": "batch"}, BUDGET, NO_ABORT, ["normalize"]),
        ({"name": "duet", "baseline": "none"}, BUDGET, ABORT, []),
        ({"name": "duet", "baseline": "none", "drop_zero_variance": True}, *BOTH, ["drop_zero_variance"]),
        ({"name": "duet", "length_penalty": 0.05}, BUDGET, NO_ABORT, ["length_penalty"]),
        ({"name": "duet", "kl": "k3", "kl_coef": 0.1}, BUDGET, NO_ABORT, []),
        ({"name": "duet", "kl": "k3"}, *BOTH, []),  # only measured
        ({"name": "duet", "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.1}, *BOTH, ["kl", "entropy_coef"]),
        ({"name": "duet", "dynamic_sampling": {"max_rounds": 3}}, NO_BUDGET, ABORT, ["dynamic_sampling.max_rounds"]),
    ],
)
def test_each_key_that_biases_is_named(
    written: dict[str, Any], budget: BudgetOptions, abort: AbortOptions, expected: list[str]
) -> None:
    assert keys(written, budget, abort) == expected


def test_later_mini_batches_are_off_policy_with_and_without_a_budget_and_no_bias_of_it() -> None:
    assert keys({"name": "duet"}, *BOTH, mini_batches=2) == []
    assert keys({"name": "rloo", "drop_zero_variance": False}, BUDGET, NO_ABORT, mini_batches=2) == ["aggregation"]
