"""Earlier success rates of prompts: from a field of the record, or from an evaluation's eval_prompts.jsonl
(`data.success`)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.data.errors import DataError
from actors.data.templates import BadPromptError
from config.data import SuccessOptions

KEY = "data.success"
NOTHING = SuccessOptions()


@dataclass(frozen=True, slots=True)
class SuccessRates:
    """Success rates by prompt. Without options no rate is known, and every prompt is used."""

    options: SuccessOptions = NOTHING
    by_uid: Mapping[str, float] = field(default_factory=dict)

    def of(self, fields: Mapping[str, Any], uid: str) -> float | None:
        """Return the prompt's rate; None: unknown. Raises BadPromptError if the record's field is no rate."""
        if self.options.file is not None:
            return self.by_uid.get(uid)
        if self.options.field is None:
            return None
        value = fields.get(self.options.field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise BadPromptError(f"{self.options.field!r} must be a rate from 0 to 1 ({KEY}.field), not {value!r:.40}")
        return float(value)

    def wanted(self, rate: float | None) -> bool:
        """Return whether to use a prompt with this rate; unknown rates are used."""
        return rate is None or self.options.min <= rate <= self.options.max


def rates(options: SuccessOptions) -> SuccessRates:
    """Load the rates. Raises DataError if the file is missing, or no eval_prompts.jsonl. The last line of a prompt
    applies: its latest evaluation."""
    if options.file is None:
        return SuccessRates(options)
    path, found = Path(options.file).expanduser(), dict[str, float]()
    line = ""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found[str(row["uid"])] = float(row["success"])
    except OSError as error:
        raise DataError(f"{KEY}.file: {path.absolute()} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{KEY}.file: {path.absolute()}, {line[:60]!r}: no line of an eval_prompts.jsonl (uid, success): {error}"
        ) from error
    if not found:
        raise DataError(f"{KEY}.file: {path.absolute()} is empty; make one with paceline eval on the training prompts")
    return SuccessRates(options, found)
