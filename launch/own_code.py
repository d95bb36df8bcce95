"""Try out a user's loss, advantages and drafters, named by import path, before a run starts.

Each is imported and called once on a few made-up numbers, in one child process. So neither torch nor the side effects
of a user's import reach this process. `own_code_text` names them for the summary.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.processes.modules import folders, looked_in
from config.import_path import OwnCodeError
from launch.config import Config, Issue

_TIMEOUT_S = 120.0
_ROOT = Path(__file__).resolve().parents[len(__name__.split(".")) - 1]  # root of imports


def own_code_issues(config: Config) -> list[Issue]:
    """Return the faults of a user's loss, advantages or drafters, each under its key. Imports them in a
    child process."""
    tasks = _tasks(config)
    if not tasks:
        return []
    # The user's folders come last, so that a package there cannot shadow one of ours.
    code = (
        f"import sys; sys.path[:0] = [{str(_ROOT)!r}]; sys.path += {folders()!r}; from {__name__} import main; main()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            input=json.dumps(list(tasks.values())),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        said = f"importing and calling it once took more than {_TIMEOUT_S:g} s"
        return [Issue(next(iter(tasks)), said, remedy="look for a loop without end, or for work done on import")]
    lines = done.stdout.strip().splitlines()
    try:
        faults = json.loads(lines[-1])
    except (IndexError, ValueError):  # the user's code ended the process
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Issue(next(iter(tasks)), f"the process that tried it out ended: {last}")]
    texts = [fault.partition(": ")[2] for fault in faults]  # without the key, which the issue has
    return [Issue(key, text + _searched(text)) for key, text in zip(tasks, texts, strict=True) if text]


def own_code_text(options: Mapping[str, Any]) -> str | None:
    """Name the user's code in nested mappings, such as `loss my_module:loss; drafter parrot, my_module:Parrot`. None if
    all of it is built in."""
    objective = options.get("objective") or {}
    speculation = (options.get("rollout") or {}).get("speculation") or {}
    parts = [f"loss {objective['loss']}"] if ":" in str(objective.get("loss", "")) else []
    if objective.get("advantages"):
        parts.append(f"advantages {objective['advantages']}")
    parts += [f"drafter {one.get('name')}, {one.get('function')}" for one in speculation.get("drafters") or ()]
    return "; ".join(parts) or None


def main() -> None:
    """Run in the child: try what stdin lists, and print the fault of each as the last line."""
    from drafter.own import try_drafter
    from policies.objectives.own import try_loss
    from policies.own_advantages import try_advantages

    trials: dict[str, Callable[..., None]] = {
        "loss": try_loss,
        "advantages": try_advantages,
        "drafter": try_drafter,
    }
    faults = []
    for kind, given in json.load(sys.stdin):
        try:
            trials[kind](**given)
            faults.append("")
        except OwnCodeError as error:
            faults.append(str(error))
    print("\n" + json.dumps(faults))


def _tasks(config: Config) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return (kind, arguments of its trial) of the user's code, by key."""
    objective, speculation = config.objective, config.rollout.speculation
    tasks: dict[str, tuple[str, dict[str, Any]]] = {}
    if objective.own_loss:
        tasks["objective.loss"] = ("loss", {"path": objective.loss, "arguments": objective.loss_arguments})
    if objective.advantages is not None:
        given = {"path": objective.advantages, "arguments": objective.advantages_arguments}
        tasks["objective.advantages"] = ("advantages", given)
    if speculation.mode != "off":
        for index, one in enumerate(speculation.drafters):
            tasks[f"rollout.speculation.drafters.{index}.function"] = ("drafter", one.model_dump())
    return tasks


def _searched(fault: str) -> str:
    """Return where a missing module was searched."""
    return looked_in(fault.partition("cannot be imported: ")[2])
