"""Qwen2.5's shapes, as the predictor takes them."""

from benchmarks.tools.qwen import QWEN, network, qwen

NETWORKS = {size: network(qwen(size)) for size in QWEN}
