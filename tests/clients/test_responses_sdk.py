"""The Responses API of the openai SDK."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from pydantic import BaseModel

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Item, ScriptedBackend, scripted_backend
from tests.fakes.server import KINDS, Kind, running_proxy

SHELL: Any = {"type": "shell", "environment": {"type": "container_auto"}}
LOOKUP: Any = {
    "type": "function",
    "name": "lookup",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    "strict": False,
}
RUN = tool_reply(
    call(
        "execute_bash", command="echo 42 > output/sum.txt; cat output/sum.txt; echo oh >&2; exit 3"
    )
)
SUBMIT = tool_reply(call("submit", answer="It is in /testbed/output/sum.txt."))


@asynccontextmanager
async def sdk_client(
    script: list[Item], tmp_path: Path, kind: Kind = "memory", **changes: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedBackend]]:
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, kind, tmp_path, **changes) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        with anyio.fail_after(60):
            yield client, backend


async def test_question_is_sent_to_the_model_as_a_chat(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    async with sdk_client([{"content": "Hello you.", "usage": usage}], tmp_path) as (
        client,
        backend,
    ):
        response = await client.responses.create(
            model="fake-model", instructions="Be kind.", input="Hello.", temperature=0.5
        )
    assert response.output_text == "Hello you."
    assert (response.status, response.model) == ("completed", "fake-model")
    assert response.usage
    assert (response.usage.input_tokens, response.usage.output_tokens) == (3, 4)
    body = backend.requests[0].body
    system, user = body["messages"]
    assert system["content"].endswith("Be kind.")
    assert user == {"role": "user", "content": "Hello."}
    assert body["temperature"] == 0.5
    assert not {"input", "instructions", "store", "include"} & body.keys()


@pytest.mark.parametrize("kind", KINDS)
async def test_shell_returns_command_output_and_file(kind: Kind, tmp_path: Path) -> None:
    async with sdk_client([RUN, SUBMIT], tmp_path, kind) as (client, _):
        response = await client.responses.create(
            model="fake-model", input="What is it?", tools=[SHELL]
        )
        called, output, message = response.output
        assert called.type == "shell_call"
        assert called.action.commands == [
            "echo 42 > output/sum.txt; cat output/sum.txt; echo oh >&2; exit 3"
        ]
        assert output.type == "shell_call_output"
        assert output.call_id == called.call_id
        (written,) = output.output
        assert (written.stdout, written.stderr) == ("42\n", "oh\n")
        assert written.outcome.type == "exit"
        assert written.outcome.exit_code == 3
        assert message.type == "message"
        (text,) = message.content
        assert text.type == "output_text"
        (citation,) = text.annotations
        assert citation.type == "container_file_citation"
        assert text.text[citation.start_index : citation.end_index] == citation.filename
        content = await client.containers.files.content.retrieve(
            citation.file_id, container_id=citation.container_id
        )
        assert content.content == b"42\n"


async def test_stream_contains_the_shell_call(tmp_path: Path) -> None:
    async with (
        sdk_client([RUN, SUBMIT], tmp_path) as (client, _),
        client.responses.stream(model="fake-model", input="?", tools=[SHELL]) as stream,
    ):
        events = [event async for event in stream]
        response = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:9] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.shell_call_command.added",
        "response.shell_call_command.delta",
        "response.shell_call_command.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.shell_call_output_content.delta",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == response.output_text
    assert kinds[-1] == "response.completed"


async def test_function_call_suspends_the_run_and_its_output_resumes_it(tmp_path: Path) -> None:
    make = tool_reply(call("execute_bash", command="echo mine > kept.txt"))
    look = tool_reply(call("execute_bash", command="cat kept.txt"))
    lookup_call = tool_reply(call("lookup", key="x"))
    script = [make, lookup_call, look, tool_reply(call("submit", answer="Done."))]
    async with sdk_client([*script], tmp_path) as (client, backend):
        first = await client.responses.create(
            model="fake-model", input="Look it up.", tools=[LOOKUP, SHELL]
        )
        tool_call = first.output[-1]
        assert tool_call.type == "function_call"
        assert (tool_call.name, json.loads(tool_call.arguments)) == ("lookup", {"key": "x"})
        history: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        second = await client.responses.create(
            model="fake-model",
            input=[
                {"role": "user", "content": "Look it up."},
                *history,
                {"type": "function_call_output", "call_id": tool_call.call_id, "output": "y"},
            ],
            tools=[LOOKUP, SHELL],
        )
    assert second.output_text == "Done."
    output = second.output[1]
    assert output.type == "shell_call_output"
    assert output.output[0].stdout == "mine\n"
    messages = backend.requests[2].body["messages"]
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "assistant", "tool")
    ]
    assert messages[-1]["content"] == "y"


async def test_custom_tool_is_called_with_free_text(tmp_path: Path) -> None:
    tool: Any = {"type": "custom", "name": "sql", "description": "Runs SQL."}
    script = [tool_reply(call("sql", input="select 1")), text_reply("One.")]
    async with sdk_client([*script], tmp_path) as (client, backend):
        first = await client.responses.create(model="fake-model", input="?", tools=[tool])
        tool_call = first.output[-1]
        assert tool_call.type == "custom_tool_call"
        assert tool_call.input == "select 1"
        answer: Any = {
            "type": "custom_tool_call_output",
            "call_id": tool_call.call_id,
            "output": "1",
        }
        second = await client.responses.create(
            model="fake-model",
            input=[{"role": "user", "content": "?"}, tool_call.model_dump(), answer],
            tools=[tool],
        )
    assert second.output_text == "One."
    assert backend.requests[1].body["messages"][-1]["content"] == "1"


class Sum(BaseModel):
    value: int


async def test_answer_is_parsed_into_the_requested_class(tmp_path: Path) -> None:
    script = [tool_reply(call("submit", answer="42")), text_reply('{"value": 42}')]
    async with sdk_client([*script], tmp_path) as (client, backend):
        response = await client.responses.parse(model="fake-model", input="?", text_format=Sum)
    assert response.output_parsed == Sum(value=42)
    form = backend.requests[1].body["response_format"]
    assert (form["type"], form["json_schema"]["name"]) == ("json_schema", "Sum")
    assert "response_format" not in backend.requests[0].body


async def test_truncated_answer_is_incomplete(tmp_path: Path) -> None:
    script = [SUBMIT, {"content": "It", "finish_reason": "length"}]
    async with sdk_client([*script], tmp_path) as (client, backend):
        response = await client.responses.create(
            model="fake-model", input="?", max_output_tokens=16, extra_body={"logit_bias": {"1": 1}}
        )
    assert response.status == "incomplete"
    assert response.incomplete_details
    assert response.incomplete_details.reason == "max_output_tokens"
    assert backend.requests[1].body["max_completion_tokens"] == 4096
