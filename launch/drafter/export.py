"""`paceline export-drafter`: a trained drafter for stock vLLM. Owns what is said about it; the format is elsewhere."""

from pathlib import Path
from typing import Literal

from drafter.export import Format, export_drafter
from launch.errors import UsageError


def export(
    drafter: Path, target: Path, out: Path, method: Literal["eagle", "eagle3"] | None, form: Format = "vllm"
) -> str:
    """Write the checkpoint and return how vLLM is told to use it."""
    for option, path in (("DRAFTER", drafter), ("--target", target)):
        if not (path / "config.json").is_file():
            raise UsageError(f"{option}: no config.json in {path}", remedy="give the directory that holds it")
    done = export_drafter(drafter, target, out, method=method, form=form)
    return (
        f"{done.directory}: {done.tensors} tensors, {done.architecture}\n"
        f'vllm serve {target} --speculative-config \'{{"method": "{done.method}", "model": "{done.directory}", '
        '"num_speculative_tokens": 4}\''
    )
