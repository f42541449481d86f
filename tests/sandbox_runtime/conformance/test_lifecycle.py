"""A closed sandbox raises SandboxLostError in every use."""

import anyio
import pytest

from sandbox_runtime.errors import SandboxLostError
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.transfer import PLENTY_S, OutputRecorder, output, pieces, read


async def test_a_sandbox_has_a_name(sandbox: Sandbox) -> None:
    assert sandbox.id.strip()


async def test_closing_twice_is_as_good_as_once(sandbox: Sandbox) -> None:
    await sandbox.close()
    await sandbox.close()


async def test_a_closed_sandbox_is_lost_to_every_use(sandbox: Sandbox) -> None:
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
    heard = OutputRecorder()

    async def run() -> None:
        with pytest.raises(SandboxLostError):
            await sandbox.exec("echo begun; cat never", timeout_s=PLENTY_S, on_output=heard)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await heard.something.wait()
            await sandbox.close()


async def test_closing_finishes_when_it_is_cancelled(sandbox: Sandbox) -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await sandbox.close()
    with pytest.raises(SandboxLostError):
        await sandbox.exec("echo hello", timeout_s=PLENTY_S)
