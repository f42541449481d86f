"""Requests of POST /v1/messages: files, tools, containers, errors and headers."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.inputs import InputLoader
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.schemas.messages_response import accumulate_message
from sandbox_runtime.errors import NoFreeSandboxError
from tests.clients.messages_http import (
    BODY,
    CODE_EXECUTION,
    PATH,
    TEMPERATURE_TOOL,
    events,
    messages_client,
    texts,
)
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import (
    KINDS,
    Kind,
    make_services,
    model_client,
    running_proxy,
    serve,
    single_key,
)
from tests.fakes.uploads import DirectoryUploads

GIF = base64.b64encode(b"GIF89a;").decode()
DONE = [text_reply("Done.")]
TITLE = "<session>\nCount the dots.\n</session>\n\nWrite the title in English."
"""The prompt with which Claude Code requests a title."""


def user_message(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def assistant_message(message: Any) -> dict[str, Any]:
    """Return a message as its client sends it back."""
    return {"role": "assistant", "content": message["content"]}


async def test_images_and_documents_become_files_and_the_model_also_gets_the_images(
    tmp_path: Path,
) -> None:
    image = {"type": "base64", "media_type": "image/gif", "data": GIF}
    paper = {"type": "base64", "media_type": "application/pdf", "data": GIF}
    content = [
        {"type": "image", "source": image},
        {"type": "document", "title": "a paper.pdf", "source": paper},
        {"type": "text", "text": "What are these?"},
    ]
    script: list[Any] = [tool_reply(call("execute_bash", command="ls documents")), *DONE]
    async with messages_client(script, tmp_path) as client:
        await client.message(messages=user_message(*content))
    _, user, _, listed = client.last_request["messages"]
    assert user["content"][0] == {
        "type": "image_url",
        "image_url": {"url": f"data:image/gif;base64,{GIF}"},
    }
    assert "/testbed/documents/a_paper.pdf" in user["content"][2]["text"]
    assert listed["content"].splitlines()[2:] == ["a_paper.pdf", "image-1.gif"]


async def test_container_upload_becomes_a_file(tmp_path: Path) -> None:
    script: list[Any] = [tool_reply(call("execute_bash", command="cat documents/a.txt")), *DONE]
    uploads = DirectoryUploads(tmp_path)
    upload = {"type": "container_upload", "file_id": uploads.add("mine", "a.txt", b"forty-two")}
    async with messages_client(
        script, tmp_path, inputs=InputLoader(uploads=uploads), keyring=single_key("mine")
    ) as client:
        key = {"x-api-key": "mine"}
        await client.message(key, messages=user_message(upload), tools=[CODE_EXECUTION])
        missing = await client.error(key, messages=user_message({**upload, "file_id": "file-0"}))
    assert "forty-two" in client.last_request["messages"][-1]["content"]
    assert missing[1]["message"] == "Invalid 'messages.0.content.0': no file 'file-0' was found."


async def test_error_names_the_block_with_invalid_data(tmp_path: Path) -> None:
    broken = {"type": "base64", "media_type": "image/gif", "data": "@@"}
    content = [{"type": "text", "text": "See"}, {"type": "image", "source": broken}]
    async with messages_client([], tmp_path) as client:
        status, error = await client.error(messages=user_message(*content), system="Be brief.")
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("Invalid file data: 'messages.0.content.1'.")


@pytest.mark.parametrize("kind", KINDS)
async def test_client_tool_is_called_between_sandbox_steps(kind: Kind, tmp_path: Path) -> None:
    script: list[Any] = [
        tool_reply(call("execute_bash", command="echo kept > a.txt"), call("warmth", city="Bonn")),
        tool_reply(call("execute_bash", command="cat a.txt")),
        tool_reply(call("submit", answer="21 degrees.")),
    ]
    with anyio.fail_after(60):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, kind, tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            asked = {**BODY, "tools": [TEMPERATURE_TOOL]}
            first = (await http.post(PATH, json=asked)).json()
            result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"]}
            turns = [
                *BODY["messages"],
                assistant_message(first),
                *user_message({**result, "content": "21"}),
            ]
            second = (await http.post(PATH, json={**asked, "messages": turns})).json()
    run_id = first["sandbox"]["run_id"]
    use = {"id": f"call_{run_id}_1", "name": "warmth", "input": {"city": "Bonn"}}
    assert first["content"] == [{"type": "tool_use", **use}]
    assert first["stop_reason"] == "tool_use"
    assert texts(second) == ["21 degrees."]
    results = [each for each in backend.requests[-1].body["messages"] if each["role"] == "tool"]
    assert [each["content"].splitlines()[-1] for each in results][1:] == ["21", "kept"]


async def test_client_tool_call_is_streamed_as_a_block(tmp_path: Path) -> None:
    script: list[Any] = [tool_reply(call("warmth", city="Bonn"))]
    async with messages_client(script, tmp_path) as client:
        response = await client.ask(stream=True, tools=[TEMPERATURE_TOOL])
    started, *written, stopped, end, _ = events(response)[1:]
    assert started["content_block"]["type"] == "tool_use"
    assert started["content_block"]["input"] == {}
    pieces = [each["delta"]["partial_json"] for each in written]
    assert pieces == ['{"city":', ' "Bonn"}']
    assert stopped["type"] == "content_block_stop"
    assert end["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("thinking", ["adaptive", "disabled"])
async def test_text_beside_a_client_tool_call_is_sent_before_the_call(
    thinking: str, stream: bool, tmp_path: Path
) -> None:
    script: list[Any] = [
        tool_reply(call("execute_bash", command="true"), content="First this."),
        {"reasoning": "Hm.", "content": "Now Bonn.", "tool_calls": [call("warmth", city="Bonn")]},
    ]
    async with messages_client(script, tmp_path) as client:
        response = await client.ask(
            stream=stream, tools=[TEMPERATURE_TOOL], thinking={"type": thinking}
        )
    message = accumulate_message(events(response)) if stream else response.json()
    *thoughts, said_beside, use = message["content"]
    assert (said_beside, use["type"]) == ({"type": "text", "text": "Now Bonn."}, "tool_use")
    words = "".join(block["thinking"] for block in thoughts)
    assert ("First this." in words, "Hm." in words) == (thinking == "adaptive",) * 2
    assert "Now Bonn." not in words


async def test_text_before_a_sandbox_step_is_thinking_if_the_request_enables_thinking(
    tmp_path: Path,
) -> None:
    both = [call("execute_bash", command="true"), call("warmth", city="Bonn")]
    script: list[Any] = [tool_reply(*both, content="Now both.")]
    async with messages_client(script, tmp_path) as client:
        shown = await client.message(tools=[TEMPERATURE_TOOL], thinking={"type": "adaptive"})
        unshown = await client.message(tools=[TEMPERATURE_TOOL])
    assert [block["type"] for block in shown["content"]] == ["thinking", "tool_use"]
    assert shown["content"][0]["thinking"].startswith("Now both.\n````console\n$ true\n")
    assert texts(unshown) == ["Now both."]


async def test_invalid_tool_arguments_are_wrapped_in_an_object(tmp_path: Path) -> None:
    broken = {"name": "warmth", "arguments": '{"city": '}
    script: list[Any] = [{"tool_calls": [broken]}]
    async with messages_client(script, tmp_path) as client:
        message = await client.message(tools=[TEMPERATURE_TOOL])
    assert message["content"][0]["input"] == {"invalid_arguments": '{"city": '}


async def test_client_editor_tool_keeps_its_name_if_a_sandbox_tool_has_the_same_name(
    tmp_path: Path,
) -> None:
    editor = {"type": "text_editor_20250124", "name": "str_replace_editor"}
    script: list[Any] = [tool_reply(call("str_replace_editor", command="view", path="/a"))]
    async with messages_client(script, tmp_path) as client:
        message = await client.message(tools=[editor])
    names = [tool["function"]["name"] for tool in client.last_request["tools"]]
    assert {"sandbox_str_replace_editor", "str_replace_editor"} < set(names)
    assert message["content"][0]["name"] == "str_replace_editor"
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("kind", KINDS)
async def test_container_named_in_a_message_request_keeps_its_files(
    kind: Kind, tmp_path: Path
) -> None:
    script: list[Any] = [
        tool_reply(call("execute_bash", command="echo kept > a.txt")),
        *DONE,
        tool_reply(call("execute_bash", command="cat a.txt")),
        *DONE,
    ]
    with anyio.fail_after(60):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, kind, tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            asked = {**BODY, "tools": [CODE_EXECUTION]}
            first = (await http.post(PATH, json=asked)).json()
            name = first["container"]["id"]
            second = (await http.post(PATH, json={**asked, "container": name})).json()
    assert second["container"]["id"] == name
    assert second["content"][1]["content"]["stdout"] == "kept\n"


async def test_unknown_container_id_starts_a_new_container(tmp_path: Path) -> None:
    script: list[Any] = [tool_reply(call("execute_bash", command="ls")), *DONE]
    async with messages_client(script, tmp_path) as client:
        message = await client.message(tools=[CODE_EXECUTION], container={"id": "container_gone"})
    assert texts(message) == ["Done."]
    assert message["container"]["id"] not in ("", "container_gone")


async def test_output_format_is_enforced(tmp_path: Path) -> None:
    schema = {"type": "object", "required": ["city"]}
    form = {"type": "json_schema", "schema": schema}
    script: list[Any] = [text_reply("Bonn"), text_reply("no"), text_reply('{"city": "Bonn"}')]
    async with messages_client(script, tmp_path) as client:
        message = await client.message(output_config={"format": form})
    assert texts(message) == ['{"city": "Bonn"}']
    assert client.last_request["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize(
    "body",
    [
        {"tool_choice": {"type": "none"}, "tools": [TEMPERATURE_TOOL]},
        {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]},
        {"messages": user_message({"type": "text", "text": TITLE})},
        {"messages": [*BODY["messages"], {"role": "assistant", "content": "{"}]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_messages_request_that_needs_no_tools_is_one_model_call(
    stream: bool, body: Any, tmp_path: Path
) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    script: list[Any] = [{"reasoning": "Hm.", "content": "Dots", "usage": usage}] * 2
    async with messages_client(script, tmp_path) as client:
        response = await client.ask(stream=stream, **{"tools": [CODE_EXECUTION], **body})
        names = [tool["function"]["name"] for tool in client.last_request.get("tools", [])]
    assert len(client.backend.requests) == 1
    assert names == []
    assert client.last_request["messages"][0]["role"] != "system"
    if stream:
        found = events(response)
        pieces = [event["delta"].get("text", "") for event in found if "delta" in event]
        text, end = "".join(pieces), found[-2]
    else:
        end = response.json()
        (text,) = texts(end)
        assert end["container"] is None
    assert text == "Dots"
    assert end["usage"]["output_tokens"] == 1


async def test_single_model_call_over_its_deadline_is_a_504(tmp_path: Path) -> None:
    script: list[Any] = [Held(text_reply("Late."), asyncio.Event())]
    async with messages_client(script, tmp_path) as client:
        response = await client.ask(
            {"X-Sandbox-Deadline": "0.2"}, messages=user_message({"type": "text", "text": TITLE})
        )
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    error = response.json()["error"]
    assert error["type"] == "timeout_error"
    assert "the client's deadline of 0.2 s" in error["message"]


# Keys, errors


async def test_key_is_accepted_as_x_api_key_or_bearer(tmp_path: Path) -> None:
    async with messages_client(list(DONE), tmp_path, keyring=single_key("sk-ours")) as client:
        own = await client.ask({"x-api-key": "sk-ours"})
        bearer = await client.ask({"Authorization": "Bearer sk-ours"})
        refused = await client.error({"x-api-key": "sk-other"})
    assert (own.status_code, bearer.status_code) == (200, 200)
    assert (refused[0], refused[1]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(
    ("status", "type"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
async def test_backend_error_keeps_its_status_and_gets_an_anthropic_type(
    status: int, type: str, tmp_path: Path
) -> None:
    async with messages_client([Refusal(status, "so it is")], tmp_path) as client:
        error_body = await client.error()
    assert error_body == (status, {"type": type, "message": "so it is"})


async def test_context_overflow_error_has_the_text_that_clients_search_for(
    tmp_path: Path,
) -> None:
    words = "This model's maximum context length is 4096 tokens, but there are 5000."
    async with messages_client([Refusal(400, words)], tmp_path) as client:
        status, error = await client.error()
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == f"prompt is too long: {words}"


async def test_unavailable_sandbox_is_an_overloaded_error(tmp_path: Path) -> None:
    none = MemorySandboxes(failure=NoFreeSandboxError("none left", retry_after_s=1))
    script: list[Any] = [tool_reply(call("execute_bash", command="true"))]
    async with scripted_backend(script) as backend:
        model = model_client(backend)
        async with (
            serve(make_services(model, none, tmp_path)) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            response = await http.post(PATH, json=BODY)
        await model.aclose()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "type"),
    [
        ("GET", PATH, 405, "invalid_request_error"),
        ("DELETE", f"{PATH}/count_tokens", 405, "invalid_request_error"),
        ("GET", f"{PATH}/msg_1", 404, "not_found_error"),
        ("POST", f"{PATH}/batches", 404, "not_found_error"),
    ],
)
async def test_unsupported_messages_routes_return_anthropic_errors(
    method: str, path: str, status: int, type: str, tmp_path: Path
) -> None:
    async with messages_client([], tmp_path) as client:
        response = await client.http.request(method, path)
    error_body = response.json()
    assert (response.status_code, error_body["type"]) == (status, "error")
    assert error_body["error"]["type"] == type
    assert error_body["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"model": 1}', b'"a"'])
async def test_malformed_messages_request_is_refused(content: bytes, tmp_path: Path) -> None:
    async with messages_client([], tmp_path) as client:
        response = await client.http.post(PATH, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"X-Sandbox-Steps": "loud"}, "X-Sandbox-Steps"),
        ({"X-Sandbox-Deadline": "soon"}, "X-Sandbox-Deadline"),
    ],
)
async def test_invalid_sandbox_header_is_refused(
    headers: dict[str, str], words: str, tmp_path: Path
) -> None:
    async with messages_client([], tmp_path) as client:
        status, error = await client.error(headers)
    assert status == 400
    assert words in error["message"]


async def test_repeated_messages_request_joins_the_first_run(tmp_path: Path) -> None:
    headers = {"Idempotency-Key": "once"}
    async with messages_client(list(DONE), tmp_path) as client:
        first = await client.message(headers)
        second = await client.message(headers)
        streamed = await client.ask(headers, stream=True)
    assert first["id"] == second["id"] == events(streamed)[0]["message"]["id"]
    assert len(client.backend.requests) == 1


async def test_truncated_client_tool_call_has_the_stop_reason_max_tokens(
    tmp_path: Path,
) -> None:
    cut = {"name": "warmth", "arguments": '{"city": "Bo'}
    script: list[Any] = [tool_reply(cut)]
    async with messages_client(script, tmp_path) as client:
        response = await client.ask(stream=True, tools=[TEMPERATURE_TOOL])
    _, *_, end, _ = found = events(response)
    written = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in written) == '{"city": "Bo'
    assert end["delta"]["stop_reason"] == "max_tokens"
