"""The memory of an engine's KV cache, and whether a learner fits. Owns the scenario's inputs; policies.roofline.memory
owns the sums.
"""

import math

from launch.config.issues import ConfigError, Issue
from planner.simulate.costs import device, network
from planner.simulate.scenario import Scenario
from policies.roofline.memory import GIB, LearnerShape, cache_room, plan_learner


def kv_tokens_of(scenario: Scenario) -> float:
    """Return the tokens of one engine's cache; infinite for a CPU machine without a given size. Raises ConfigError if
    the model, or not even one response, fits."""
    gpu, net, gpus = device(scenario), network(scenario), scenario.fleet.gpus_per_worker
    most = math.inf
    if gpu is not None:
        room = cache_room(net, gpu.memory_bytes, gpus)
        if room <= 0:
            raise ConfigError(
                [
                    Issue(
                        "model",
                        f"weights of {net.weight_bytes / GIB:.1f} GiB do not fit {gpus} x {gpu.name} of "
                        f"{gpu.memory_bytes / GIB:.1f} GiB",
                        remedy="raise fleet.gpus_per_worker, set quantization, or name a larger fleet.device",
                    )
                ]
            )
        most = room / net.kv_token_bytes
    given = scenario.engine.kv_tokens
    tokens = most if given is None else float(given)
    if tokens > most:
        raise ConfigError(
            [Issue("engine.kv_tokens", f"{given:,} tokens do not fit beside the weights; {most:,.0f} do")]
        )
    longest = scenario.workload.prompt_tokens + scenario.lengths.max_tokens
    if tokens < longest:
        raise ConfigError(
            [
                Issue(
                    "engine.kv_tokens",
                    f"a cache of {tokens:,.0f} tokens holds no response of {longest:,} with its prompt",
                    remedy="lower lengths.max_tokens, or raise fleet.gpus_per_worker",
                )
            ]
        )
    return tokens


def check_learner(scenario: Scenario) -> None:
    """Check a learner without a measured speed: AdamW with float32 masters and bfloat16 passes, sharded over its ranks,
    a micro-batch of the longest response. Raises ConfigError if a rank's peak does not fit."""
    gpu, fleet = device(scenario), scenario.fleet
    if gpu is None or scenario.learning.tokens_s is not None:
        return
    longest = scenario.workload.prompt_tokens + scenario.lengths.max_tokens
    shape = LearnerShape(
        ranks=scenario.learner_ranks,
        micro_batch_tokens=longest,
        checkpointing=scenario.learning.checkpointing,
        master_bytes=4,
        compute_bytes=2,
    )
    plan = plan_learner(network(scenario), shape, gpu.memory_bytes)
    if not plan.fits(gpu.memory_bytes):
        key = "fleet.nodes" if fleet.layout == "colocated" else "fleet.learner_nodes"
        key = key if scenario.learning.ranks is None else "learning.ranks"
        raise ConfigError(
            [
                Issue(
                    key,
                    f"a learner of {shape.ranks} ranks does not fit {gpu.name} of {gpu.memory_bytes / GIB:.1f} GiB: "
                    f"{plan.worst.text()}",
                    remedy=f"raise {key}, set learning.checkpointing=true, or give learning.tokens_s as measured",
                )
            ]
        )
