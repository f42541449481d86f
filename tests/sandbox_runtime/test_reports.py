"""A report is used only if every field has its type and a possible value."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest

from sandbox_runtime.errors import JobMissingError, SandboxFileError, SandboxLostError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import END, frame
from tests.sandbox_runtime.scripted_guest import REPORT, ending_with, scripted_sandbox

NESTED = b"[" * 900 + b"]" * 900
"""Nested deeper than Python's repr() supports; the JSON parser accepts it."""


async def drop(data: bytes) -> None:
    """A sink."""


async def one_byte() -> AsyncIterator[bytes]:
    yield b"x"


async def job(sandbox: GuestSandbox) -> str:
    """Start a job and return its id."""
    return (await sandbox.exec("sleep 100", timeout_s=100, wait_s=1)).job_id


async def wait_for_a_job(sandbox: GuestSandbox) -> object:
    return await sandbox.wait(await job(sandbox), wait_s=1)


async def stop_a_job(sandbox: GuestSandbox) -> object:
    return await sandbox.stop(await job(sandbox))


OPERATIONS: dict[str, Callable[[GuestSandbox], Awaitable[object]]] = {
    "exec": lambda sandbox: sandbox.exec("true", timeout_s=100),
    "put": lambda sandbox: sandbox.put("/testbed/file", one_byte()),
    "get": lambda sandbox: sandbox.get("/testbed/file", drop, max_bytes=10),
    "list": lambda sandbox: sandbox.list("/testbed"),
    "snapshot": lambda sandbox: sandbox.snapshot(drop, max_bytes=10),
    "restore": lambda sandbox: sandbox.restore(one_byte()),
    "wait": wait_for_a_job,
    "stop": stop_a_job,
}
RUNNING = json.dumps({**REPORT, "running": True}).encode()
NO_FAILURES = {
    "a list for an error": b'{"error": []}',
    "an object for an error": b'{"error": {}}',
    "nothing for an error": b'{"error": null}',
    "a flag for an error": b'{"error": true}',
    "a number for a message": b'{"error": "io", "message": 1}',
    "a list nested deeply for an error": b'{"error": ' + NESTED + b"}",
}
NO_OUTCOMES = {
    "exec": [
        b'{"exit_code": ' + NESTED + b"}",
        *(
            json.dumps({**REPORT, key: value}).encode()
            for key, value in (
                ("exit_code", True),
                ("exit_code", 1.5),
                ("exit_code", None),
                ("cpu_s", -1),
                ("duration_s", "1"),
                ("duration_s", False),
                ("stdout_bytes", -1),
                ("stdout_bytes", 0.5),
                ("stderr_kept_bytes", -5),
                ("stderr_omitted_lines", {}),
                ("peak_memory_bytes", -1),
                ("reading", -1),
                ("running", 1),
                ("waiting", "no"),
                ("timed_out", []),
            )
        ),
    ],
    "put": [b"{}", b'{"bytes": true}', b'{"bytes": -1}', b'{"bytes": 1.0}', b'{"bytes": "1"}'],
    "get": [b"{}", b'{"bytes": false}', b'{"bytes": -1}', b'{"bytes": []}'],
    "list": [b'{"truncated": 1}', b'{"truncated": []}', b'{"truncated": null}'],
    "snapshot": [b"{}", b'{"exit_code": []}', b'{"exit_code": 2, "stderr": []}'],
    "restore": [b"{}", b'{"exit_code": 0}', b'{"exit_code": true, "stderr": ""}'],
}
CASES = [
    *((name, report) for name in OPERATIONS for report in NO_FAILURES.values()),
    *((name, report) for name, reports in NO_OUTCOMES.items() for report in reports),
]


async def run_with_report(operation: str, report: bytes) -> tuple[object, int]:
    """Run an operation that ends with this report. Return its result or error, and the number of
    times that the guest was killed before it was closed."""
    before = [RUNNING] if operation in ("wait", "stop") else []
    reports = iter([*before, report])
    sandbox, guest = await scripted_sandbox(lambda n: frame(n, END, next(reports)))
    try:
        with anyio.fail_after(5):
            outcome: object = await OPERATIONS[operation](sandbox)
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        outcome = error
    killed = guest.killed
    await sandbox.close()
    return outcome, killed


@pytest.mark.parametrize(
    ("operation", "report"), CASES, ids=[f"{name} {said[:40]!r}" for name, said in CASES]
)
async def test_report_with_values_of_wrong_types_loses_its_sandbox(
    operation: str, report: bytes
) -> None:
    outcome, killed = await run_with_report(operation, report)
    assert isinstance(outcome, SandboxLostError), repr(outcome)
    assert "the agent reported" in str(outcome)
    assert killed


@pytest.mark.parametrize("operation", ["put", "get", "list", "snapshot", "restore"])
async def test_failed_file_operation_leaves_the_sandbox_usable(operation: str) -> None:
    outcome, killed = await run_with_report(
        operation, b'{"error": "io", "message": "\\ud800 no room"}'
    )
    assert type(outcome) is SandboxFileError
    assert str(outcome) == "? no room"  # half of a surrogate pair could not be encoded
    assert not killed


async def test_wait_for_an_unknown_job_raises_job_missing_error() -> None:
    outcome, killed = await run_with_report("wait", b'{"error": "unknown"}')
    assert isinstance(outcome, JobMissingError)
    assert not killed


async def test_command_that_cannot_start_has_the_reason_in_stderr() -> None:
    sandbox, _ = await scripted_sandbox(ending_with(b'{"error": "io", "message": "no memory"}'))
    result = await sandbox.exec("true", timeout_s=5)
    assert (result.exit_code, result.stderr) == (126, "no memory\n")
