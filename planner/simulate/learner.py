"""Seconds of the phases around a rollout: learning, and weights to the engines.

Has no measurements. Given numbers take precedence over the roofline (policies.roofline.learning), whose assumptions
they share. By the roofline, a step takes what its responses need, cut into micro-batches by the learner's own planner.
Ranks wait for each other in every round of micro-batches, so all may wait for one long response. A measured speed
includes that already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.training.packing import plan_packed
from config.network import Network
from planner.simulate.costs import device, network
from planner.simulate.scenario import Scenario
from policies.roofline.learning import NETWORK_BYTES_S, gather_s, token_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTimes:
    """The learner's times. `rank_flops_s`: of one rank, for the training step alone; None: `tokens_s` was measured, of
    all ranks."""

    scenario: Scenario
    net: Network | None
    rank_flops_s: float | None
    weights_s: float

    def learn_s(self, responses: Sequence[int]) -> float:
        """Return the seconds of an RL step with responses of these lengths."""
        given, prompt = self.scenario.learning, self.scenario.workload.prompt_tokens
        lengths = [prompt + tokens for tokens in responses]
        if given.tokens_s is not None:
            return sum(lengths) / given.tokens_s + given.overhead_s
        net, flops_s = self.net, self.rank_flops_s
        assert net is not None
        assert flops_s is not None
        plan = plan_packed(
            lengths,
            budget_tokens=prompt + self.scenario.lengths.max_tokens,  # as planner.simulate.memory checks
            ranks=self.scenario.learner_ranks,
        )
        flops = [token_flops(net, length) * length for length in lengths]
        slowest: float = sum(max(sum(flops[i] for i in one) for one in each) for each in zip(*plan, strict=True))
        return slowest / flops_s + given.overhead_s


def learner_times(scenario: Scenario) -> LearnerTimes:
    """Make the learner's times. Raises as `network` and `device`."""
    given, fleet = scenario.learning, scenario.fleet
    gpu, net = device(scenario), None
    flops_s, weights_s = None, given.weights_s
    if given.tokens_s is None:
        assert gpu is not None
        net = network(scenario)
        passes = (4 / 3 if given.checkpointing else 1.0) + (1 / 3 if given.log_probs else 0.0)
        flops_s = given.mfu * gpu.bf16_flops_s / passes
    if weights_s is None:
        moved = network(scenario)
        if gpu is None:
            weights_s = moved.weight_bytes / NETWORK_BYTES_S
        else:
            weights_s = gather_s(moved, scenario.learner_ranks, 4, gpu, node_gpus=fleet.gpus_per_node)
            if fleet.layout == "colocated":
                weights_s += 2 * moved.weight_bytes / gpu.bandwidth_bytes_s
            else:
                weights_s += moved.weight_bytes / NETWORK_BYTES_S
    return LearnerTimes(scenario=scenario, net=net, rank_flops_s=flops_s, weights_s=weights_s)
