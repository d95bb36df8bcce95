"""Faults of a configuration, one entry each. Owns how faults read; finds none itself."""

from collections.abc import Sequence
from dataclasses import dataclass

from launch.errors import PacelineError


@dataclass(frozen=True, slots=True)
class Issue:
    """One fault. `key` is the full dotted key (empty if the file as a whole is meant)."""

    key: str
    message: str
    where: str = ""  # "file.yaml:12", "override", or empty if neither wrote it
    remedy: str = ""
    ours: str = ""  # overrides equivalent to another trainer's key

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        head = f"{self.key}{place}: {self.message}" if self.key else f"{self.message}{place}"
        return f"{head}\n    {self.remedy}" if self.remedy else head


class ConfigError(PacelineError):
    """All faults of a configuration at once."""

    exit_code = 2
    title = "Configuration error"

    def __init__(self, issues: Sequence[Issue], *, remedy: str | None = None) -> None:
        super().__init__("\n".join(str(issue) for issue in issues), remedy=remedy)
        self.issues = tuple(issues)
