"""The server that forks a process for each grading of evaluation/isolation.py.

The server imports slow modules once, and has a single thread, so that it can fork. Each grading has
two connections to the caller. The forked process receives the request and sends the outcome on the
first one; the server reports the start and the end of the forked process on the second one.
"""

import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import resource
import socket
import sys
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

from evaluation.isolation import MAX_MEMORY_BYTES, GradingRequest, UngradableError

_FORK = multiprocessing.get_context("fork")


def serve(control_fd: int, modules: Iterable[str]) -> None:
    """Import the modules, and fork a process for each grading until the caller closes the control
    socket. Then kill the processes that are left."""
    for module in modules:
        with contextlib.suppress(Exception):  # the grading that needs the module reports the error
            importlib.import_module(module)
    gradings: dict[ForkProcess, Connection] = {}
    with socket.socket(fileno=control_fd) as control:
        while True:
            sentinels = [process.sentinel for process in gradings]
            open_statuses = [status for status in gradings.values() if not status.closed]
            ready = wait([control, *sentinels, *open_statuses])
            _end_processes(gradings, ready)
            if control in ready:
                message, fds, _, _ = socket.recv_fds(control, 1, 2)
                if not message:
                    break
                process, status = _start(control, *map(Connection, fds))
                gradings[process] = status
    for process in gradings:
        process.kill()


def _start(
    control: socket.socket, connection: Connection, status: Connection
) -> tuple[ForkProcess, Connection]:
    process = _FORK.Process(target=_grade, args=(control, connection, status))
    process.start()
    connection.close()
    with contextlib.suppress(ConnectionError):  # the caller has given up
        status.send("started")
    return process, status


def _end_processes(gradings: dict[ForkProcess, Connection], ready: Sequence[object]) -> None:
    """Kill the processes whose results are no longer awaited, and report the exit codes of those
    that have ended."""
    for process, status in tuple(gradings.items()):
        if status in ready:
            process.kill()
            status.close()
        if process.sentinel in ready:
            process.join()
            if not status.closed:
                with status, contextlib.suppress(ConnectionError):
                    status.send(process.exitcode)
            process.close()
            del gradings[process]


def _grade(control: socket.socket, connection: Connection, status: Connection) -> None:
    control.close()
    status.close()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    logging.disable()
    with contextlib.suppress(EOFError, ConnectionError):  # the caller has given up
        request: GradingRequest = connection.recv()
        os.chdir(request.directory)
        sys.path[:], sys.argv[:] = request.path, request.argv
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):  # noqa: PTH123 - a device
            connection.send(_outcome(request.call))


def _outcome(call: bytes) -> tuple[str, object]:
    try:
        function, arguments = pickle.loads(call)
        return "succeeded", function(*arguments)
    except UngradableError as error:
        return "ungradable", error.reason
    except ModuleNotFoundError as error:
        return "ungradable", f"the package {error.name} is not installed"
    except Exception as error:  # noqa: BLE001 - any error is the result of the process
        return "failed", f"{type(error).__name__}: {error}"[:500]
