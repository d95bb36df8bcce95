"""Runs programs in the sandbox as an ordinary user, for tests that run as root: `python as_user.py FOLDER PROGRAM...`.

Prints a JSON list of [passed, message], and what is left in FOLDER, where the private folders are made.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from actors.rewards import sandbox

UID = 1234
NO_INTERPRETER = 77


def main() -> None:
    folder, programs = sys.argv[1], sys.argv[2:]
    os.chown(folder, UID, UID)
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    if not os.access(sys.executable, os.X_OK):  # root's own: another one will do, confinement needs the library only
        sys.executable = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.exit(NO_INTERPRETER)
    tempfile.tempdir = folder
    limits = sandbox.Limits(timeout_s=30, memory_bytes=256 << 20)
    verdicts = [sandbox.run_confined(program, limits) for program in programs]
    print(
        json.dumps(
            [
                [[verdict.passed, verdict.message] for verdict in verdicts],
                [path.name for path in Path(folder).iterdir()],
            ]
        )
    )


if __name__ == "__main__":
    main()
