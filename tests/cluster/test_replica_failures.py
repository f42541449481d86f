"""A replica is killed or stopped while it works: its client gets the answer from the other one."""

import asyncio
import io
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from proxy.models.scripted import text_reply
from tests.cluster.system import (
    ANSWER,
    TIMEOUT_S,
    Servers,
    System,
    command_until_it_succeeds,
    count_ended_runs,
    running_system,
)
from tests.fakes.backend import Held, Item

pytestmark = pytest.mark.cluster

UPLOAD_BYTES = 8 << 20


class WatchedFile(io.BytesIO):
    """A file of the client that calls a function once, when half of it has been read."""

    def __init__(self, content: bytes, at_half: Callable[[], object]) -> None:
        super().__init__(content)
        self._half = len(content) // 2
        self._at_half: Callable[[], object] | None = at_half

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        if self._at_half and self.tell() >= self._half:
            at_half, self._at_half = self._at_half, None
            at_half()
        return found


@pytest.mark.parametrize("seconds", [3, 25])
async def test_command_of_a_killed_replica_runs_once_and_another_replica_answers(
    servers: Servers, tmp_path: Path, seconds: int
) -> None:
    """The command ends before the other replica takes the run over, or afterwards."""
    script = command_until_it_succeeds(f"sleep {seconds}")
    async with running_system(servers, tmp_path, script) as system:
        with anyio.fail_after(TIMEOUT_S):
            answer = system.ask("command")
            await system.counter.began("command")
            system.kill(system.replicas[0])
            assert await answer == ANSWER
        (sandbox,) = system.counter.sandboxes("command")
        assert system.accepted_sandboxes("command") == [sandbox]
        assert system.warnings == {"command": ["run_taken_over"]}


async def test_run_goes_on_in_its_sandbox_if_its_replica_is_killed_during_a_model_call(
    servers: Servers, tmp_path: Path
) -> None:
    run_command, held = command_until_it_succeeds("true"), asyncio.Event()

    def script(system: System, body: dict[str, Any]) -> Item:
        reply = run_command(system, body)
        is_first_answer = len(system.backend.requests) == 2
        return Held(text_reply("Never said."), held) if is_first_answer else reply

    async with running_system(servers, tmp_path, script) as system:
        with anyio.fail_after(TIMEOUT_S):
            answer = system.ask("call")
            await system.backend.arrived(2)
            system.kill(system.replicas[0])
            assert await answer == ANSWER
        (sandbox,) = system.counter.sandboxes("call")
        assert system.accepted_sandboxes("call") == [sandbox]
        assert system.warnings == {"call": ["run_taken_over"]}


async def test_run_begins_anew_if_its_replica_and_its_sandbox_are_gone(
    servers: Servers, tmp_path: Path
) -> None:
    script = command_until_it_succeeds("sleep 3")
    async with running_system(servers, tmp_path, script) as system:
        with anyio.fail_after(TIMEOUT_S):
            answer = system.ask("both")
            await system.counter.began("both")
            system.kill(system.replicas[0])
            await system.delete_the_sandbox()
            assert await answer == ANSWER
        first, second = system.counter.sandboxes("both")
        assert system.accepted_sandboxes("both") == [second]
        assert first != second
        assert system.warnings == {"both": ["run_restarted"]}


async def test_upload_is_stored_once_if_its_replica_is_killed_during_the_upload(
    servers: Servers, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (UPLOAD_BYTES // 256)
    script = command_until_it_succeeds("true")
    async with running_system(servers, tmp_path, script) as system:
        file = WatchedFile(content, partial(system.kill, system.replicas[0]))
        with anyio.fail_after(TIMEOUT_S):
            uploaded = await system.client.files.create(file=("data", file), purpose="user_data")
            assert await system.replicas[0].ended() == -signal.SIGKILL
            listed = [each async for each in system.client.files.list()]
            assert [each.id for each in listed] == [uploaded.id]
            assert (await system.client.files.content(uploaded.id)).content == content
            await system.client.files.delete(uploaded.id)


async def test_replica_that_gets_sigterm_completes_its_runs_and_takes_no_new_ones(
    servers: Servers, tmp_path: Path
) -> None:
    script = command_until_it_succeeds("sleep 5")
    async with running_system(servers, tmp_path, script) as system:
        with anyio.fail_after(TIMEOUT_S):
            begun = system.ask("begun")
            await system.counter.began("begun")
            system.replicas[0].process.send_signal(signal.SIGTERM)
            later = system.ask("later")
            assert await begun == ANSWER
            assert await system.replicas[0].ended() == -signal.SIGTERM
            assert await later == ANSWER
            assert await count_ended_runs(system.replicas[1]) == 1
        assert len(system.counter.sandboxes("begun")) == 1
        assert len(system.counter.sandboxes("later")) == 1
        assert system.refusals == []
