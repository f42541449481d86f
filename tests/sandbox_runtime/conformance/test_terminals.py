"""Commands run on pipes and report it when no pseudo-terminal is free."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from sandbox_runtime.backends.limits import PSEUDO_TERMINALS
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.conformance.backends import open_backend
from tests.sandbox_runtime.transfer import PLENTY_S, output

WAIT_S = 3.0
HOLDER = "holder"
NOTICE = "sandbox: no pseudo-terminal is free: the input of this command is a pipe\n"
TAKE_ALL = """python3 -c '
import os
held = []
try:
    while True:
        held.append(os.openpty())
except OSError:
    print(len(held), flush=True)
open("release").read()
'"""


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def sandbox(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox whose terminals are all used by a job."""
    async with open_backend(request.param, tmp_path) as opened:
        await output(opened, "mkfifo release")
        job = await opened.exec(TAKE_ALL, timeout_s=PLENTY_S, wait_s=WAIT_S, command_id=HOLDER)
        with anyio.fail_after(PLENTY_S):
            while not job.stdout:
                job = await opened.wait(HOLDER, wait_s=WAIT_S)
        assert int(job.stdout) == PSEUDO_TERMINALS
        yield opened


async def test_command_without_a_free_terminal_gets_a_pipe_and_a_message(sandbox: Sandbox) -> None:
    command = "test -t 0 || echo question; read answer; echo heard $answer"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=PLENTY_S, stdin=None)
    assert (job.running, job.stdout, job.stderr) == (True, "question\n", NOTICE)
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=b"yes\n")
    assert (end.running, end.stdout, end.stderr) == (False, "heard yes\n", "")


async def test_end_of_input_closes_a_pipe_that_replaces_a_terminal(sandbox: Sandbox) -> None:
    job = await sandbox.exec("cat; echo end", timeout_s=PLENTY_S, wait_s=PLENTY_S, stdin=None)
    text = b"text\n" * 20_000  # more than a pipe holds
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S, typed_bytes=text, end_of_input=True)
    assert not end.running
    assert end.stdout_bytes == len(text) + len("end\n")
    assert end.stdout.endswith("text\nend\n")


async def test_unread_pipe_input_does_not_disturb_the_command(sandbox: Sandbox) -> None:
    command = "mkfifo gate; exec 0< /dev/null; echo closed; read line < gate; echo $line"
    job = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=WAIT_S, stdin=None)
    assert job.running
    typing = b"x" * (1 << 18)
    await sandbox.wait(job.job_id, wait_s=0.1, typed_bytes=typing)
    await output(sandbox, "echo through > gate")
    end = await sandbox.wait(job.job_id, wait_s=PLENTY_S)
    assert (end.running, end.stdout) == (False, "through\n")


async def test_command_gets_a_terminal_once_one_is_free_again(sandbox: Sandbox) -> None:
    await output(sandbox, "echo > release")
    assert not (await sandbox.wait(HOLDER, wait_s=PLENTY_S)).running
    command = "test -t 0 && echo on a terminal"
    result = await sandbox.exec(command, timeout_s=PLENTY_S, wait_s=PLENTY_S, stdin=None)
    assert (result.stdout, result.stderr) == ("on a terminal\n", "")
