"""The run on a terminal: a live panel there, one line per RL step elsewhere. Draws RunState, changes nothing."""

import os
import sys
import termios
from collections.abc import Callable, Iterable
from operator import itemgetter

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.observe.records import PHASES
from launch.observe.state import RunState, WorkerState

BLOCKS = tuple(chr(0x2581 + i) for i in range(8))
STATE_STYLES = {
    "decode": "green",
    "idle": "dim",
    "restart": "bold red",
    "lost": "bold red",
    "load_weights": "cyan",
    "training": "magenta",
}
MAX_WORKERS = 8
LEARNING = (  # metric, its label in a log line, format
    *(("entropy", "entropy", ".2f"), ("kl", "KL", ".4f")),
    *(("clip_fraction", "clipped", ".1%"), ("grad_norm/mean", "grad", ".3g")),
)


def no_echo_of_ctrl_c() -> Callable[[], None]:
    """Stop the terminal from echoing `^C` into the panel until the result is called. Does nothing if stdin is no
    terminal, or another process owns it (a background process that sets a terminal is stopped)."""

    def echo_control(on: bool) -> None:
        if sys.stdin is None or not sys.stdin.isatty() or os.tcgetpgrp(keyboard := sys.stdin.fileno()) != os.getpgrp():
            return
        settings = termios.tcgetattr(keyboard)
        flags = settings[3]  # the local modes
        settings[3] = flags | termios.ECHOCTL if on else flags & ~termios.ECHOCTL
        termios.tcsetattr(keyboard, termios.TCSANOW, settings)

    echo_control(False)
    return lambda: echo_control(True)


def sparkline(values: Iterable[float]) -> str:
    """Return one block character per value, scaled to the smallest and the largest; NaN is a space."""
    shown = list(values)
    finite = [v for v in shown if v == v]
    if not finite:
        return " " * len(shown)
    low, span = min(finite), max(finite) - min(finite)
    scale = (len(BLOCKS) - 1) / span if span > 0 else 0.0
    return "".join(" " if v != v else BLOCKS[round((v - low) * scale)] for v in shown)


def duration(seconds: float) -> str:
    """Format as `45s`, `3:20`, `1:02:03`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, secs = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def step_line(state: RunState) -> str:
    """Describe one RL step on one line, for logs and pipes."""
    m, parts = state.metrics, [f"step {state.step:>{len(str(state.steps))}}/{state.steps}"]
    if "reward/mean" in m:
        parts.append(f"reward {m['reward/mean']:.3f}")
    if state.eval_reward is not None:
        parts.append(f"held-out {state.eval_reward:.3f}")
    if "groups/total" in m:
        parts.append(f"groups {m['groups/used']:.0f}/{m['groups/total']:.0f}")
    if "rollouts/truncated_share" in m:
        parts.append(f"cut {100 * m['rollouts/truncated_share']:.0f} %")
    if "turns/mean" in m:
        parts.append(f"turns {m['turns/mean']:.1f}")
    if m.get("turns/limited_share"):
        parts.append(f"at max_turns {100 * m['turns/limited_share']:.0f} %")
    parts += [f"{label} {m[name]:{form}}" for name, label, form in LEARNING if name in m]
    if "budget/tokens" in m and "budget/spent_tokens" in m:
        parts.append(f"budget {100 * _spent_share(m):.0f} %")
    if m.get("abort/given_up_share"):
        parts.append(f"given up {100 * m['abort/given_up_share']:.0f} %")
    if "tokens_per_s" in m:
        parts.append(f"{m['tokens_per_s']:,.0f} tok/s")
    if "length/p50" in m:
        parts.append(f"len {_lengths(m)}")
    if "speculation/accept_length" in m:
        parts.append(f"accept {m['speculation/accept_length']:.1f}")
    if m.get("drafter/micro_steps") and "drafter/top3_accuracy" in m:
        parts.append(f"drafter +{m['drafter/micro_steps']:.0f} top-3 {m['drafter/top3_accuracy']:.2f}")
    parts.append(_phases(state))
    if "logprob_gap/mean" in m:
        parts.append(f"gap {m['logprob_gap/mean']:.2g}")
    if state.eta_s is not None:
        parts.append(f"eta {duration(state.eta_s)}")
    return "  ".join(part for part in parts if part)


def render(state: RunState, now_s: float) -> RenderableType:
    """Draw the live panel: progress, reward, speed, lengths, time per phase, workers."""
    eta = "" if state.eta_s is None else f"  eta {duration(state.eta_s)}"
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    head.add_row(
        Text(f"RL step {state.step}/{state.steps}", style="bold"),
        _bar(state.step, state.steps, "blue"),
        Text(f"{duration(now_s - state.started_s)}{eta}", style="dim"),
    )
    phase = Text(state.phase, style="cyan")
    if state.stopping:
        phase = Text("stopping", style="bold yellow").append(f" ({state.phase})", style="cyan")
    head.add_row(phase, _bar(state.done, state.total, "cyan"), Text(_count(state, now_s), style="dim"))
    body: list[RenderableType] = [head, _numbers(state)]
    body += [Text(warning, style="yellow") for warning in state.warnings]
    if state.workers:
        body.append(_workers(state, now_s))
    rollouts = f"  (rollouts in {state.precision})" if state.precision else ""
    return Panel(Group(*body), title=f"Paceline  {state.name}{rollouts}", title_align="left", border_style="blue")


def _numbers(state: RunState) -> Table:
    m = state.metrics
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    if state.rewards:
        line = Text(f"{state.rewards[-1]:.3f}  ", style="bold").append(sparkline(state.rewards), style="green")
        table.add_row("reward", line)
    if state.eval_reward is not None and state.first_eval_reward is not None:
        before = f"{state.first_eval_reward:.3f} -> " if state.evaluations > 1 else ""
        table.add_row("held-out", f"{before}{state.eval_reward:.3f}")
    if "groups/total" in m:
        cut = m.get("rollouts/truncated_share", 0.0)
        used = f"{m['groups/used']:.0f} of {m['groups/total']:.0f} trained"
        table.add_row("groups", f"{used}, {100 * cut:.0f} % of responses cut at the length limit")
    if "turns/mean" in m:
        limited = f"{100 * m.get('turns/limited_share', 0.0):.0f} % of episodes ended at environment.max_turns"
        table.add_row("turns", f"{m['turns/mean']:.1f} on average, {limited}")
    if "tokens_per_s" in m:
        table.add_row("speed", f"{m['tokens_per_s']:,.0f} tokens/s")
    if "length/p50" in m:
        table.add_row("length", f"{_lengths(m)} tokens (p50/p90/max)")
    if budget := _budget(m):
        table.add_row("token budget", budget)
    if m.get("skip/passed_over"):
        table.add_row("skipped", f"{m['skip/passed_over']:.0f} prompts passed over")
    if "abort/answered_share" in m:
        table.add_row("early ends", _early_ends(m))
    if learner := _learner(m):
        table.add_row("learner", learner)
    if "speculation/share" in m:
        table.add_row("speculation", _speculation(m))
    if "drafter/micro_steps" in m:
        table.add_row("drafter", _drafter(m))
    if state.seconds:
        table.add_row("time", _phases(state))
    return table


def _workers(state: RunState, now_s: float) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, ratio=1)  # a reason may be long; events have all of it
    # If there are more workers than lines, show those that are not decoding.
    order = sorted(state.workers.items(), key=lambda item: (item[1].state == "decode", item[0]))
    shown = sorted(order[:MAX_WORKERS])
    for name, worker in shown:
        table.add_row(name, _worker(worker), Text(duration(now_s - worker.since_s), style="dim"), worker.detail)
    if len(order) > len(shown):
        table.add_row(Text(f"and {len(order) - len(shown)} more", style="dim"))
    return table


def _worker(worker: WorkerState) -> Text:
    return Text(worker.state, style=STATE_STYLES.get(worker.state, "yellow"))


def _lengths(m: dict[str, float]) -> str:
    return "/".join(f"{m[key]:.0f}" for key in ("length/p50", "length/p90", "length/max") if key in m)


def _spent_share(m: dict[str, float]) -> float:
    return m["budget/spent_tokens"] / max(m["budget/tokens"], 1.0)


def _budget(m: dict[str, float]) -> str:
    """Describe how the last RL step's tokens were shared; empty without a budget."""
    parts = []
    if "budget/tokens" in m and "budget/spent_tokens" in m:
        parts.append(
            f"{m['budget/spent_tokens']:,.0f} of {m['budget/tokens']:,.0f} tokens ({100 * _spent_share(m):.0f} %)"
        )
    if "budget/rollouts_min" in m and "budget/rollouts_max" in m:
        parts.append(f"{m['budget/rollouts_min']:.0f} to {m['budget/rollouts_max']:.0f} rollouts a prompt")
    return ", ".join(parts)


def _early_ends(m: dict[str, float]) -> str:
    """Describe what the marker and the lateness rule ended in the last RL step."""
    if "abort/poll_from" not in m:
        return "none yet: too few lengths are known"
    answered, given_up = (100 * m.get(f"abort/{name}_share", 0.0) for name in ("answered", "given_up"))
    saved = f", about {m['abort/saved_tokens']:,.0f} tokens saved" if "abort/saved_tokens" in m else ""
    if "abort/give_up_at" not in m:
        return f"{answered:.0f} % after their answer, none stopped late: the threshold is the length limit"
    return f"{answered:.0f} % after their answer, {given_up:.0f} % given up at {m['abort/give_up_at']:.0f}{saved}"


def _learner(m: dict[str, float]) -> str:
    """Describe signs of a collapsing or diverging policy, without metrics that the objective lacks."""
    shown = (("entropy", "entropy", ".3f"), ("kl", "KL", ".4f"), ("clip_fraction", "clipped", ".2%"))
    parts = [f"{label} {m[name]:{form}}" for name, label, form in shown if name in m]
    for name, label in (("grad_norm/mean", "gradient norm"), ("loss/mean", "loss")):
        if name in m:
            parts.append(f"{label} {m[name]:.3g}")
    return ", ".join(parts)


def _speculation(m: dict[str, float]) -> str:
    """Describe the last RL step's speculation: the drafter of most steps, accept length, seconds saved."""
    steps = {name.split("/")[1]: value for name, value in m.items() if name.endswith("/steps") and name.count("/") == 2}
    if m["speculation/share"] == 0 or not any(steps.values()):
        return f"off: {_most_reason(m)}"
    most_used = max(steps.items(), key=itemgetter(1))[0]
    if not m.get("speculation/acceptance"):
        return f"{most_used}: no drafts accepted"
    accept, saved = m.get("speculation/accept_length", 1.0), m.get("speculation/saved_s", 0.0)
    # 0: plain decoding was not measured
    paid = f", {abs(saved):.2f} s {'saved' if saved > 0 else 'lost'}" if saved else ""
    return f"{most_used}, accept length {accept:.2f}{paid}"


def _most_reason(m: dict[str, float]) -> str:
    """Return the reason of most engine steps; without a record, the only one that older runs had."""
    prefix = "speculation/reason/"
    reasons = {name.removeprefix(prefix): value for name, value in m.items() if name.startswith(prefix)}
    return max(reasons.items(), key=itemgetter(1))[0].replace("_", " ") if reasons else "plain decoding is faster"


def _drafter(m: dict[str, float]) -> str:
    """Describe the drafter's training in the last RL step's idle time."""
    text = f"version {m['drafter/version']:.0f}, " if "drafter/version" in m else ""
    if not m["drafter/micro_steps"]:
        return f"{text}not trained in this step"
    text += f"{m['drafter/micro_steps']:.0f} micro-steps"
    if "drafter/top3_accuracy" in m:
        text += f", top-3 accuracy {m['drafter/top3_accuracy']:.3f}"
    return f"{text}, preempted {m['drafter/preempted']:.0f} times" if m.get("drafter/preempted") else text


def _phases(state: RunState) -> str:
    times = [f"{name} {state.seconds[name]:.2f}" for name in PHASES if state.seconds.get(name, 0.0) >= 0.005]
    whole = state.seconds.get("step")
    return (f"{whole:.2f}s " if whole is not None else "") + (f"({' '.join(times)})" if times else "")


def _bar(done: int, total: int, style: str) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, complete_style=style, finished_style=style)


def _count(state: RunState, now_s: float) -> str:
    left_s = state.phase_left_s(now_s)
    left = "" if left_s is None else f"  {duration(left_s)} left"
    return f"{state.done}/{state.total}{left}" if state.total else ""
