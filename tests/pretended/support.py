"""Models on the pretended device, and what one engine step, draft or micro-batch made it do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actors.engine.native.engine import NativeEngine
from config.strategy import PLAIN, Strategy
from drafter.protocol import Drafter
from models.checkpoint import init_model
from models.transformer import Transformer
from policies.speculation.policy import FixedPolicy
from tests.engine.support import make_requests, options_of, write_config
from tests.pretended.counting import counting
from tests.pretended.device import Seen

DEVICE = torch.device("cuda", 0)


def target(directory: Path, family: str = "qwen3", layers: int = 2, **changes: Any) -> Transformer:
    """In bfloat16, as in production."""
    config = write_config(directory / f"{family}-{layers}", family, num_hidden_layers=layers, **changes)
    host = init_model(config, 0, batch_invariant=False)
    model = Transformer(host.config, dtype=torch.bfloat16, device=DEVICE, batch_invariant=False)
    with torch.no_grad():
        for there, here in zip(model.parameters(), host.parameters(), strict=True):
            there.copy_(here)
    return model


def steps_of(
    model: Transformer,
    *,
    drafter: Drafter | None = None,
    strategy: str = "",
    requests: int = 2,
    steps: int = 4,
    warm: int = 4,
    watch: Callable[[NativeEngine], None] = lambda engine: None,
    sampling: dict[str, Any] | None = None,
    engine_keywords: dict[str, Any] | None = None,
    **options: Any,
) -> list[Seen]:
    """Each of `steps` engine steps that only decode or verify, once prompts are computed and graphs captured."""
    engine = NativeEngine(
        model,
        options_of(max_running=2, **options),
        drafters={} if drafter is None else {drafter.name: drafter},
        policy=FixedPolicy(Strategy.parse(strategy)) if strategy else FixedPolicy(PLAIN),
        **(engine_keywords or {}),
    )
    engine.submit(make_requests(requests, max_new_tokens=150, **(sampling or {})))
    for _ in range(warm):
        engine.step()
    found = []
    for _ in range(steps):
        with counting() as seen:
            engine.step()
        found.append(seen)
    watch(engine)
    return found
