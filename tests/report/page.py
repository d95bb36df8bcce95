"""What the tests of the report read its page with: as a parser, and as a browser."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from contracts.rollout import EngineWindow, StrategyUse
from launch.report import write_report
from tests.windows import engine_window

VOID = frozenset({"meta", "br", "input", "link", "img"})
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHARTS = (
    "reward", "lengths", "histogram", "time", "speed", "gantt", "gap", "loss", "grad", "clip", "entropy", "kl",
    "groups", "failures", "running", "acceptance", "accept-length", "positions", "saved", "strategies",
    "reasons", "predicted", "predicted-error",
    "drafter-accuracy", "drafter-length", "drafter-positions", "drafter-time", "drafter-steps", "drafter-loss",
    "budget-rollouts", "budget-tokens", "budget-variance", "budget-thresholds", "budget-ends", "budget-surcharge",
    "budget-keep", "budget-saved", "budget-skipped",
)  # fmt: skip


class Page(HTMLParser):
    """Checks that every element is closed, and collects ids, attributes and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "action"):
                self.links.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)

    @property
    def data(self) -> dict[str, Any]:
        parsed = json.loads(self.scripts[0])
        assert isinstance(parsed, dict)
        return parsed


def drawn_by_a_browser(run: Path, folder: Path, against: Path | None = None) -> str:
    """The page after its scripts ran, every chart was pointed at and every button pressed."""
    text = write_report(run, against=against).read_text(encoding="utf-8")
    catcher = "<script>window.onerror = (m) => document.documentElement.setAttribute('data-error', m);</script></head>"
    use = (
        "<script>for (const f of document.querySelectorAll('.chart')) { const b = f.getBoundingClientRect();"
        "(f.querySelector('canvas') || f).dispatchEvent(new MouseEvent('mousemove',"
        "{clientX: b.left + b.width / 2, clientY: b.top + 60, bubbles: true})); }"
        "for (const b of document.querySelectorAll('button')) b.click();</script></body>"
    )
    path = folder / "page.html"
    path.write_text(text.replace("</head>", catcher).replace("</body>", use), encoding="utf-8")
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --window-size=1200,900 --virtual-time-budget=2000 --dump-dom"
    )
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "data-error" not in dom.split("<head>")[0]
    return dom


def window(use: StrategyUse, *trace: tuple[float, int, str]) -> EngineWindow:
    return engine_window(engine_steps=use.engine_steps, strategies=(use,), trace=trace)
