"""Run a coordinator in a process of its own, or make its key files.

python -m coordinator run --directory runs/demo [--lease-s 10 --threshold 1 ...]
python -m coordinator keys DIRECTORY
"""

import argparse
import signal
import sys
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import ValidationError

from config.coordinator import AdminOptions, CoordinatorOptions, CurveOptions
from coordinator.admin.credentials import CERTIFICATE_FILE, KEY_FILE, write_certificate
from coordinator.errors import SetupError
from coordinator.service import CoordinatorService
from coordinator.transport.security import write_keys


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Exit codes: 0 after SIGTERM or SIGINT, 1 on failure, 2 on wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m coordinator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="serve until SIGTERM")
    run.add_argument("--directory", type=Path, help="folder of the run: gets coordinator.json")
    run.add_argument("--curve-directory", type=str, help="key files: encrypt, and admit only who is allowed")
    run.add_argument(
        "--no-curve", action="store_true", help="do not encrypt, though --host is not the loopback address"
    )
    run.add_argument(
        "--admin-token",
        action=argparse.BooleanOptionalAction,
        help="ask for it; default: where there is a folder to leave it in, and beyond loopback",
    )
    run.add_argument("--admin-certificate", type=str, help="PEM file, for TLS; with --admin-key")
    run.add_argument("--admin-key", type=str, help="PEM file")
    run.add_argument("--worker", action="append", metavar="NAME", help="who may register; default: anybody")
    defaults = CoordinatorOptions()
    for name, field in CoordinatorOptions.model_fields.items():
        if name not in ("curve", "admin"):
            default = getattr(defaults, name)
            run.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=field.description)
    keys = commands.add_parser("keys", help="make key files")
    keys.add_argument("directory", type=Path)
    parsed = parser.parse_args(arguments)
    try:
        return _keys(parsed.directory) if parsed.command == "keys" else _run(vars(parsed))
    except (OSError, SetupError, ValidationError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1


def _run(values: dict[str, Any]) -> int:
    curve = CurveOptions(enabled=False if values.pop("no_curve") else None, directory=values.pop("curve_directory"))
    admin = AdminOptions(**{name: values.pop(f"admin_{name}") for name in ("token", "certificate", "key")})
    directory, members = values.pop("directory"), values.pop("worker")
    values.pop("command")
    # Whether it ends as a failure. Not an Event: the handler may interrupt a wait that holds its lock.
    over: SimpleQueue[bool] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.put(False))
    options = CoordinatorOptions(**values, curve=curve, admin=admin)
    with CoordinatorService(
        options, directory=directory, members=members, on_failure=partial(over.put, True)
    ) as service:
        print(f"workers: {service.endpoint}  admin: {service.address.admin}  term: {service.address.term}", flush=True)
        return int(over.get())


def _keys(directory: Path) -> int:
    write_keys(directory)
    write_certificate(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    names = ", ".join(f"{role}-key.json" for role in ("coordinator", "worker", "driver"))
    print(f"{directory}: {names} (secret), allowed.json (who may connect)")
    print(f"{directory}: {CERTIFICATE_FILE}, {KEY_FILE} (secret) for coordinator.admin.certificate and .key")
    return 0


if __name__ == "__main__":
    sys.exit(main())
