"""A closed sandbox raises SandboxLostError in every use."""

import anyio
import pytest

from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output, pieces, read


async def test_sandbox_has_an_id(sandbox: Sandbox) -> None:
    assert sandbox.id.strip()


async def test_sandbox_can_be_closed_twice(sandbox: Sandbox) -> None:
    await sandbox.close()
    await sandbox.close()


async def test_operations_of_a_closed_sandbox_raise_sandbox_lost_error(sandbox: Sandbox) -> None:
    await output(sandbox, "touch file")
    await sandbox.close()
    with pytest.raises(SandboxLostError):
        await sandbox.exec("echo hello", timeout_s=PLENTY_S)
    with pytest.raises(SandboxLostError):
        await sandbox.put("/testbed/file", pieces(b"x"))
    with pytest.raises(SandboxLostError):
        await read(sandbox, "/testbed/file")
    with pytest.raises(SandboxLostError):
        await sandbox.list("/testbed")


async def test_running_command_raises_when_its_sandbox_closes(
    sandbox: Sandbox,
) -> None:
    await output(sandbox, "mkfifo never")
    recorder = OutputRecorder()

    async def run() -> None:
        with pytest.raises(SandboxLostError):
            await sandbox.exec("echo begun; cat never", timeout_s=PLENTY_S, on_output=recorder)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await recorder.something.wait()
            await sandbox.close()


async def test_cancelled_close_still_closes_the_sandbox(sandbox: Sandbox) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await sandbox.close()
    with pytest.raises(SandboxLostError):
        await sandbox.exec("echo hello", timeout_s=PLENTY_S)
