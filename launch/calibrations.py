"""The calibrations that runs share: a folder beside the warm starts, one file per model, precision and device.

Owns the files' names, the choice of those that a run hands to its engines, and how an engine's measurements are merged
into them. Several runs may do so at once. Measures nothing.
"""

import fcntl
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from actors.engine.calibrated import KEY, model_shape, precision_name
from actors.observer import UNOBSERVED, RunObserver
from contracts.rollout import PassesDrifted, PassesKnown, PassesRefined, PassEvent
from launch.config import Config, Issue
from models.config import ModelConfigError
from policies.calibration.costs import CostModel
from policies.calibration.document import Calibration, CalibrationKey, CalibrationRefusedError

FOLDER = "calibrations"  # below run.dir
WRITE_S = 30.0  # what engines have learned is kept at least so often


def calibrations_folder(config: Config) -> Path:
    """Return the folder that all runs below run.dir share, as they do the warm starts."""
    return Path(config.run.dir) / FOLDER


def file_of(folder: Path, key: CalibrationKey) -> Path:
    """Return the file of a key. Its name is readable, and unique by a hash of the key."""
    digest = hashlib.blake2b("\n".join((key.model, key.precision, key.device)).encode(), digest_size=5).hexdigest()
    words = re.sub(r"[^a-z0-9]+", "-", f"{key.model} {key.precision} {key.device}".lower()).strip("-")
    return folder / f"{words[:120].strip('-')}-{digest}.json"


def read_calibration(path: Path) -> Calibration:
    """Read a calibration of any key. Raises OSError, and ValueError if the file is damaged or of another release."""
    text = path.read_bytes().decode("utf-8")
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else str(first["msg"])) from None


def merged(first: Calibration, second: Calibration) -> Calibration:
    """Merge two calibrations of one key. Passes of similar shape are averaged by their number of measurements; where
    both have a draft, that of `second` counts."""
    assert first.key == second.key
    both = Calibration(
        key=second.key,
        passes=first.passes + second.passes,
        drafts=first.drafts + second.drafts,
        fitted=second.fitted or first.fitted,
    )
    return CostModel(both).refined(second.key)


def add_to_folder(
    folder: Path,
    calibration: Calibration,
    observer: RunObserver = UNOBSERVED,
    base: Calibration | None = None,
) -> Path:
    """Merge `calibration` into the file of its key and return the file. Safe while other processes do the same. `base`:
    the calibration that it grew from. If the file still equals `base`, it is replaced. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, calibration.key)
    with _locked(folder):
        known = _load(path, calibration.key, observer)
        (calibration if known is None or known == base else merged(known, calibration)).save(path)
    return path


def replace_in_folder(folder: Path, calibration: Calibration) -> Path:
    """Replace what the file of its key holds, and return the file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, calibration.key)
    with _locked(folder):
        calibration.save(path)
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's file lock. The kernel releases it however this process ends."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(path: Path, key: CalibrationKey, observer: RunObserver) -> Calibration | None:
    """None: there is none, or none that this release reads; a damaged one is set aside."""
    try:
        found = Calibration.load(path, key)
    except CalibrationRefusedError as error:
        observer.event("calibration_refused", f"{error}: costs are measured again during the run")
        return None
    aside = path.with_name(f"{path.name}.corrupt")
    if found is None and aside.is_file() and not path.exists():
        observer.event(
            "calibration_corrupt", f"{path} was damaged and is now {aside}; costs are measured again during the run"
        )
    return found


def calibration_issues(config: Config) -> Iterator[Issue]:
    """Yield the faults of a calibration named by path, as far as the driver sees them. Engines know their devices."""
    wanted = config.rollout.speculation.calibration
    if wanted in ("auto", "off") or config.rollout.speculation.mode == "off":
        return
    path, remedy = Path(wanted), f"set {KEY}=auto, or make one here with `paceline calibrate`"
    if not path.is_file():
        yield Issue(KEY, f"no such file: {path}", remedy=remedy)
        return
    try:
        found = read_calibration(path).key
        asked = found.model_copy(update=_known_to_driver(config))
    except ModelConfigError:
        return  # model.path's own issue
    except (OSError, ValueError) as error:
        yield Issue(KEY, f"{path} is no calibration of this release ({error})", remedy=remedy)
        return
    if differences := found.differences(asked):
        yield Issue(KEY, f"{path} is of another engine: {'; '.join(differences)}", remedy=remedy)


def _known_to_driver(config: Config) -> dict[str, str]:
    return {
        "model": model_shape(config.model.path),
        "precision": precision_name(config.model.dtype, config.rollout.quantization),
    }


@dataclass(slots=True, kw_only=True)
class CalibrationStore:
    """A run's calibrations: those its engines start with, and what the engines measure."""

    folder: Path
    observer: RunObserver
    given: tuple[Calibration, ...] = ()  # to every engine of the run
    path: str = ""  # of the only one, where it was demanded
    keeps: bool = True  # what engines learn
    clock: Callable[[], float] = time.monotonic
    _learned: dict[str, Calibration] = field(default_factory=dict)  # latest of each worker; includes all before
    _news: bool = False  # something was learned since the files were written
    _written: dict[CalibrationKey, Calibration] = field(default_factory=dict)  # base of the next write
    _written_s: float = 0.0
    _known: set[tuple[str, int]] = field(default_factory=set)  # reported engine starts

    @classmethod
    def of(cls, config: Config, observer: RunObserver) -> "CalibrationStore":
        """Open the store that rollout.speculation.calibration names. An unreadable file is ignored with an event."""
        wanted, folder = config.rollout.speculation.calibration, calibrations_folder(config)
        if wanted == "off" or config.rollout.speculation.mode == "off":
            return cls(folder=folder, observer=observer, keeps=False)
        if wanted != "auto":
            demanded = read_calibration(Path(wanted))
            return cls(folder=folder, observer=observer, given=(demanded,), path=wanted, keeps=False)
        try:
            given = tuple(_fitting(folder, _known_to_driver(config), observer))
        except (OSError, ModelConfigError) as error:
            observer.event(
                "calibration_refused", f"{folder} cannot be read ({error}): costs are measured during the run"
            )
            given = ()
        return cls(folder=folder, observer=observer, given=given)

    def heard(self, worker: str, event: PassEvent) -> None:
        """Take an engine's measurement."""
        match event:
            case PassesKnown(key, passes):
                self._starts(worker, key, passes)
            case PassesRefined(calibration):
                self._learned[worker], self._news = calibration, True
                now_s = self.clock()
                if not self._written_s:
                    self._written_s = now_s
                if now_s - self._written_s >= WRITE_S:
                    self.write()
            case PassesDrifted(factor, before):
                self.observer.event("calibration_drift", f"{worker}: {drift_text(factor, before)}")

    def write(self) -> None:
        """Write what engines have measured since the last call."""
        news, self._news = self._news, False
        self._written_s = self.clock()
        if not (self.keeps and news):
            return
        by_key: dict[CalibrationKey, Calibration] = {}
        for calibration in self._learned.values():
            other = by_key.get(calibration.key)
            by_key[calibration.key] = calibration if other is None else merged(other, calibration)
        for calibration in by_key.values():
            try:
                key = calibration.key
                base = self._written.get(key, next((one for one in self.given if one.key == key), None))
                self._written[key] = read_calibration(add_to_folder(self.folder, calibration, self.observer, base))
            except OSError as error:
                self.observer.event("calibration_not_kept", f"the next run measures its costs again: {error}")

    def _starts(self, worker: str, key: CalibrationKey, passes: int) -> None:
        if (key.device, passes) in self._known:
            return
        self._known.add((key.device, passes))
        if passes:
            source = self.path or str(file_of(self.folder, key))
            text = f"{worker} begins with {passes} measured passes for {key.device}: {source}"
        else:
            text = (
                f"{worker} has none for {key.device} yet: passes are measured in passing (or by `paceline calibrate`)"
            )
        self.observer.event("calibration", text)


def _fitting(folder: Path, wanted: dict[str, str], observer: RunObserver) -> Iterator[Calibration]:
    """Yield the calibrations of that model and precision, for all devices."""
    for path in sorted(folder.glob("*.json")):
        try:
            key = CalibrationKey.model_validate(json.loads(path.read_bytes())["key"])
        except (ValueError, KeyError, TypeError):
            key = CalibrationKey(model="", precision="", device="")  # damaged: it is set aside
        if wanted.items() <= key.model_dump().items() or not key.model:
            found = _load(path, key, observer)
            if found is not None:
                yield found


def drift_text(factor: float, before: float) -> str:
    """Describe the drift for people."""
    if abs(factor - 1) < 0.2:
        return f"engine steps take what the calibration says again (before: {before:.2f}x)"
    if factor > 1:
        cause = "something else uses this machine, or its clock is lower than when it was measured"
    else:
        cause = "the machine was busy when it was measured, or the engine has become faster"
    return (
        f"engine steps take {factor:.2f}x what the calibration says: {cause}. Strategies are chosen by what steps take "
        "now; if this is how it stays, measure anew with `paceline calibrate`"
    )
