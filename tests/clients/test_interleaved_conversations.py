"""Concurrent requests of one session: each starts from the last snapshot, and the last to finish
sets the next one.
"""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat_http import ConcurrentRequests, http_client, post_chat
from tests.fakes.backend import Held, Item, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services, model_client, serve

NAMED = {"X-Sandbox-Session": "mine"}
WORDS = ("left", "right")


def user_message(word: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": word}]


def bash(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


@pytest.mark.parametrize("first", WORDS)
async def test_next_request_of_a_session_gets_the_files_of_the_request_that_finished_last(
    first: str, tmp_path: Path
) -> None:
    may_end = {word: asyncio.Event() for word in WORDS}

    def script(body: dict[str, Any]) -> Item:
        word, has_run_a_tool = (
            body["messages"][1]["content"],
            body["messages"][-1]["role"] == "tool",
        )
        if not has_run_a_tool:
            return bash(f"cat file; echo {word} >> file")
        done = text_reply("Done.")
        return Held(done, may_end[word]) if word in may_end else done

    async with scripted_backend(script) as backend:
        sandboxes, model = MemorySandboxes(), model_client(backend)
        with anyio.fail_after(20):
            async with (
                serve(make_services(model, sandboxes, tmp_path)) as url,
                http_client(url) as http,
            ):
                await post_chat(http, NAMED, messages=user_message("begun"))
                async with anyio.create_task_group() as ends:
                    groups = {word: ConcurrentRequests(http, ends) for word in WORDS}
                    for word in WORDS:
                        groups[word].begin(NAMED, messages=user_message(word))
                    await backend.arrived(6)
                    for word in sorted(WORDS, key=lambda word: word != first):
                        may_end[word].set()
                        while not groups[word].responses:
                            await anyio.lowlevel.checkpoint()
                await post_chat(http, NAMED, messages=user_message("last"))
        await model.aclose()
    last_messages = [request.body["messages"][-1]["content"] for request in backend.requests]
    shown = [
        each.partition("[stdout]\n")[2] for each in last_messages if each.startswith("Exit code")
    ]
    (second,) = set(WORDS) - {first}
    assert shown == ["", "begun", "begun", f"begun\n{second}"]
    assert sandboxes.opened == sandboxes.closed


@pytest.mark.parametrize("restart", [False, True])
async def test_choices_start_with_the_newest_session_files_and_the_first_choice_saves_its_files(
    restart: bool, tmp_path: Path
) -> None:
    def script(body: dict[str, Any]) -> Item:
        if body["messages"][-1]["role"] == "tool":
            return text_reply("Done.")
        return bash(f"echo {body['messages'][1]['content']} >> file; cat file")

    async with scripted_backend(script) as backend:
        sandboxes, model = MemorySandboxes(), model_client(backend)
        with anyio.fail_after(20):
            for words in [("1", "2"), ("3", "4")] if restart else [("1", "2", "3", "4")]:
                async with (
                    serve(make_services(model, sandboxes, tmp_path)) as url,
                    http_client(url) as http,
                ):
                    for word in words:
                        count = 3 if word == "3" else 1
                        await post_chat(http, NAMED, messages=user_message(word), n=count)
        await model.aclose()
    last_messages = [request.body["messages"][-1]["content"] for request in backend.requests]
    shown = [
        each.partition("[stdout]\n")[2] for each in last_messages if each.startswith("Exit code")
    ]
    assert shown == ["1", "1\n2", *["1\n2\n3"] * 3, "1\n2\n3\n4"]
    assert sandboxes.opened == sandboxes.closed
