"""Whatever a guest sends, in whatever order: its callers see sandbox errors and nothing else, what
it makes the host keep is bounded, and another sandbox does not notice."""

import asyncio
import gc
import sys
from collections.abc import Awaitable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sandbox_runtime.channel import MAX_WIDE_STREAMS
from sandbox_runtime.connection_queue import MAX_HANDLERS
from sandbox_runtime.errors import SandboxError
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.protocol import (
    CREDIT,
    DATA,
    END,
    EOF,
    FIRST_WINDOW_BYTES,
    MAX_CONNECTIONS,
    MAX_DATA_BYTES,
    OPEN,
    PONG,
    RESET,
    STDERR,
    STDERR_TAIL,
    TAIL,
    WINDOW,
    WINDOW_BYTES,
    frame,
    json_frame,
)
from sandbox_runtime.sandbox import OutputCap
from sandbox_runtime.streams import MAX_PIECES, MAX_RESET_STREAMS, ProgramConnection, Stream
from tests.sandbox_runtime.scripted_guest import REPORT, reporting, scripted_sandbox
from tests.sandbox_runtime.transfer import drop

OUTPUT = (DATA, STDERR, TAIL, STDERR_TAIL)
MAX_QUEUED_PIECES = MAX_PIECES + len(OUTPUT)
SIZES = st.sampled_from([0, 1, 2, 1000, MAX_DATA_BYTES])
COUNTS = st.sampled_from([1, 1, 2, 50, 3000])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
REPORTS = st.one_of(
    st.just({}),
    st.just(REPORT),
    st.just({"bytes": 0}),
    st.just({"truncated": False}),
    st.just({"exit_code": 0, "stderr": ""}),
    st.builds(lambda key, value: {**REPORT, key: value}, st.sampled_from(list(REPORT)), JSON),
    st.builds(lambda value: {"error": value, "message": value}, JSON),
    st.builds(lambda value: {"bytes": value, "truncated": value, "exit_code": value}, JSON),
)


async def some_bytes() -> "asyncio.AsyncIterator[bytes]":
    yield bytes(3 * MAX_DATA_BYTES)


class HostileGuest(RuleBasedStateMachine):
    """A sandbox whose guest sends arbitrary frames, beside a sandbox with a working guest."""

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.failures: list[object] = []
        self.operations: list[asyncio.Task[object]] = []
        self.runner.get_loop().set_exception_handler(
            lambda loop, context: self.failures.append(context)
        )
        self.run(self._begin())

    async def _begin(self) -> None:
        self.sound, _ = await scripted_sandbox(reporting(exit_code=7))
        await self._begin_hostile()

    async def _begin_hostile(self) -> None:
        self.sandbox, self.guest = await scripted_sandbox(lambda n: b"")
        self.sandbox.set_connection_handler(self._relay)

    async def _end_hostile(self) -> None:
        await self.sandbox.close()
        if self.operations:
            await asyncio.wait(self.operations)
        for operation in self.operations:
            if not operation.cancelled() and (error := operation.exception()):
                assert isinstance(error, SandboxError), repr(error)
        self.operations.clear()
        assert not self.sandbox._channel._streams
        assert not self.sandbox._channel._connection_queue.tasks()
        assert not self.sandbox._channel._connection_queue._waiting
        assert not len(self.sandbox._channel._reset_streams)

    async def _relay(self, connection: ProgramConnection) -> None:
        """Read to the end and answer, as a gateway does."""
        while await connection.receive():
            await connection.send(b"answer")
        await connection.finish()

    def run(self, work: Awaitable[object]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(20):
                await work

        self.runner.run(bounded())

    # What the host asks for

    @rule(name=st.sampled_from(["exec", "put", "get", "list", "snapshot", "restore", "stop"]))
    def begin_operation(self, name: str) -> None:
        async def begin() -> None:
            if self.sandbox.lost:  # the last one has done its worst
                await self._end_hostile()
                await self._begin_hostile()
            operation = asyncio.ensure_future(_operation(self.sandbox, name))
            self.operations.append(operation)
            await asyncio.sleep(0)

        self.run(begin())

    @precondition(lambda self: self.operations)
    @rule(data=st.data())
    def give_an_operation_up(self, data: st.DataObject) -> None:
        operation = data.draw(st.sampled_from(self.operations))

        async def give_up() -> None:
            operation.cancel()
            await asyncio.wait([operation])

        self.run(give_up())

    @rule(is_open=st.booleans())
    def allow_connections(self, is_open: bool) -> None:
        self.sandbox.set_connection_handler(self._relay if is_open else None)

    # What the guest says

    def send_frames(self, frames: bytes) -> None:
        async def send_frames() -> None:
            self.guest.send_frames(frames)
            await self.guest.wait_delivered()
            for _ in range(3):
                await asyncio.sleep(0)

        self.run(send_frames())

    def stream(self, data: st.DataObject) -> int:
        """Choose a stream: mostly an open one, else one that has ended or never existed."""
        channel = self.sandbox._channel
        open_now = sorted(channel._streams, reverse=True)[:4]
        cancelled = list(channel._reset_streams._streams)[-2:]
        others = [0, 1, 2, channel._next_number, channel._last_connection + 2]
        choices = [numbers for numbers in (open_now, open_now, cancelled, others) if numbers]
        return data.draw(st.sampled_from(data.draw(st.sampled_from(choices))))

    @rule(data=st.data(), kind=st.sampled_from(OUTPUT), size=SIZES, count=COUNTS)
    def say_data(self, data: st.DataObject, kind: int, size: int, count: int) -> None:
        count = max(1, min(count, 2 * WINDOW_BYTES // max(1, size)))
        self.send_frames(frame(self.stream(data), kind, b"[" * size) * count)

    @rule(data=st.data(), count=COUNTS)
    def say_data_of_all_kinds(self, data: st.DataObject, count: int) -> None:
        number = self.stream(data)
        self.send_frames(b"".join(frame(number, kind, b"x") for kind in OUTPUT) * count)

    @precondition(lambda self: any(n % 2 for n in self.sandbox._channel._streams))
    @rule(data=st.data(), report=REPORTS)
    def say_report(self, data: st.DataObject, report: object) -> None:
        operations = sorted(n for n in self.sandbox._channel._streams if n % 2)
        self.send_frames(json_frame(data.draw(st.sampled_from(operations)), END, report))

    @rule(data=st.data(), credit=st.sampled_from([0, 1, WINDOW_BYTES, 2**32 - 1]), count=COUNTS)
    def say_credit(self, data: st.DataObject, credit: int, count: int) -> None:
        self.send_frames(frame(self.stream(data), WINDOW, CREDIT.pack(credit)) * count)

    @rule(data=st.data(), kind=st.sampled_from([EOF, RESET, PONG]), count=COUNTS)
    def say_nothing(self, data: st.DataObject, kind: int, count: int) -> None:
        self.send_frames(frame(self.stream(data), kind) * count)

    @rule(count=COUNTS, end=st.sampled_from([None, EOF, RESET]))
    def open_connections(self, count: int, end: int | None) -> None:
        first = self.sandbox._channel._last_connection + 2
        numbers = range(first, first + 2 * count, 2)
        ending = (lambda n: b"") if end is None else (lambda n: frame(n, end))
        self.send_frames(b"".join(frame(n, OPEN, b"{}") + ending(n) for n in numbers))

    @rule(data=st.data(), kind=st.integers(0, 255), payload=st.binary(max_size=20))
    def say_anything(self, data: st.DataObject, kind: int, payload: bytes) -> None:
        self.send_frames(frame(self.stream(data), kind, payload))

    @rule(said=st.binary(min_size=1, max_size=30))
    def say_garbage(self, said: bytes) -> None:
        self.send_frames(said)

    # What holds

    @invariant()
    def callers_see_sandbox_errors_only(self) -> None:
        for operation in getattr(self, "operations", []):
            if operation.done() and not operation.cancelled() and operation.exception():
                assert isinstance(operation.exception(), SandboxError), operation.exception()
        assert not getattr(self, "failures", [])

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        if not hasattr(self, "sandbox"):
            return
        channel = self.sandbox._channel
        assert len(channel._reset_streams) <= MAX_RESET_STREAMS + 1
        assert len(channel._open_connections) <= MAX_CONNECTIONS
        assert len(channel._connection_queue._handlers) <= MAX_HANDLERS
        assert len(channel._connection_queue._waiting) <= MAX_CONNECTIONS
        assert len(channel._streams) <= MAX_HANDLERS + len(self.operations)
        assert len(channel._wide_streams) <= MAX_WIDE_STREAMS
        wide = len(channel._wide_streams) * (WINDOW_BYTES - FIRST_WINDOW_BYTES)
        unread = sum(map(_unread, channel._streams.values()))
        assert unread <= len(channel._streams) * FIRST_WINDOW_BYTES + wide
        for stream in channel._streams.values():
            assert _queued_pieces(stream) <= MAX_QUEUED_PIECES
            assert _queued_bytes(stream) <= 2 * WINDOW_BYTES
        assert all(not _queued_pieces(each) for _, each in channel._reset_streams._streams.values())

    @invariant()
    def another_sandbox_is_undisturbed(self) -> None:
        if not hasattr(self, "sound"):
            return

        async def use() -> None:
            assert (await self.sound.exec("true", timeout_s=5)).exit_code == 7

        self.run(use())

    def teardown(self) -> None:
        if not hasattr(self, "sandbox"):
            return

        async def end() -> None:
            await self._end_hostile()
            await self.sound.close()
            left = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
            assert not left, left

        self.run(end())
        gc.collect()  # an exception that nobody has looked at is told of then
        assert not self.failures
        self.runner.close()


async def _operation(sandbox: GuestSandbox, name: str) -> object:
    cap = OutputCap(max_bytes=WINDOW_BYTES)
    match name:
        case "exec":
            return await sandbox.exec("true", timeout_s=1000, stdin=b"x" * 100, cap=cap)
        case "put":
            return await sandbox.put("/testbed/file", some_bytes())
        case "get":
            return await sandbox.get("/testbed/file", drop, max_bytes=1 << 20)
        case "list":
            return await sandbox.list("/testbed", max_entries=100)
        case "snapshot":
            return await sandbox.snapshot(drop, max_bytes=1 << 20)
        case "restore":
            return await sandbox.restore(some_bytes())
        case _:
            job = await sandbox.exec("sleep 100", timeout_s=1000, wait_s=1)
            return await sandbox.stop(job.job_id)


def _queued_pieces(stream: Stream | ProgramConnection) -> int:
    return len(stream._pieces)


def _unread(stream: Stream | ProgramConnection) -> int:
    """Return the number of bytes that are queued or that the guest may still send."""
    return stream._agent_credit + sum(len(data) for _, data in stream._pieces)


def _queued_bytes(stream: Stream | ProgramConnection) -> int:
    return sum(sys.getsizeof(piece) + sys.getsizeof(piece[1]) for piece in stream._pieces)


HostileGuest.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHostileGuest = HostileGuest.TestCase
