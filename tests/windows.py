"""Telemetry windows for tests that care about a part of them."""

from typing import Any

from contracts.rollout import EngineWindow


def engine_window(**fields: Any) -> EngineWindow:
    """A second in which an engine did one step and nothing else, but for these fields."""
    nothing = dict.fromkeys(("prefill_tokens", "decode_tokens", "running", "waiting", "kv_tokens_used"), 0)
    return EngineWindow(**{"start_s": 0.0, "end_s": 1.0, "engine_steps": 1, **nothing, **fields})
