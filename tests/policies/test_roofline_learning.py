"""Estimates of the learner's step and of the hand-over: their laws."""

from dataclasses import replace

import pytest

from policies.roofline.devices import DEVICES
from policies.roofline.learning import MFU, NETWORK_BYTES_S, gather_s, hand_over_s, learner_tokens_s, token_flops
from policies.roofline.memory import LearnerShape
from tests.policies.networks import NETWORKS

SEVEN, H100 = NETWORKS["7b"], DEVICES["H100"]
EIGHT = LearnerShape(ranks=8, micro_batch_tokens=16_384, checkpointing=False, master_bytes=4, compute_bytes=2)


def test_a_token_costs_six_flops_a_weight_and_attention_by_its_length() -> None:
    assert token_flops(SEVEN, 0) == 6 * SEVEN.read_parameters
    assert token_flops(SEVEN, 8192) - token_flops(SEVEN, 0) == 2 * (token_flops(SEVEN, 4096) - token_flops(SEVEN, 0))


def test_tokens_follow_ranks_and_peak_and_checkpointing_costs_a_quarter_of_them() -> None:
    speed = learner_tokens_s(SEVEN, EIGHT, H100, 0)
    assert speed == pytest.approx(8 * MFU * H100.bf16_flops_s / (6 * SEVEN.read_parameters))
    assert learner_tokens_s(SEVEN, replace(EIGHT, checkpointing=True), H100, 0) == pytest.approx(0.75 * speed)
    assert learner_tokens_s(SEVEN, replace(EIGHT, ranks=4), H100, 0) == pytest.approx(speed / 2)


def test_adapters_cost_an_engine_the_reading_of_what_they_are_merged_into() -> None:
    ways = hand_over_s(SEVEN, replace(EIGHT, adapters=40_000_000), H100, same_gpu=True, merged_there=True)
    assert ways == dict.fromkeys(("direct", "object store"), SEVEN.parameters * SEVEN.item_bytes / H100.host_bytes_s)


def test_the_direct_way_is_much_shorter_than_the_object_stores() -> None:
    for same_gpu in (True, False):
        ways = hand_over_s(SEVEN, EIGHT, H100, same_gpu=same_gpu)
        assert 10 * ways["direct"] < ways["object store"]
    alone = replace(EIGHT, ranks=1)
    assert hand_over_s(SEVEN, alone, H100, same_gpu=True)["direct"] < 0.02, "nothing to gather"


def test_shards_of_several_nodes_are_gathered_over_the_network() -> None:
    one, two = (gather_s(SEVEN, ranks, 4, H100) for ranks in (8, 16))
    assert one == pytest.approx(SEVEN.parameters * 4 * 7 / 8 / H100.peer_bytes_s)
    assert two == pytest.approx(SEVEN.parameters * 4 * 15 / 16 / NETWORK_BYTES_S)
    ways = hand_over_s(SEVEN, replace(EIGHT, ranks=16), H100, same_gpu=True)
    assert ways["direct"] > two
