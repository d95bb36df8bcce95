"""Starts the two confined processes of one grading and ends with the judge. Owns the processes and what each holds.

Process tree: supervisor -> (first process of a new PID namespace ->) candidate and judge. Killing the supervisor kills
the rest. The candidate is forked before any test is read, and holds neither the tests nor the descriptor of the
verdict. It cannot look into the judge, which is not dumpable and is in another Landlock domain.
"""

# ruff: noqa: PTH123
# (Every import delays every graded program: no pathlib.)
import json
import os
import signal
import sys
import time
from typing import Any

from . import layers, memory, wire
from .candidate import Candidate
from .judge import judge
from .remote import CandidateLink


def main() -> None:
    """Return only in a fork of the candidate that has run the program as a script; end the process everywhere else."""
    codes, tests, verdicts, memory_bytes = (int(argument) for argument in (*sys.argv[2:5], sys.argv[6]))
    wire.lift_int_limit()
    imports = layers.pin_import_paths()
    os.chdir(sys.argv[5])
    os.umask(0o077)
    folder = os.open(".", os.O_RDONLY)  # by descriptor, like the imports: the user nobody may lack access to its path
    report: dict[str, Any] = {"not_root": layers.drop_root(), "namespaces": layers.new_namespaces()}
    report["memory_summed"] = memory.measurable()
    layers.prctl(layers.PR_SET_DUMPABLE, 0)  # after the change of user, which resets it; forks inherit it
    layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    layers.prctl(layers.PR_SET_SUBREAPER, 1)
    if report["namespaces"] and (first := os.fork()):  # the first process of the namespace: when it ends, all in it end
        for descriptor in (codes, tests):
            os.close(descriptor)
        supervise(first, verdicts, memory_bytes)
        os._exit(0)
    layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)

    requests, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        for descriptor in (tests, verdicts, requests[1], answers[0]):
            os.close(descriptor)
        run_candidate(codes, requests[0], answers[1], report, imports, folder)
        return
    referee = os.fork()
    if referee == 0:
        for descriptor in (codes, requests[0], answers[1]):
            os.close(descriptor)
        run_judge(tests, verdicts, CandidateLink(requests[1], answers[0]), report, imports, folder)
        os._exit(0)
    for descriptor in (codes, tests, *requests, *answers):
        os.close(descriptor)
    if report["namespaces"]:
        os.close(verdicts)
        wait_for(referee)
    else:
        supervise(referee, verdicts, memory_bytes)
        end_orphans()
    os._exit(0)


def run_candidate(
    codes: int, requests: int, answers: int, report: dict[str, Any], imports: list[int], folder: int
) -> None:
    """Return in a fork that has run the program as a script; otherwise end with the judge."""
    job = read_job(codes)
    layers.confine(job["limits"], imports, folder, own_namespace=report["namespaces"])
    layers.prctl(layers.PR_SET_DUMPABLE, 1)  # else its own /proc/self would belong to root
    candidate = Candidate(job, requests, answers)
    try:
        candidate.serve()
    except (EOFError, BrokenPipeError):
        os._exit(0)
    candidate.run_as_main()


def run_judge(
    tests: int, verdicts: int, link: CandidateLink, report: dict[str, Any], imports: list[int], folder: int
) -> None:
    """Write two lines: the confinement, then the verdict."""
    job = read_job(tests)
    granted = layers.confine(job["limits"], imports, folder, own_namespace=report["namespaces"])
    os.write(verdicts, json.dumps(report | granted).encode() + b"\n")
    os.write(verdicts, json.dumps(judge(job, link)).encode() + b"\n")


def read_job(descriptor: int) -> dict[str, Any]:
    with os.fdopen(descriptor, "rb") as stream:
        job: dict[str, Any] = json.loads(stream.read())
    return job


def supervise(pid: int, verdicts: int, memory_bytes: int) -> None:
    """Wait for one child; end everything, with a verdict, once all processes together hold too much.

    The limit of each process already bounds a program of one process and its judge, so the limit here is twice as
    large.
    """
    while (ended := os.waitpid(-1, os.WNOHANG)[0]) != pid:
        if ended:
            continue
        if memory.exceeds(memory.descendants(os.getpid()), 2 * memory_bytes):
            end_orphans()
            message = f"its processes together held more than {2 * memory_bytes >> 20} MiB of memory"
            os.write(verdicts, json.dumps({"token": None, "message": message}).encode() + b"\n")
            return
        time.sleep(memory.INTERVAL_S)


def wait_for(pid: int) -> None:
    """Wait for one child, and reap every orphan that this process inherits."""
    while os.wait()[0] != pid:
        pass


def end_orphans() -> None:
    """Kill every process below this one, which inherits all orphans. Only needed without a PID namespace."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as stream:
                children = [int(pid) for pid in stream.read().split()]
        except OSError:
            return  # a kernel without this list: the grader looks for them too
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)
