"""POST /v1/responses by plain HTTP, for what no SDK shows by itself."""

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
from proxy.inputs import Inputs
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
async def before(
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


async def ask(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post("/responses", json={**BODY, **body})
    return response.json()


def kinds(response: Any) -> list[str]:
    return [item["type"] for item in response["output"]]


def text(response: Any) -> str:
    found: str = response["output"][-1]["content"][0]["text"]
    return found


async def test_everything_is_told_at_once(tmp_path: Path) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    script = [Held(ECHO, first), Held(DONE, second)]
    asked = {**BODY, "tools": [SHELL], "stream": True}
    heard = []
    async with (
        before([*script], tmp_path) as (client, _),
        client.stream("POST", "/responses", json=asked) as response,
    ):
        async for line in response.aiter_lines():
            heard.append(line.removeprefix("event: "))
            if heard[-1] == "response.in_progress":
                first.set()
            elif heard[-1] == "response.shell_call_output_content.delta":
                second.set()
    assert "response.completed" in heard


PROFILES: dict[str, list[str]] = {
    "off": ["message"],
    "reasoning": ["reasoning", "message"],
    "items": ["shell_call", "shell_call_output", "message"],
    "events": ["message"],
}


@pytest.mark.parametrize("tools", [[], [SHELL]])
@pytest.mark.parametrize("profile", PROFILES)
async def test_steps_show_as_the_profile_says(
    profile: str, tools: list[Any], tmp_path: Path
) -> None:
    async with before([ECHO, DONE], tmp_path) as (client, _):
        response = await ask(client, tools=tools, sandbox={"steps": profile})
    assert kinds(response) == PROFILES[profile]
    told = [step["kind"] for step in response["sandbox"].get("events", [])]
    assert ("tool_start" in told) == (profile == "events")
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
async def test_items_of_a_tool_come_to_who_asked_for_it_and_no_one_else(
    tools: list[Any], profile: str, tmp_path: Path
) -> None:
    async with before([ECHO, DONE], tmp_path) as (client, _):
        assert kinds(await ask(client, tools=tools)) == PROFILES[profile]


async def test_code_interpreter_calls_have_their_outputs_where_they_are_included(
    tmp_path: Path,
) -> None:
    tool = {"type": "code_interpreter", "container": {"type": "auto"}}
    included = {"include": ["code_interpreter_call.outputs"]}
    async with before([ECHO, DONE, ECHO, DONE], tmp_path) as (client, _):
        without = (await ask(client, tools=[tool]))["output"][0]
        item = (await ask(client, tools=[tool], **included))["output"][0]
    assert (item["type"], item["code"]) == ("code_interpreter_call", "echo one")
    assert item["container_id"].startswith("cntr_")
    assert (without["outputs"], item["outputs"]) == (None, [{"type": "logs", "logs": "one\n"}])


async def test_a_command_that_still_runs_is_said_to_have_used_its_time_up(tmp_path: Path) -> None:
    slow = tool_reply(call("execute_bash", command="echo one; sleep 100", timeout_s=1))
    look = tool_reply(call("str_replace_editor", command="view", path="/testbed/none"))
    async with before([look, slow, DONE], tmp_path) as (client, _):
        response = await ask(client, tools=[SHELL])
    looked, slept = response["output"][1], response["output"][3]
    assert response["output"][0]["action"]["commands"] == ["str_replace_editor view /testbed/none"]
    assert "none" in looked["output"][0]["stdout"]
    assert slept["output"][0]["stdout"] == "one\n"
    assert slept["output"][0]["outcome"]["type"] in ("exit", "timeout")


async def test_a_file_of_the_input_lies_in_the_sandbox(tmp_path: Path) -> None:
    file = {"filename": "a.csv", "file_data": f"data:text/csv;base64,{DATA}"}
    content = [{"type": "input_text", "text": "Sum up."}, {"type": "input_file", **file}]
    async with before([READ, DONE], tmp_path) as (client, backend):
        response = await ask(client, input=[{"role": "user", "content": content}], tools=[SHELL])
    assert response["output"][1]["output"][0]["stdout"] == "a,b\n"
    told = backend.requests[0].body["messages"][-1]["content"]
    assert "/testbed/documents/a.csv" in json.dumps(told)


async def test_a_picture_of_the_input_goes_to_the_model_too(tmp_path: Path) -> None:
    url = f"data:image/png;base64,{DATA}"
    content = [{"type": "input_image", "image_url": url, "detail": "low"}]
    async with before([DONE], tmp_path) as (client, backend):
        await ask(client, input=[{"role": "user", "content": content}])
    told = backend.requests[0].body["messages"][-1]["content"]
    assert {"type": "image_url", "image_url": {"url": url, "detail": "low"}} in told


@pytest.mark.parametrize("kind", ["shell", "code_interpreter"])
async def test_a_container_begins_with_the_files_it_was_asked_for_with(
    kind: str, tmp_path: Path
) -> None:
    uploads = DirectoryUploads(tmp_path)
    ids = {"file_ids": [uploads.add("", "a.csv", b"a,b\n")]}
    inputs = Inputs(uploads=uploads)
    async with before([READ, DONE], tmp_path, inputs=inputs) as (client, backend):
        tool: dict[str, Any] = {"type": kind, "environment": {"type": "container_auto", **ids}}
        if kind == "code_interpreter":
            tool = {"type": kind, "container": {"type": "auto", "memory_limit": "1g", **ids}}
        await ask(client, tools=[tool])
    assert "a,b" in backend.requests[1].body["messages"][-1]["content"]


async def test_what_a_container_keeps_is_there_for_the_next_response(tmp_path: Path) -> None:
    write = tool_reply(call("execute_bash", command="echo kept > kept.txt"))
    read = tool_reply(call("execute_bash", command="cat kept.txt"))
    async with before([write, DONE, read, DONE], tmp_path) as (client, _):
        made = (await client.post("/containers", json={"name": "mine"})).json()["id"]
        environment = {"type": "container_reference", "container_id": made}
        tools = [{"type": "shell", "environment": environment}]
        await ask(client, tools=tools)
        second = await ask(client, tools=tools)
    assert second["output"][1]["output"][0]["stdout"] == "kept\n"


async def test_what_was_shown_of_earlier_steps_is_not_told_to_the_model(tmp_path: Path) -> None:
    async with before([ECHO, DONE, text_reply("Yes.")], tmp_path) as (client, backend):
        first = await ask(client, tools=[SHELL])
        said = [
            {"role": "user", "content": "Go."},
            *first["output"],
            {"role": "user", "content": "Sure?"},
        ]
        await ask(client, input=said, tools=[SHELL])
    assert backend.requests[2].body["messages"][1:] == [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Sure?"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_tools_the_model_answers_by_itself(stream: bool, tmp_path: Path) -> None:
    async with before([{"reasoning": "Hm.", "content": "42"}], tmp_path) as (client, backend):
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


async def test_what_a_chat_ui_asks_for_itself_is_one_call(tmp_path: Path) -> None:
    task = {"x-openwebui-task": "title_generation"}
    async with before([text_reply("A title")], tmp_path) as (client, backend):
        answer = await client.post("/responses", json=BODY, headers=task)
    assert text(answer.json()) == "A title"
    assert "tools" not in backend.requests[0].body


async def test_no_more_tools_are_run_than_the_client_allows(tmp_path: Path) -> None:
    two = tool_reply(call("execute_bash", command="echo 1"), call("execute_bash", command="echo 2"))
    async with before([two, DONE], tmp_path) as (client, backend):
        response = await ask(client, tools=[SHELL], max_tool_calls=1)
    assert (kinds(response), text(response)) == (PROFILES["items"], "Done.")
    first, second = backend.requests[1].body["messages"][-2:]
    assert "1" in first["content"]
    assert second["content"].startswith("Not run: no more tool calls are allowed.")


async def test_a_tool_that_must_be_used_is_asked_for_in_the_first_turn(tmp_path: Path) -> None:
    async with before([ECHO, DONE], tmp_path) as (client, backend):
        await ask(client, tools=[SHELL, LOOKUP], tool_choice={"type": "shell"})
    choices = [seen.body.get("tool_choice") for seen in backend.requests]
    assert choices == ["required", None]


async def test_a_refusal_is_one(tmp_path: Path) -> None:
    refusal = {"message": {"role": "assistant", "content": None, "refusal": "No."}}
    async with before([refusal], tmp_path) as (client, _):
        response = await ask(client)
    assert response["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]


@pytest.mark.parametrize(
    ("mode", "policy", "refused"),
    [
        ("none", {"type": "disabled"}, False),
        ("open", {"type": "disabled"}, True),
        ("none", {"type": "allowlist", "allowed_domains": ["example.com"]}, True),
    ],
)
async def test_a_sandbox_reaches_what_its_operator_says_or_the_client_hears_of_it(
    mode: Any, policy: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    isolation = Isolation(network=Egress(mode=mode))
    environment = {"type": "container_auto", "network_policy": policy}
    async with before([DONE], tmp_path, isolation) as (client, _):
        response = await ask(client, tools=[{"type": "shell", "environment": environment}])
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
async def test_an_error_names_the_place_in_the_clients_own_request(
    body: dict[str, Any], status: int, param: str, stream: bool, tmp_path: Path
) -> None:
    async with before([], tmp_path) as (client, backend):
        answer = await client.post("/responses", json={**BODY, **body, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert not backend.requests


async def test_a_failed_backend_is_told_with_its_status(tmp_path: Path) -> None:
    async with before([Refusal(429, "later")] * 3, tmp_path) as (client, _):
        answer = await client.post("/responses", json=BODY)
    assert (answer.status_code, answer.json()["error"]["message"]) == (429, "later")


async def test_a_repeated_request_is_no_second_run(tmp_path: Path) -> None:
    key = {"idempotency-key": "k"}
    async with before([DONE], tmp_path) as (client, backend):
        first = await client.post("/responses", json=BODY, headers=key)
        second = await client.post("/responses", json={**BODY, "stream": True}, headers=key)
        other = await client.post("/responses", json={**BODY, "input": "?"}, headers=key)
    assert first.json()["id"] in second.text
    assert other.status_code == 422
    assert len(backend.requests) == 1


async def test_a_plain_model_is_the_backends_own(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def own(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.Response(text='{ "id":"resp_theirs"}', content_type="application/json")

    async with before([], tmp_path, elsewhere=own) as (client, _):
        odd = {"model": "fake-model:plain", "tools": [{"type": "web_search"}], "sandbox": {}}
        answer = await client.post("/responses", json={**BODY, **odd})
    assert answer.text == '{ "id":"resp_theirs"}'
    asked = {**BODY, "tools": [{"type": "web_search"}]}
    assert seen == [("/v1/responses", asked)]
