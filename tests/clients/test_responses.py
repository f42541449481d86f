"""POST /v1/responses over plain HTTP, for behaviour that the SDK does not expose."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from policies.egress import Egress
from policies.isolation import Isolation
from proxy.inputs import InputLoader
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Handler, Held, Item, Refusal, ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.uploads import DirectoryUploads

BODY = {"model": "fake-model", "input": "Hello."}
SHELL = {"type": "shell", "environment": {"type": "container_auto"}}
LOOKUP = {"type": "function", "name": "lookup", "parameters": {"type": "object"}}
READ = tool_reply(call("execute_bash", command="cat documents/a.csv"))
ECHO = tool_reply(call("execute_bash", command="echo one"))
DONE = tool_reply(call("submit", answer="Done."))
DATA = base64.b64encode(b"a,b\n").decode()


@asynccontextmanager
async def responses_http(
    script: list[Item],
    tmp_path: Path,
    isolation: Isolation = Isolation(),
    elsewhere: Handler | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedBackend]]:
    async with (
        scripted_backend(script, elsewhere=elsewhere) as backend,
        running_proxy(backend, "memory", tmp_path, isolation, **changes) as url,
        httpx.AsyncClient(base_url=f"{url}/v1", timeout=30) as client,
    ):
        with anyio.fail_after(60):
            yield client, backend


async def create(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/responses", json={**BODY, **body})
    return response.json()


def kinds(response: Any) -> list[str]:
    return [item["type"] for item in response["output"]]


def text(response: Any) -> str:
    found: str = response["output"][-1]["content"][0]["text"]
    return found


async def test_response_events_are_streamed_while_the_run_continues(tmp_path: Path) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    script = [Held(ECHO, first), Held(DONE, second)]
    asked = {**BODY, "tools": [SHELL], "stream": True}
    event_types = []
    async with (
        responses_http([*script], tmp_path) as (client, _),
        client.stream("POST", "/responses", json=asked) as response,
    ):
        async for line in response.aiter_lines():
            event_types.append(line.removeprefix("event: "))
            if event_types[-1] == "response.in_progress":
                first.set()
            elif event_types[-1] == "response.shell_call_output_content.delta":
                second.set()
    assert "response.completed" in event_types


PROFILES: dict[str, list[str]] = {
    "off": ["message"],
    "reasoning": ["reasoning", "message"],
    "items": ["shell_call", "shell_call_output", "message"],
    "events": ["message"],
}


@pytest.mark.parametrize("tools", [[], [SHELL]])
@pytest.mark.parametrize("profile", PROFILES)
async def test_steps_setting_decides_the_output_items_of_a_response(
    profile: str, tools: list[Any], tmp_path: Path
) -> None:
    async with responses_http([ECHO, DONE], tmp_path) as (client, _):
        response = await create(client, tools=tools, sandbox={"steps": profile})
    assert kinds(response) == PROFILES[profile]
    content = [step["kind"] for step in response["sandbox"].get("events", [])]
    assert ("tool_start" in content) == (profile == "events")
    if profile == "reasoning":
        thought = response["output"][0]["summary"][0]["text"]
        assert thought.startswith("````console\n$ echo one\none\n[exit 0")


@pytest.mark.parametrize(
    ("tools", "profile"),
    [
        ([], "reasoning"),
        ([LOOKUP], "reasoning"),
        ([{"type": "shell"}], "reasoning"),
        ([SHELL], "items"),
        ([LOOKUP, SHELL], "items"),
    ],
)
async def test_step_items_need_a_hosted_tool_in_the_request(
    tools: list[Any], profile: str, tmp_path: Path
) -> None:
    async with responses_http([ECHO, DONE], tmp_path) as (client, _):
        assert kinds(await create(client, tools=tools)) == PROFILES[profile]


async def test_code_interpreter_outputs_are_included_on_request(
    tmp_path: Path,
) -> None:
    tool = {"type": "code_interpreter", "container": {"type": "auto"}}
    included = {"include": ["code_interpreter_call.outputs"]}
    async with responses_http([ECHO, DONE, ECHO, DONE], tmp_path) as (client, _):
        without = (await create(client, tools=[tool]))["output"][0]
        item = (await create(client, tools=[tool], **included))["output"][0]
    assert (item["type"], item["code"]) == ("code_interpreter_call", "echo one")
    assert item["container_id"].startswith("cntr_")
    assert (without["outputs"], item["outputs"]) == (None, [{"type": "logs", "logs": "one\n"}])


async def test_shell_output_of_a_timed_out_command_has_its_partial_output(tmp_path: Path) -> None:
    slow = tool_reply(call("execute_bash", command="echo one; sleep 100", timeout_s=1))
    look = tool_reply(call("str_replace_editor", command="view", path="/testbed/none"))
    async with responses_http([look, slow, DONE], tmp_path) as (client, _):
        response = await create(client, tools=[SHELL])
    looked, slept = response["output"][1], response["output"][3]
    assert response["output"][0]["action"]["commands"] == ["str_replace_editor view /testbed/none"]
    assert "none" in looked["output"][0]["stdout"]
    assert slept["output"][0]["stdout"] == "one\n"
    assert slept["output"][0]["outcome"]["type"] == "timeout"


async def test_input_file_is_written_to_the_sandbox(tmp_path: Path) -> None:
    file = {"filename": "a.csv", "file_data": f"data:text/csv;base64,{DATA}"}
    content = [{"type": "input_text", "text": "Sum up."}, {"type": "input_file", **file}]
    async with responses_http([READ, DONE], tmp_path) as (client, backend):
        response = await create(client, input=[{"role": "user", "content": content}], tools=[SHELL])
    assert response["output"][1]["output"][0]["stdout"] == "a,b\n"
    content = backend.requests[0].body["messages"][-1]["content"]
    assert "/testbed/documents/a.csv" in json.dumps(content)


async def test_input_image_is_sent_to_the_model(tmp_path: Path) -> None:
    url = f"data:image/png;base64,{DATA}"
    content = [{"type": "input_image", "image_url": url, "detail": "low"}]
    async with responses_http([DONE], tmp_path) as (client, backend):
        await create(client, input=[{"role": "user", "content": content}])
    content = backend.requests[0].body["messages"][-1]["content"]
    assert {"type": "image_url", "image_url": {"url": url, "detail": "low"}} in content


@pytest.mark.parametrize("kind", ["shell", "code_interpreter"])
async def test_container_starts_with_the_requested_files(kind: str, tmp_path: Path) -> None:
    uploads = DirectoryUploads(tmp_path)
    ids = {"file_ids": [uploads.add("", "a.csv", b"a,b\n")]}
    inputs = InputLoader(uploads=uploads)
    async with responses_http([READ, DONE], tmp_path, inputs=inputs) as (client, backend):
        tool: dict[str, Any] = {"type": kind, "environment": {"type": "container_auto", **ids}}
        if kind == "code_interpreter":
            tool = {"type": kind, "container": {"type": "auto", "memory_limit": "1g", **ids}}
        await create(client, tools=[tool])
    assert "a,b" in backend.requests[1].body["messages"][-1]["content"]


async def test_container_keeps_its_files_for_the_next_response(tmp_path: Path) -> None:
    write = tool_reply(call("execute_bash", command="echo kept > kept.txt"))
    read = tool_reply(call("execute_bash", command="cat kept.txt"))
    async with responses_http([write, DONE, read, DONE], tmp_path) as (client, _):
        made = (await client.post("/containers", json={"name": "mine"})).json()["id"]
        environment = {"type": "container_reference", "container_id": made}
        tools = [{"type": "shell", "environment": environment}]
        await create(client, tools=tools)
        second = await create(client, tools=tools)
    assert second["output"][1]["output"][0]["stdout"] == "kept\n"


async def test_earlier_step_items_are_not_sent_to_the_model(tmp_path: Path) -> None:
    async with responses_http([ECHO, DONE, text_reply("Yes.")], tmp_path) as (client, backend):
        first = await create(client, tools=[SHELL])
        said = [
            {"role": "user", "content": "Go."},
            *first["output"],
            {"role": "user", "content": "Sure?"},
        ]
        await create(client, input=said, tools=[SHELL])
    assert backend.requests[2].body["messages"][1:] == [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Sure?"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_response_with_tool_choice_none_is_one_model_call(
    stream: bool, tmp_path: Path
) -> None:
    async with responses_http([{"reasoning": "Hm.", "content": "42"}], tmp_path) as (
        client,
        backend,
    ):
        asked = {**BODY, "tools": [LOOKUP], "tool_choice": "none", "stream": stream}
        answer = await client.post("/responses", json=asked)
    if stream:
        last = answer.text.strip().split("\n\n")[-1]
        response = json.loads(last.split("data: ", 1)[1])["response"]
    else:
        response = answer.json()
    assert (kinds(response), text(response)) == (["reasoning", "message"], "42")
    body = backend.requests[0].body
    assert body["messages"] == [{"role": "user", "content": "Hello."}]
    assert "tools" not in body


async def test_utility_request_of_a_chat_ui_is_one_model_call(tmp_path: Path) -> None:
    task = {"x-openwebui-task": "title_generation"}
    async with responses_http([text_reply("A title")], tmp_path) as (client, backend):
        answer = await client.post("/responses", json=BODY, headers=task)
    assert text(answer.json()) == "A title"
    assert "tools" not in backend.requests[0].body


async def test_max_tool_calls_limits_the_commands(tmp_path: Path) -> None:
    two = tool_reply(call("execute_bash", command="echo 1"), call("execute_bash", command="echo 2"))
    async with responses_http([two, DONE], tmp_path) as (client, backend):
        response = await create(client, tools=[SHELL], max_tool_calls=1)
    assert (kinds(response), text(response)) == (PROFILES["items"], "Done.")
    first, second = backend.requests[1].body["messages"][-2:]
    assert "1" in first["content"]
    assert second["content"].startswith("Not run: no more tool calls are allowed.")


async def test_tool_choice_applies_only_to_the_first_turn(tmp_path: Path) -> None:
    async with responses_http([ECHO, DONE], tmp_path) as (client, backend):
        await create(client, tools=[SHELL, LOOKUP], tool_choice={"type": "shell"})
    choices = [seen.body.get("tool_choice") for seen in backend.requests]
    assert choices == ["required", None]


async def test_model_refusal_becomes_a_refusal_content_part(tmp_path: Path) -> None:
    refusal = {"message": {"role": "assistant", "content": None, "refusal": "No."}}
    async with responses_http([refusal], tmp_path) as (client, _):
        response = await create(client)
    assert response["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]


@pytest.mark.parametrize(
    ("mode", "policy", "refused"),
    [
        ("none", {"type": "disabled"}, False),
        ("open", {"type": "disabled"}, True),
        ("none", {"type": "allowlist", "allowed_domains": ["example.com"]}, True),
    ],
)
async def test_network_policy_other_than_the_configured_one_is_refused(
    mode: Any, policy: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    isolation = Isolation(network=Egress(mode=mode))
    environment = {"type": "container_auto", "network_policy": policy}
    async with responses_http([DONE], tmp_path, isolation) as (client, _):
        response = await create(client, tools=[{"type": "shell", "environment": environment}])
    error = response.get("error") or {}
    assert error.get("param") == ("tools[0].environment.network_policy" if refused else None)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"tools": [{"type": "file_search"}]}, 400, "tools[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "&"}]}]},
            400,
            "input[0].content[0].file_data",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            400,
            "input[0].content[0].file_id",
        ),
        (
            {
                "tools": [
                    {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["x"]}}
                ]
            },
            400,
            "tools[0].container.file_ids[0]",
        ),
        ({"tool_choice": {"type": "function", "name": "x"}}, 400, "tool_choice.name"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 404, "input"),
        ({"sandbox": {"steps": "odd"}}, 400, "sandbox.steps"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_names_the_invalid_field_of_the_request(
    body: dict[str, Any], status: int, param: str, stream: bool, tmp_path: Path
) -> None:
    async with responses_http([], tmp_path) as (client, backend):
        answer = await client.post("/responses", json={**BODY, **body, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert not backend.requests


async def test_backend_error_keeps_its_status(tmp_path: Path) -> None:
    async with responses_http([Refusal(429, "later")] * 3, tmp_path) as (client, _):
        answer = await client.post("/responses", json=BODY)
    assert (answer.status_code, answer.json()["error"]["message"]) == (429, "later")


async def test_repeated_responses_request_joins_the_first_run(tmp_path: Path) -> None:
    key = {"idempotency-key": "k"}
    async with responses_http([DONE], tmp_path) as (client, backend):
        first = await client.post("/responses", json=BODY, headers=key)
        second = await client.post("/responses", json={**BODY, "stream": True}, headers=key)
        other = await client.post("/responses", json={**BODY, "input": "?"}, headers=key)
    assert first.json()["id"] in second.text
    assert other.status_code == 422
    assert len(backend.requests) == 1


async def test_responses_request_with_the_plain_suffix_is_relayed(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def own(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.Response(text='{ "id":"resp_theirs"}', content_type="application/json")

    async with responses_http([], tmp_path, elsewhere=own) as (client, _):
        odd = {"model": "fake-model:plain", "tools": [{"type": "web_search"}], "sandbox": {}}
        answer = await client.post("/responses", json={**BODY, **odd})
    assert answer.text == '{ "id":"resp_theirs"}'
    asked = {**BODY, "tools": [{"type": "web_search"}]}
    assert seen == [("/v1/responses", asked)]
