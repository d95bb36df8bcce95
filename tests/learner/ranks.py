"""Runs a function as N learner ranks in child processes (gloo, no Ray) and collects what each returns."""

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from actors.training.parallel import Rank, join_group, join_store, leave_group, open_store

TIMEOUT_S = 120.0


def run_ranks(size: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """[function(rank, *args) of rank 0, 1, ...]. A child's exception fails the test with its traceback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("forkserver")  # torch is imported once, and not by every rank of every test
    context.set_forkserver_preload([__name__, "actors.training.trainer", "torch.distributed.fsdp"])
    store = open_store("127.0.0.1", size, TIMEOUT_S)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    children = [
        context.Process(target=_child, args=(index, size, store.port, pipes[index][1], function, args), daemon=True)
        for index in range(size)
    ]
    try:
        for child in children:
            child.start()
        results = []
        for index, (receiver, _) in enumerate(pipes):
            assert receiver.poll(TIMEOUT_S), f"rank {index} did not answer in {TIMEOUT_S} s"
            ok, value = receiver.recv()
            assert ok, f"rank {index}:\n{value}"
            results.append(value)
        return results
    finally:
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _child(
    index: int, size: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    rank = Rank(index, size)
    try:
        join_group(join_store("127.0.0.1", port, size, TIMEOUT_S), rank, timeout_s=TIMEOUT_S)
        pipe.send((True, function(rank, *args)))
        leave_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
