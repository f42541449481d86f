"""Input files are uploaded into the sandbox before the first command."""

from collections.abc import AsyncGenerator

import pytest

from policies.limits import StopReason
from proxy.agent.events import Event, ToolCallFinished
from proxy.agent.task import InputFile
from proxy.models.scripted import ScriptedModel, call, tool_reply
from sandbox_runtime.errors import SandboxFileError
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.proxy.agent.runs import SUBMIT, Events, Run, bash

PATH = "/testbed/documents/a.txt"
SHOWN = "Exit code: 0\n[stdout]\n"
SHOW = tool_reply(bash(f"cat {PATH}"))


class CountedFile:
    """An input file that counts its reads, and that may fail at its end."""

    def __init__(self, *pieces: bytes, failure: Exception | None = None) -> None:
        self.input = InputFile(PATH, "one", self.read)
        self.begun = self.ended = 0
        self._pieces = pieces
        self._failure = failure

    async def read(self) -> AsyncGenerator[bytes, None]:
        self.begun += 1
        try:
            for piece in self._pieces:
                yield piece
            if self._failure:
                raise self._failure
        finally:
            self.ended += 1


async def test_input_file_is_uploaded_once_before_the_first_command() -> None:
    file = CountedFile(b"one ", b"two")
    run = Run(ScriptedModel([SHOW, SHOW, SUBMIT]))
    await run.go(inputs=[file.input])
    assert run.events.observations[:2] == [f"{SHOWN}one two"] * 2
    assert (file.begun, file.ended) == (1, 1)


async def test_editor_finds_the_input_file() -> None:
    view = call("str_replace_editor", command="view", path=PATH)
    run = Run(ScriptedModel([tool_reply(view), SUBMIT]))
    await run.go(inputs=[CountedFile(b"one two").input])
    assert "one two" in run.events.observations[0]


async def test_run_without_commands_reads_no_input_file() -> None:
    file = CountedFile(b"one")
    result = await Run(ScriptedModel([SUBMIT])).go(inputs=[file.input])
    assert (result.stop_reason, file.begun) == (StopReason.SUBMITTED, 0)


async def test_replacement_sandbox_has_the_input_file() -> None:
    sandboxes = MemorySandboxes()
    file = CountedFile(b"one")

    async def lose(event: Event) -> None:
        if isinstance(event, ToolCallFinished) and event.step == 1:
            await sandboxes.leased[-1].close()

    run = Run(ScriptedModel([SHOW, SHOW, SHOW, SUBMIT]), sandboxes, events=Events(lose))
    await run.go(inputs=[file.input])
    first, lost, second, _ = run.events.observations
    assert (first, second) == (f"{SHOWN}one",) * 2
    assert "starts in a new one, which has nothing but the files the user gave" in lost
    assert (sandboxes.opened, file.begun, file.ended) == (2, 2, 2)


async def test_failed_upload_of_an_input_file_is_reported_in_one_observation() -> None:
    good = InputFile("/testbed/documents/b.txt", "two", CountedFile(b"two").read)
    bad = CountedFile(b"one", failure=SandboxFileError("the upload is gone"))
    show = tool_reply(bash("ls documents; cat documents/b.txt"))
    run = Run(ScriptedModel([show, show, SUBMIT]))
    await run.go(inputs=[bad.input, good])
    error_line = f"[the given file {PATH} is not in the sandbox: the upload is gone]"
    assert run.events.observations[:2] == [f"{error_line}\n{SHOWN}b.txt\ntwo", f"{SHOWN}b.txt\ntwo"]
    assert (bad.begun, bad.ended) == (1, 1)


async def test_internal_error_while_reading_an_input_file_fails_the_run() -> None:
    bad = CountedFile(b"one", failure=RuntimeError("ours"))
    sandboxes = MemorySandboxes()
    with pytest.raises(RuntimeError, match="ours"):
        await Run(ScriptedModel([SHOW]), sandboxes).go(inputs=[bad.input])
    assert (sandboxes.opened, sandboxes.closed, bad.ended) == (1, 1, 1)
