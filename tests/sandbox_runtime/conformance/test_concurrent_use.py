"""Concurrent operations on one sandbox."""

import anyio
import anyio.lowlevel
import pytest

from sandbox_runtime.sandbox import ExecResult, Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output, read, write


async def test_two_commands_run_at_the_same_time(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo ping pong")
    results: dict[str, ExecResult] = {}

    async def run(command: str) -> None:
        results[command] = await sandbox.exec(command, timeout_s=PLENTY_S)

    # Each waits for the other: one after the other they would never end.
    first, second = "cat ping; echo two > pong", "echo one > ping; cat pong"
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run, first)
            group.start_soon(run, second)
    assert (results[first].stdout, results[second].stdout) == ("one\n", "two\n")


async def test_outputs_of_concurrent_commands_are_not_mixed(sandbox: Sandbox) -> None:
    results: dict[int, str] = {}

    async def run(number: int) -> None:
        results[number] = await output(sandbox, f"seq {number}000 {number}999; echo {number}")

    async with anyio.create_task_group() as group:
        for number in range(1, 11):
            group.start_soon(run, number)
    for number in range(1, 11):
        lines = [*range(number * 1000, number * 1000 + 1000), number]
        assert results[number] == "".join(f"{line}\n" for line in lines)


async def test_files_are_transferred_while_a_command_runs(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo gate")
    results: list[str] = []

    async def run() -> None:
        results.append(await output(sandbox, "echo begun > begun; cat gate; cat late"))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await write(sandbox, "/testbed/late", b"put meanwhile")
            assert await read(sandbox, "/testbed/late") == b"put meanwhile"
            await output(sandbox, "echo opened > gate")
    assert results == ["opened\nput meanwhile"]


async def test_slow_readers_of_many_files_do_not_block_other_operations(
    sandbox: Sandbox,
) -> None:
    content, count = bytes(range(256)) * 2000, 40
    await write(sandbox, "/testbed/file", content)
    go_on, received = anyio.Event(), [bytearray() for _ in range(count)]

    async def take_late(file: bytearray) -> None:
        async def sink(data: bytes) -> None:
            await go_on.wait()
            file.extend(data)

        await sandbox.get("/testbed/file", sink, max_bytes=len(content))

    with anyio.fail_after(PLENTY_S):
        async with anyio.create_task_group() as group:
            for file in received:
                group.start_soon(take_late, file)
            await anyio.lowlevel.checkpoint()
            assert await output(sandbox, "seq 100000 | wc -l") == "100000\n"
            assert await read(sandbox, "/testbed/file") == content
            go_on.set()
    assert received == [content] * count


async def test_cancelling_kills_the_command_and_leaves_the_sandbox_usable(
    sandbox: Sandbox,
) -> None:
    await output(sandbox, "x=1; mkfifo never")
    recorder = OutputRecorder()
    with anyio.fail_after(30), anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                command = "x=2; echo $$; cat never; echo > survived"
                await sandbox.exec(command, timeout_s=PLENTY_S, on_output=recorder)

            group.start_soon(run)
            await recorder.something.wait()
            scope.cancel()
    assert scope.cancelled_caught
    pid = int(recorder.text())
    assert await output(sandbox, f"while kill -0 {pid} 2> /dev/null; do sleep 0.05; done") == ""
    assert await output(sandbox, "echo $x; ls") == "1\ndocuments\nnever\noutput\n"


async def test_cancelling_one_command_does_not_disturb_another(sandbox: Sandbox) -> None:
    await output(sandbox, "mkfifo gate never")
    results: list[str] = []

    async def last() -> None:
        results.append(await output(sandbox, "cat gate; echo undisturbed"))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(last)
            recorder = OutputRecorder()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as cancelled:

                    async def run() -> None:
                        await sandbox.exec(
                            "echo begun; cat never", timeout_s=PLENTY_S, on_output=recorder
                        )

                    cancelled.start_soon(run)
                    await recorder.something.wait()
                    scope.cancel()
            await output(sandbox, "echo opened > gate")
    assert results == ["opened\nundisturbed\n"]


async def test_exception_of_the_output_listener_ends_the_command_and_propagates(
    sandbox: Sandbox,
) -> None:
    class ListenerError(Exception):
        pass

    async def fail(stream: str, text: str) -> None:
        raise ListenerError

    await output(sandbox, "mkfifo never")
    with pytest.raises(ListenerError):
        await sandbox.exec("echo heard; cat never", timeout_s=PLENTY_S, on_output=fail)
    assert await output(sandbox, "echo fine") == "fine\n"
