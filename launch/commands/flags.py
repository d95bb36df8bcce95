"""Accept other trainers' flags on our command line: `--learning_rate 1e-5` and slime's `--rollout-batch-size 8` become
`learning_rate=1e-5` and `rollout_batch_size=8`, which the configuration then answers. Owns the rewriting only.
"""

import difflib
import functools
from typing import Any

from typer.core import TyperCommand


class WithOverrides(TyperCommand):
    """A command that takes overrides. It treats an unknown flag as one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {
            name: not getattr(param, "is_flag", False) and not getattr(param, "count", False)
            for param in self.get_params(ctx)
            for name in (param.opts if param.param_type_name == "option" else ())
        }
        return super().parse_args(ctx, as_overrides(args, takes_value))


def as_overrides(args: list[str], options: dict[str, Any]) -> list[str]:
    """Rewrite every flag in `args` that is no option, and does not resemble one, as key=value. `options`: whether each
    option takes a value, by name. The last word of a key is an override though it resembles an option: `--steps` is
    run.steps, not --step. Hyphens become underscores, as no key has any. A flag without a value is true. Overrides go
    behind all other arguments."""
    left, rewritten, found = list(args), list[str](), list[str]()
    while left:
        token = left.pop(0)
        name, equals, value = token.partition("=")
        if token == "--":
            return [*rewritten, *found, token, *left]
        if name in options or not name.startswith("--") or _mistyped(name, options):
            rewritten.append(token)
            if options.get(name) and not equals and left:
                rewritten.append(left.pop(0))
            continue
        if not equals:
            follows = left and not left[0].startswith("--") and "=" not in left[0]
            value = left.pop(0) if follows else "true"
        found.append(f"{_key(name)}={value}")
    return [*rewritten, *found]


def _mistyped(name: str, options: dict[str, Any]) -> bool:
    """Whether a flag resembles an option and is not a key's own word."""
    return bool(difflib.get_close_matches(name, options, n=1, cutoff=0.8)) and _key(name) not in _words()


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


@functools.cache
def _words() -> frozenset[str]:
    """Return the last word of every key."""
    from launch.config.schema import by_name  # other flags are spared the import

    return frozenset(key.rpartition(".")[2] for key in by_name())
