"""Connections that programs inside open: the agent passes them to the host's handler."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from policies.egress import Egress
from sandbox_runtime.channel import MAX_WIDE_STREAMS
from sandbox_runtime.connection_queue import BURST_CONNECTIONS, CONNECTIONS_PER_S
from sandbox_runtime.egress.gateway import EgressGateways
from sandbox_runtime.guest_sandbox import GuestSandbox
from sandbox_runtime.streams import ProgramConnection
from tests.sandbox_runtime.conformance.backends import KINDS, backend_of, started
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output, read, write

CLIENT = """
import socket, sys
def connect():
    return socket.create_connection(("127.0.0.1", 3128), 30)
def rest(s):
    got = b""
    while data := s.recv(65536):
        got += data
    return got
"""


@pytest.fixture(params=KINDS[1:])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[GuestSandbox]:
    async with started(backend_of(request.param, tmp_path)) as opened:
        yield opened


async def _python(sandbox: GuestSandbox, program: str) -> str:
    result = await sandbox.exec("python3 -", timeout_s=PLENTY_S, stdin=(CLIENT + program).encode())
    assert result.exit_code == 0, result.stderr
    return result.stdout


async def _echo(connection: ProgramConnection) -> None:
    while data := await connection.receive():
        await connection.send(data)
    await connection.finish()


async def test_connection_carries_bytes_both_ways_until_both_sides_have_finished(
    sandbox: GuestSandbox,
) -> None:
    sandbox.set_connection_handler(_echo)
    program = "s = connect(); s.sendall(b'hello'); s.shutdown(1); print(rest(s))"
    assert await _python(sandbox, program) == "b'hello'\n"


async def test_connections_without_a_handler_are_closed(
    sandbox: GuestSandbox,
) -> None:
    assert await _python(sandbox, "print(connect().recv(10))") == "b''\n"


async def test_large_transfers_in_both_directions_are_not_mixed(sandbox: GuestSandbox) -> None:
    sandbox.set_connection_handler(_echo)
    program = """
from threading import Thread
def one(n):
    data, s = bytes([n]) * 3_000_000, connect()
    Thread(target=lambda: (s.sendall(data), s.shutdown(1))).start()
    same[n] = rest(s) == data
same = {}
threads = [Thread(target=one, args=(n,)) for n in range(5)]
[t.start() for t in threads]; [t.join() for t in threads]
print(sorted(same.items()))
"""
    expected = [(n, True) for n in range(5)]
    assert await _python(sandbox, program) == f"{expected}\n"


async def test_connections_beyond_the_limit_wait_for_their_turn(
    sandbox: GuestSandbox,
) -> None:
    sandbox.set_connection_handler(_echo)
    program = """
held = [connect() for _ in range(300)]
for s in held[:100]:
    s.close()
for s in held[-10:]:
    s.sendall(b"x"); s.shutdown(1); print(rest(s).decode(), end="")
"""
    assert await _python(sandbox, program) == "x" * 10


async def test_connections_beyond_the_burst_are_all_answered(
    sandbox: GuestSandbox,
) -> None:
    gateway = EgressGateways().create(Egress())
    sandbox.set_connection_handler(gateway.serve)
    program = """
from threading import Thread
def ask(n):
    for _ in range(COUNT // 20):
        with connect() as s:
            s.sendall(b"CONNECT refused.example:443 HTTP/1.1\\r\\n\\r\\n")
            answers.append(rest(s).split(b":")[0])
answers = []
threads = [Thread(target=ask, args=(n,)) for n in range(20)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(answers), *set(answers))
"""
    count = (BURST_CONNECTIONS + CONNECTIONS_PER_S) // 20 * 20
    printed = await _python(sandbox, program.replace("COUNT", str(count)))
    assert printed == f"{count} b'HTTP/1.1 403 Forbidden'\n"
    sandbox.set_connection_handler(None)
    await gateway.aclose()


async def test_unread_connection_does_not_block_commands(sandbox: GuestSandbox) -> None:
    async def deaf(connection: ProgramConnection) -> None:
        await asyncio.Event().wait()

    sandbox.set_connection_handler(deaf)
    fill = """
s = connect()
s.setblocking(False)
try:
    while True:
        s.send(bytes(65536))
except BlockingIOError:
    pass
"""
    await _python(sandbox, fill)
    assert await output(sandbox, "echo well") == "well\n"


async def test_connections_with_slow_readers_block_nothing_and_lose_no_data(
    sandbox: GuestSandbox,
) -> None:
    go_on, sizes = asyncio.Event(), []

    async def read_late(connection: ProgramConnection) -> None:
        size = len(await connection.receive())
        await go_on.wait()
        while data := await connection.receive():
            size += len(data)
        sizes.append(size)
        await connection.finish()

    sandbox.set_connection_handler(read_late)
    send = f"""
from threading import Thread
def one(s):
    s.settimeout(None)  # of all of a sendall, and who reads it comes late
    s.sendall(bytes(1_000_000)); s.shutdown(1); ended.append(rest(s))
ended, held = [], [connect() for _ in range({2 * MAX_WIDE_STREAMS})]
threads = [Thread(target=one, args=(s,)) for s in held]
[t.start() for t in threads]; print("begun", flush=True); [t.join() for t in threads]
print(len(ended))
"""
    begun = OutputRecorder()
    with anyio.fail_after(PLENTY_S):
        async with anyio.create_task_group() as group:

            async def run() -> None:
                program = (CLIENT + send).encode()
                await sandbox.exec("python3 -", timeout_s=PLENTY_S, stdin=program, on_output=begun)

            group.start_soon(run)
            await begun.something.wait()
            assert await output(sandbox, "echo well") == "well\n"
            await write(sandbox, "/testbed/file", bytes(1_000_000))
            assert await read(sandbox, "/testbed/file") == bytes(1_000_000)
            go_on.set()
    assert sizes == [1_000_000] * 2 * MAX_WIDE_STREAMS
    assert begun.text() == f"begun\n{2 * MAX_WIDE_STREAMS}\n"


async def test_program_reads_an_end_of_file_when_the_handler_aborts_the_connection(
    sandbox: GuestSandbox,
) -> None:
    async def hang_up(connection: ProgramConnection) -> None:
        await connection.receive()
        connection.abort()

    sandbox.set_connection_handler(hang_up)
    program = "s = connect(); s.sendall(b'hello'); print(s.recv(10))"
    assert await _python(sandbox, program) == "b''\n"


async def test_failing_handler_is_logged_and_closes_only_its_connection(
    sandbox: GuestSandbox, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(connection: ProgramConnection) -> None:
        connection.abort()
        raise ValueError("that was not foreseen")

    sandbox.set_connection_handler(fail)
    assert await _python(sandbox, "print(connect().recv(10))") == "b''\n"
    assert await output(sandbox, "echo well") == "well\n"
    assert "a connection from inside failed" in caplog.text


async def test_handler_sees_that_the_program_hangs_up(sandbox: GuestSandbox) -> None:
    ended = anyio.Event()

    async def warning(connection: ProgramConnection) -> None:
        await connection.receive()
        with pytest.raises(ConnectionError):
            await connection.receive()
        ended.set()

    sandbox.set_connection_handler(warning)
    abort = "s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))"
    await _python(sandbox, f"s = connect(); s.sendall(b'x'); {abort}; s.close()")
    with anyio.fail_after(20):
        await ended.wait()


async def test_connections_end_with_their_sandbox(sandbox: GuestSandbox) -> None:
    begun, ended = anyio.Event(), anyio.Event()

    async def hold(connection: ProgramConnection) -> None:
        begun.set()
        try:
            await connection.receive()
        finally:
            ended.set()

    sandbox.set_connection_handler(hold)
    program = """
import os
s = connect()
os.set_inheritable(s.fileno(), True)
os.system("sleep 60 >/dev/null 2>&1 &")
"""
    await _python(sandbox, program)
    with anyio.fail_after(20):
        await begun.wait()
        await sandbox.close()
        await ended.wait()
