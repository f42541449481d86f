"""Runs a grading in a process of its own, with a timeout and a memory limit, so that no answer can
crash or hang the report. Defines the errors of graders."""

import contextlib
import logging
import multiprocessing
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

TIMEOUT_S = 30.0
"""Timeout of one grading, in seconds."""
MAX_MEMORY_BYTES = 4 * 2**30
"""Maximum address space of the process of one grading."""
_PROCESS_CONTEXT = multiprocessing.get_context("forkserver")
_Result = TypeVar("_Result")


ErrorKind = Literal["ungradable", "judge failure", "grader failure"]


class GraderError(Exception):
    """The grading of one answer exceeded its timeout or its memory, or failed.

    The answer counts as wrong, so that an answer that crashes its grader is not left out of the
    accuracy. After an error of a subclass, the answer has no grade.
    """

    kind: ErrorKind = "grader failure"

    def __init__(self, reason: str) -> None:
        """Make an error whose message is its kind and the reason."""
        super().__init__(f"{self.kind}: {reason}")
        self.reason = reason


class UngradableError(GraderError):
    """No answer to the sample can be graded here: a package or a data file of the grader is
    missing, the grader cannot read the sample, or the report has no judge."""

    kind: ErrorKind = "ungradable"


class UnreadableSampleError(UngradableError):
    """The grader cannot read the right answer of the sample."""


def preload(modules: Iterable[str]) -> None:
    """Import modules once for all gradings, if they are installed. Has an effect only before the
    first grading."""
    _PROCESS_CONTEXT.set_forkserver_preload([__name__, *modules])


def run_isolated(
    function: Callable[..., _Result], *arguments: Any, timeout_s: float = TIMEOUT_S
) -> _Result:
    """Return the function's result from a new process.

    The function's standard output and its log records are discarded. Raises UngradableError if a
    package is not installed or if the function raises it, and GraderError if there is no result for
    another reason.
    """
    receiving, sender = _PROCESS_CONTEXT.Pipe(duplex=False)
    process = _PROCESS_CONTEXT.Process(target=_send_result, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        if not receiving.poll(timeout_s):
            raise GraderError(f"no result within {timeout_s:g} s")
        kind, result = receiving.recv()
    except EOFError as error:
        process.join()
        raise GraderError(f"the process ended with exit code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
        process.close()
        receiving.close()
    if kind == "ungradable":
        raise UngradableError(result)
    if kind == "failed":
        raise GraderError(result)
    value: _Result = result
    return value


def _send_result(
    sender: Connection, function: Callable[..., object], arguments: Sequence[Any]
) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    logging.disable()
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):  # noqa: PTH123 - a device
        sender.send(_outcome(function, arguments))


def _outcome(function: Callable[..., object], arguments: Sequence[Any]) -> tuple[str, object]:
    try:
        return "succeeded", function(*arguments)
    except UngradableError as error:
        return "ungradable", error.reason
    except ModuleNotFoundError as error:
        return "ungradable", f"the package {error.name} is not installed"
    except Exception as error:  # noqa: BLE001 - any error is the result of the process
        return "failed", f"{type(error).__name__}: {error}"[:500]
