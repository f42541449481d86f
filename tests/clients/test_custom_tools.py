"""OpenAI custom tools with free-text input: functions for the model, custom for the client."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.openai_errors import MESSAGES, openai_client
from tests.fakes.backend import Held, Item, ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy

SQL: Any = {"type": "custom", "custom": {"name": "sql", "description": "Runs SQL."}}
LOOKUP: Any = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
SQL_CALL = tool_reply(call("sql", input="select 1"))


@asynccontextmanager
async def sdk_client(
    script: Sequence[Item], state_dir: Path
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedBackend]]:
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", state_dir) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            yield client, backend


async def test_custom_tool_call_reaches_the_client_and_its_result_reaches_the_model(
    tmp_path: Path,
) -> None:
    async with sdk_client([SQL_CALL, text_reply("One.")], tmp_path) as (client, backend):
        first = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, tools=[SQL, LOOKUP]
        )
        message = first.choices[0].message
        assert message.tool_calls
        (wanted,) = message.tool_calls
        assert wanted.type == "custom"
        assert (wanted.custom.name, wanted.custom.input) == ("sql", "select 1")
        assert first.choices[0].finish_reason == "tool_calls"
        result: Any = {"role": "tool", "tool_call_id": wanted.id, "content": "1"}
        again: Any = [*MESSAGES, message, result]
        second = await client.chat.completions.create(
            model="fake-model", messages=again, tools=[SQL, LOOKUP]
        )
    assert second.choices[0].message.content == "One."
    sent_tools = {tool["function"]["name"]: tool for tool in backend.requests[0].body["tools"]}
    assert sent_tools["lookup"] == LOOKUP
    assert sent_tools["sql"] == {
        "type": "function",
        "function": {
            "name": "sql",
            "description": "Runs SQL.",
            "parameters": {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            },
        },
    }
    assert backend.requests[1].body["messages"][-1]["content"] == "1"


async def test_custom_tool_call_is_streamed_in_pieces(tmp_path: Path) -> None:
    async with sdk_client([SQL_CALL], tmp_path) as (client, _):
        stream = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, tools=[SQL], stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    first, *rest = (
        delta.tool_calls[0].model_dump(exclude_unset=True) for delta in deltas if delta.tool_calls
    )
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "custom", "custom": {"name": "sql", "input": ""}}
    assert all(set(piece) == {"index", "custom"} for piece in rest)
    assert "".join(piece["custom"]["input"] for piece in rest) == "select 1"


async def test_custom_tool_call_arrives_while_the_model_writes_it(tmp_path: Path) -> None:
    patch = "*** Update File: a.py\n" * 20
    go_on = asyncio.Event()
    held = Held(tool_reply(call("sql", input=patch)), go_on, after_pieces=8)
    pieces: list[str] = []
    async with sdk_client([held], tmp_path) as (client, _):
        stream = await client.responses.create(
            model="fake-model", input="?", tools=[{"type": "custom", "name": "sql"}], stream=True
        )
        async for event in stream:
            if event.type == "response.custom_tool_call_input.delta":
                pieces.append(event.delta)
            if len(pieces) == 3:
                go_on.set()  # the backend sends the rest only after these arrived
    assert len(pieces) >= 10
    assert "".join(pieces) == patch


async def test_non_json_arguments_of_a_custom_tool_call_become_its_input(
    tmp_path: Path,
) -> None:
    bare = tool_reply(call("sql") | {"arguments": "select 1"})
    async with sdk_client([bare], tmp_path) as (client, _):
        first = await client.chat.completions.create(
            model="fake-model", messages=MESSAGES, tools=[SQL]
        )
    assert first.choices[0].message.tool_calls
    assert first.choices[0].message.tool_calls[0].model_dump()["custom"]["input"] == "select 1"


async def test_custom_tool_calls_in_the_history_are_sent_to_the_backend_as_function_calls(
    tmp_path: Path,
) -> None:
    called = {"id": "call_1", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    messages: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    async with sdk_client([text_reply("One.")], tmp_path) as (client, backend):
        await client.chat.completions.create(model="fake-model", messages=messages)
    (made,) = backend.requests[0].body["messages"][2]["tool_calls"]
    assert (made["id"], made["type"], made["function"]["name"]) == ("call_1", "function", "sql")
    assert json.loads(made["function"]["arguments"]) == {"input": "select 1"}


async def test_grammar_of_a_custom_chat_tool_is_part_of_its_description(tmp_path: Path) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "select .+"}}
    tool: Any = {"type": "custom", "custom": {**SQL["custom"], "format": grammar}}
    async with sdk_client([SQL_CALL], tmp_path) as (client, backend):
        await client.chat.completions.create(model="fake-model", messages=MESSAGES, tools=[tool])
    assert backend.requests[0].body["tools"][-1]["function"]["description"] == (
        "Runs SQL.\n\nIts input must be as this grammar says (regex):\nselect .+"
    )


SQL_CHOICE: Any = {"type": "custom", "custom": {"name": "sql"}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_tool_choice_and_allowed_tools_can_name_a_custom_tool(
    mode: Any, tmp_path: Path
) -> None:
    some: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [SQL_CHOICE]}}
    async with sdk_client([SQL_CALL, SQL_CALL], tmp_path) as (client, backend):
        for choice in (SQL_CHOICE, some):
            await client.chat.completions.create(
                model="fake-model", messages=MESSAGES, tools=[SQL, LOOKUP], tool_choice=choice
            )
    one, allowed = (seen.body for seen in backend.requests)
    assert one["tool_choice"] == {"type": "function", "function": {"name": "sql"}}
    assert allowed.get("tool_choice") == (None if mode == "auto" else "required")
    assert "lookup" not in [tool["function"]["name"] for tool in allowed["tools"]]
