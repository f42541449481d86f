"""A guest that breaks the protocol loses only its own sandbox."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest

from sandbox_runtime.channel import MAX_CONNECTIONS, Channel
from sandbox_runtime.connection_queue import BURST_CONNECTIONS
from sandbox_runtime.errors import FileTimeoutError, SandboxLostError, SandboxStartError
from sandbox_runtime.guest_sandbox import REPORT_TIMEOUT_S, GuestSandbox
from sandbox_runtime.protocol import (
    ACK,
    CREDIT,
    DATA,
    END,
    EOF,
    HEADER,
    HELLO,
    MAX_REPORT_BYTES,
    OPEN,
    PING,
    PONG,
    RESET,
    STDERR,
    VERSION,
    WINDOW,
    WINDOW_BYTES,
    frame,
    json_frame,
)
from sandbox_runtime.sandbox import TRANSFER_TIMEOUT_S, OutputCap
from sandbox_runtime.streams import ProgramConnection
from sandbox_runtime.tools.editor import write_file as write
from tests.fakes.manual_clock import ManualClock
from tests.fakes.waiting import until
from tests.sandbox_runtime.scripted_guest import (
    REPORT,
    ScriptedGuest,
    ending_with,
    reporting,
    scripted_sandbox,
)
from tests.sandbox_runtime.transfer import drop, pieces, read

LATE_S = 0.2
"""The timeout of an operation, which passes after the operation has begun."""
GARBAGE: dict[str, Callable[[int], bytes]] = {
    "a frame longer than any may be": lambda n: HEADER.pack(n, DATA, MAX_REPORT_BYTES + 1),
    "a frame of four gigabytes": lambda n: HEADER.pack(n, DATA, 0xFFFFFFFF),
    "bytes that are no frames": lambda n: b"Traceback (most recent call last)",
    "an unknown frame type": lambda n: frame(n, 99, b"x"),
    "a host's frame type": lambda n: frame(n, RESET),
    "a stream never opened": lambda n: frame(n + 2, DATA, b"x"),
    "a stream of its own": lambda n: frame(4, DATA, b"x"),
    "empty data without end": lambda n: frame(n, DATA, b""),
    "more than its credit": lambda n: frame(n, DATA, b"x" * 65536) * 5,
    "more output than the cap": lambda n: frame(n, DATA, b"x" * 4000),
    "credit for more than was sent": lambda n: frame(n, WINDOW, CREDIT.pack(WINDOW_BYTES)),
    "credit of a wrong size": lambda n: frame(n, WINDOW, b"\0"),
    "an answer that nobody asked for": lambda n: frame(0, PONG),
    "a second greeting": lambda n: json_frame(0, HELLO, {"version": VERSION}),
    "a report that is no JSON": ending_with(b"{"),
    "a report that is no object": ending_with(b"[]"),
    "a report nested without end": ending_with(b"[" * 60_000),
    "a report without an exit code": ending_with(b"{}"),
    "a number that is none": reporting(exit_code="0"),
    "a number that is not finite": reporting(cpu_s=float("nan")),
    "a number beyond all bounds": ending_with(json.dumps({**REPORT, "cpu_s": 10**400}).encode()),
    "an endless number": ending_with(b'{"exit_code": ' + b"9" * 5000 + b"}"),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_from_the_guest_kills_the_sandbox_with_a_clear_error(
    garbage: Callable[[int], bytes],
) -> None:
    sandbox, guest = await scripted_sandbox(garbage)
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match="sandbox scripted is gone"):
        await sandbox.exec("true", timeout_s=100, cap=OutputCap(max_bytes=1000))
    await sandbox.close()
    assert guest.killed


LISTINGS = {
    "a path that climbs": b'["../etc", "file", 1]',
    "an absolute path": b'["/etc/passwd", "file", 1]',
    "an empty path": b'["", "file", 1]',
    "an unknown kind": b'["a", "link", 1]',
    "a negative size": b'["a", "file", -1]',
    "no JSON": b"a file",
    "more entries than asked for": b"\n".join(b'["a", "file", 1]' for _ in range(4)),
}


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS.keys())
async def test_invalid_listing_from_the_guest_is_rejected(listing: bytes) -> None:
    sandbox, _ = await scripted_sandbox(
        lambda n: frame(n, DATA, listing) + json_frame(n, END, {"truncated": False})
    )
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match="malformed listing"):
        await sandbox.list("/testbed", max_entries=3)


async def test_guest_that_sends_more_of_a_file_than_max_bytes_loses_its_sandbox() -> None:
    sandbox, _ = await scripted_sandbox(lambda n: frame(n, DATA, b"x" * 11))
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match="more of a file"):
        await read(sandbox, "/testbed/file", max_bytes=10)


async def test_file_shorter_than_reported_loses_the_sandbox() -> None:
    sandbox, _ = await scripted_sandbox(
        lambda n: frame(n, DATA, b"x" * 9) + json_frame(n, END, {"bytes": 10})
    )
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match="less of a file"):
        await read(sandbox, "/testbed/file", max_bytes=10)


async def test_guest_that_never_ends_a_command_is_killed_after_the_timeout() -> None:
    sandbox, guest = await scripted_sandbox(lambda n: frame(n, STDERR, b"working"))
    with anyio.fail_after(20), pytest.raises(SandboxLostError, match="did not end a command"):
        await sandbox.exec("true", timeout_s=-3.9)
    assert guest.killed


class SlowToKillGuest(ScriptedGuest):
    """A guest whose `kill` takes longer than the timeout of the failed operation."""

    def __init__(self, answer: Callable[[int], bytes]) -> None:
        super().__init__(answer)
        self.may_end = asyncio.Event()
        self.is_ending = asyncio.Event()
        self.has_ended = False

    async def kill(self) -> None:
        self.is_ending.set()
        await self.may_end.wait()
        self.has_ended = True
        await super().kill()


async def slow_to_end(answer: Callable[[int], bytes]) -> tuple[GuestSandbox, SlowToKillGuest]:
    guest = SlowToKillGuest(answer)
    channel = Channel(guest)
    await channel.connect(timeout_s=5)
    return GuestSandbox(channel), guest


FILE_OPERATIONS: dict[str, Callable[[GuestSandbox], Awaitable[object]]] = {
    "put": lambda sandbox: sandbox.put("/testbed/file", pieces(b"42"), timeout_s=LATE_S),
    "get": lambda sandbox: read(sandbox, "/testbed/file", max_bytes=1, timeout_s=LATE_S),
    "list": lambda sandbox: sandbox.list("/testbed", timeout_s=LATE_S),
}


@pytest.mark.parametrize("operate", FILE_OPERATIONS.values(), ids=FILE_OPERATIONS.keys())
async def test_deadline_of_a_file_operation_does_not_interrupt_the_kill_of_a_hostile_guest(
    operate: Callable[[GuestSandbox], Awaitable[object]],
) -> None:
    answers = iter([b"", frame(3, DATA, b"no JSON\n")])
    sandbox, guest = await slow_to_end(lambda n: next(answers))
    other = asyncio.create_task(sandbox.get("/other", drop, max_bytes=1))
    await asyncio.sleep(0)

    async def end_late() -> None:
        await guest.is_ending.wait()
        # Timers run in their order, however late: the operation's deadline comes first.
        asyncio.get_running_loop().call_later(2 * LATE_S, guest.may_end.set)

    ending = asyncio.create_task(end_late())
    with anyio.fail_after(5):
        with pytest.raises(SandboxLostError):
            await operate(sandbox)
        with pytest.raises(SandboxLostError):
            await other
    assert guest.has_ended
    await ending


WORKSPACE_OPERATIONS: dict[str, Callable[[GuestSandbox], Coroutine[Any, Any, object]]] = {
    "snapshot": lambda sandbox: sandbox.snapshot(drop, max_bytes=1),
    "restore": lambda sandbox: sandbox.restore(pieces(b"42")),
}


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test moves forward."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


@pytest.mark.parametrize("operate", WORKSPACE_OPERATIONS.values(), ids=WORKSPACE_OPERATIONS.keys())
def test_snapshot_or_restore_that_the_guest_never_answers_ends_at_its_deadline(
    operate: Callable[[GuestSandbox], Coroutine[Any, Any, object]],
) -> None:
    loop = SkippingLoop()

    async def wait_for_the_deadline() -> None:
        sandbox, guest = await scripted_sandbox(lambda n: b"", ManualClock())
        with anyio.fail_after(TRANSFER_TIMEOUT_S + 5):
            operation = asyncio.create_task(operate(sandbox))
            await until(lambda: EOF in guest.kinds)
            loop.skipped_s += TRANSFER_TIMEOUT_S - 60
            for _ in range(10):
                await asyncio.sleep(0)
            assert not operation.done()
            loop.skipped_s += 60
            with pytest.raises(FileTimeoutError, match=r"pipe took longer than 300\.0 s"):
                await operation
            await sandbox.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(wait_for_the_deadline())


JOB_OPERATIONS: dict[str, tuple[Callable[[GuestSandbox], Coroutine[Any, Any, object]], str]] = {
    "stop": (lambda sandbox: sandbox.stop("job"), "did not stop a job in time"),
    "wait": (lambda sandbox: sandbox.wait("job", wait_s=0), "did not end a command in time"),
}


@pytest.mark.parametrize(("operate", "error"), JOB_OPERATIONS.values(), ids=JOB_OPERATIONS)
def test_guest_that_never_answers_about_a_job_is_killed_at_the_deadline(
    operate: Callable[[GuestSandbox], Coroutine[Any, Any, object]], error: str
) -> None:
    loop = SkippingLoop()

    async def wait_for_the_deadline() -> None:
        answers = iter([reporting(running=True), lambda n: b""])
        sandbox, guest = await scripted_sandbox(lambda n: next(answers)(n), ManualClock())
        with anyio.fail_after(REPORT_TIMEOUT_S + 5):
            await sandbox.exec("sleep 100", timeout_s=100, wait_s=0, command_id="job")
            operation = asyncio.create_task(operate(sandbox))
            await until(lambda: guest.kinds.count(OPEN) == 2)
            loop.skipped_s += REPORT_TIMEOUT_S
            with pytest.raises(SandboxLostError, match=error):
                await operation
        assert guest.killed

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(wait_for_the_deadline())


async def test_hostile_guest_is_killed_although_the_caller_is_cancelled() -> None:
    answers = iter([b"", frame(3, DATA, b"more than asked for")])
    sandbox, guest = await slow_to_end(lambda n: next(answers))
    other = asyncio.create_task(sandbox.get("/other", drop, max_bytes=1))
    await asyncio.sleep(0)
    caller = asyncio.create_task(read(sandbox, "/testbed/file", max_bytes=1))
    with anyio.fail_after(5):
        await guest.is_ending.wait()
        caller.cancel()
        await asyncio.wait([caller])
        guest.may_end.set()
        with pytest.raises(SandboxLostError):
            await other
        await sandbox.close()
    assert guest.has_ended


async def test_protocol_violation_does_not_affect_other_sandboxes() -> None:
    broken, _ = await scripted_sandbox(lambda n: b"garbage garbage")
    sound, _ = await scripted_sandbox(reporting(exit_code=7))
    with anyio.fail_after(5), pytest.raises(SandboxLostError):
        await broken.exec("true", timeout_s=5)
    assert (await sound.exec("true", timeout_s=5)).exit_code == 7


async def test_frames_for_a_cancelled_operation_are_ignored() -> None:
    answers = iter([lambda n: b"", reporting(exit_code=3)])
    sandbox, guest = await scripted_sandbox(lambda n: next(answers)(n))
    with anyio.move_on_after(0.01):
        await sandbox.exec("sleep 100", timeout_s=100)
    assert RESET in guest.kinds
    guest._output.put_nowait(frame(1, DATA, b"late") + json_frame(1, END, REPORT))
    assert (await sandbox.exec("true", timeout_s=5)).exit_code == 3


async def test_other_protocol_version_is_refused() -> None:
    guest = ScriptedGuest(reporting(), hello=json_frame(0, HELLO, {"version": 99}))
    why = f"version 99, {VERSION} expected"
    with anyio.fail_after(5), pytest.raises(SandboxStartError, match=why):
        await Channel(guest).connect(timeout_s=5)
    assert guest.killed


async def test_silent_agent_fails_the_start() -> None:
    guest = ScriptedGuest(reporting(), hello=b"\0")
    with anyio.fail_after(5), pytest.raises(SandboxStartError, match=r"not ready after 0\.01 s"):
        await Channel(guest).connect(timeout_s=0.01)
    assert guest.killed


async def test_a_guest_that_does_not_answer_a_ping_is_lost() -> None:
    guest = ScriptedGuest(reporting())
    channel = Channel(guest)
    await channel.connect(timeout_s=5)
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match="no answer"):
        await channel.ping(timeout_s=0.01)
    assert guest.killed


async def test_a_guest_that_falls_silent_in_an_operation_is_lost() -> None:
    guest = ScriptedGuest(lambda n: frame(n, STDERR, b"working"))
    channel = Channel(guest, silence_timeout_s=0.01)
    await channel.connect(timeout_s=5)
    with anyio.fail_after(5), pytest.raises(SandboxLostError, match=r"no answer in 0\.01 s"):
        await GuestSandbox(channel).exec("true", timeout_s=100)
    assert guest.killed


async def test_silent_guest_that_answers_pings_is_not_killed() -> None:
    guest = ScriptedGuest(lambda n: b"")
    guest.pings_until_done = 5
    channel = Channel(guest, silence_timeout_s=0.01)
    await channel.connect(timeout_s=5)
    sandbox = GuestSandbox(channel)
    with anyio.fail_after(5):
        assert (await sandbox.exec("true", timeout_s=100)).exit_code == 0
    assert guest.kinds.count(PING) == 5


async def test_small_upload_and_a_held_back_acknowledgement_are_sent_in_one_write() -> None:
    sandbox, guest = await scripted_sandbox(reporting(bytes=2))
    await sandbox.exec("true", timeout_s=5)
    writes = guest.writes
    await write(sandbox, "/testbed/file", b"42")
    assert guest.writes == writes + 1
    assert guest.kinds == [OPEN, WINDOW, ACK, OPEN, WINDOW, DATA, EOF]


async def test_upload_cancelled_before_its_first_bytes_is_not_sent() -> None:
    sandbox, guest = await scripted_sandbox(reporting())
    await sandbox.exec("true", timeout_s=5)
    held = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        held.set()
        await asyncio.Event().wait()

    upload = asyncio.create_task(sandbox.put("/testbed/file", source()))
    await held.wait()
    upload.cancel()
    await asyncio.wait([upload])
    await sandbox.exec("true", timeout_s=5)
    assert guest.kinds == [OPEN, WINDOW, RESET, ACK, OPEN, WINDOW]


def _opened(number: int) -> bytes:
    return frame(number, OPEN)


async def _connecting(frames: bytes) -> tuple[GuestSandbox, ScriptedGuest, list[ProgramConnection]]:
    """Return a sandbox whose programs open connections, and the connections passed to its
    handler."""
    clock = ManualClock()
    sandbox, guest = await scripted_sandbox(lambda n: frames + reporting()(n), clock)
    decided: list[ProgramConnection] = []

    async def decide(connection: ProgramConnection) -> None:
        decided.append(connection)
        await asyncio.Event().wait()

    sandbox.set_connection_handler(decide)
    await sandbox.exec("true", timeout_s=5)
    clock.advance(1.0)  # for those that wait for their turn
    for _ in range(5):
        await asyncio.sleep(0)
    return sandbox, guest, decided


async def test_closed_connection_makes_room_for_another_connection_at_once() -> None:
    all_there_may_be = range(2, 2 * MAX_CONNECTIONS + 2, 2)
    frames = b"".join(map(_opened, all_there_may_be))
    one_for_another = frame(2, RESET) + _opened(2 * MAX_CONNECTIONS + 2)
    sandbox, guest, decided = await _connecting(frames + one_for_another)
    assert guest.kinds.count(RESET) == 0
    assert len(decided) == MAX_CONNECTIONS + 1
    await sandbox.close()


async def test_flood_of_short_connections_is_served_only_up_to_the_burst() -> None:
    sandbox, guest, decided = await _connecting(
        b"".join(_opened(number) + frame(number, RESET) for number in range(2, 20_002, 2))
    )
    assert len(decided) == BURST_CONNECTIONS
    assert not guest.killed
    await sandbox.close()
