"""run.log: the driver's messages as lines of text with a time, independent of the terminal.

Written line by line, so that a killed process loses nothing. Includes warnings of all libraries in the driver.
"""

import logging
import threading
import time
from pathlib import Path

_FORMAT = "%Y-%m-%d %H:%M:%S"


class RunLog(logging.Handler):
    """The log file. Also a handler of the root logger, until `close`."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._lines = threading.Lock()
        self._file = path.open("a", encoding="utf-8", buffering=1)
        logging.getLogger().addHandler(self)

    def write(self, at_s: float, text: str) -> None:
        stamp = time.strftime(_FORMAT, time.localtime(at_s))
        with self._lines:
            if not self._file.closed:
                self._file.write("".join(f"{stamp}  {line}\n" for line in text.splitlines()))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.write(record.created, f"{record.levelname} {record.name}: {self.format(record)}")
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        with self._lines:
            self._file.close()
        super().close()
