"""Errors of requests and backends, as exceptions of the openai SDK."""

from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.openai_errors import MESSAGES, failed_stream, openai_client, request_error
from tests.fakes.backend import Frames, Refusal, ScriptedBackend, chunk, frames, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import ATTEMPTS, make_services, running_proxy, serve, single_key

# The request is wrong


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": "Hello."}, "messages", "invalid_type"),
        ({"messages": [{"content": "Hello."}]}, "messages[0].role", "missing_required_parameter"),
        ({"model": 7}, "model", "invalid_type"),
        ({"n": 17}, "n", "integer_above_max_value"),
        (
            {"tools": [{"type": "function"}]},
            "tools[0].function",
            "missing_required_parameter",
        ),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"extra_body": {"stream": "yes"}}, "stream", "invalid_type"),
        ({"extra_body": {"sandbox": {"steps": "all"}}}, "sandbox.steps", "invalid_value"),
        ({"extra_headers": {"X-Sandbox-Steps": "all"}}, "X-Sandbox-Steps", "invalid_value"),
        ({"extra_headers": {"X-Sandbox-Deadline": "soon"}}, "X-Sandbox-Deadline", "invalid_value"),
        ({"extra_body": {"sandbox": {"deadline_s": 0}}}, "sandbox.deadline_s", "invalid_value"),
        (
            {"extra_body": {"sandbox": {"on_disconnect": "wait"}}},
            "sandbox.on_disconnect",
            "invalid_value",
        ),
        (
            {"extra_headers": {"X-Sandbox-On-Disconnect": ""}},
            "X-Sandbox-On-Disconnect",
            "invalid_value",
        ),
    ],
)
async def test_bad_request_names_the_field(
    body: dict[str, Any], param: str, code: str | None, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client, **body)
    assert isinstance(error, openai.BadRequestError)
    assert (error.status_code, error.type) == (400, "invalid_request_error")
    assert (error.param, error.code) == (param, code)
    assert backend.requests == []


async def test_error_names_a_missing_field(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", cast_to=object, body={"model": "fake-model"})
    found = caught.value
    assert (found.param, found.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[]", b"null", b"[" * 60])
async def test_body_that_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(10), pytest.raises(openai.BadRequestError) as caught:
            await client.post("/chat/completions", cast_to=object, content=content)
    assert "JSON" in caught.value.message


# The key and the way


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.post("/chat/completions", cast_to=object, content=b"{"),
        lambda client: client.get("/models", cast_to=object),
        lambda client: client.get("/models/fake-model", cast_to=object),
    ],
)
async def test_wrong_key_is_refused_before_the_body_and_the_model_are_checked(
    ask: Any, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=single_key("sk-right")) as url,
        openai_client(url, "sk-wrong") as client,
    ):
        with anyio.fail_after(10), pytest.raises(openai.AuthenticationError) as caught:
            await ask(client)
    error = caught.value
    assert (error.status_code, error.code, error.param) == (401, "invalid_api_key", None)
    assert error.response.headers["www-authenticate"] == "Bearer"
    # litellm clients take a 401 without this phrase for a bad request.
    assert "Incorrect API key provided" in error.message
    assert "sk-right" not in error.response.text
    assert backend.requests == []


async def test_correct_key_is_accepted(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("Hello you.")]) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=single_key("sk-right")) as url,
        openai_client(url, "sk-right") as client,
    ):
        completion = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
    assert completion.choices[0].message.content == "Hello you."


async def test_unknown_route_and_unknown_model_are_not_found(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with pytest.raises(openai.NotFoundError) as no_route:
            await client.post("/metrics/nonsense", cast_to=object, body={})
        with pytest.raises(openai.NotFoundError) as no_model:
            await client.models.retrieve("gpt-of-others")
    assert (no_route.value.code, no_route.value.type) == ("unknown_url", "invalid_request_error")
    assert no_route.value.body == {
        "message": "Not Found: POST /v1/metrics/nonsense.",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_url",
    }
    assert no_model.value.code == "model_not_found"
    assert "'gpt-of-others'" in no_model.value.message


async def test_wrong_method_is_not_allowed(tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.get("/chat/completions", cast_to=object)
    assert (caught.value.status_code, caught.value.type) == (405, "invalid_request_error")
    assert caught.value.response.headers["allow"] == "POST"


# The backend fails


def server_error() -> Refusal:
    return Refusal(500, "CUDA out of memory", type="InternalServerError")


async def test_backend_errors_are_hidden_if_the_last_attempt_succeeds(tmp_path: Path) -> None:
    script = [*[server_error()] * (ATTEMPTS - 1), text_reply("Here I am.")]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        completion = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
    assert completion.choices[0].message.content == "Here I am."


async def test_persistent_backend_error_keeps_its_status(tmp_path: Path) -> None:
    async with (
        scripted_backend([server_error()] * 9) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client)
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.type, error.code) == (500, "InternalServerError", "500")
    assert error.body == {
        "message": "CUDA out of memory",
        "type": "InternalServerError",
        "param": None,
        "code": "500",
    }
    assert len(backend.requests) == ATTEMPTS


@pytest.mark.parametrize("stream", [False, True])
async def test_retry_after_header_of_a_rate_limited_backend_reaches_the_client(
    stream: bool, tmp_path: Path
) -> None:
    too_many = Refusal(429, "too many requests", headers={"Retry-After": "120"})
    async with (
        scripted_backend([too_many]) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=60.0) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client, stream=stream)
    assert isinstance(error, openai.RateLimitError)
    assert (error.status_code, error.code) == (429, "429")
    assert error.response.headers["retry-after"] == "120"
    assert "x-should-retry" not in error.response.headers
    assert len(backend.requests) == 1


@pytest.mark.parametrize(
    "first_reply", [tool_reply(call("execute_bash", command="true")), text_reply("Let me see:")]
)
async def test_sdk_does_not_retry_a_run_that_failed_after_a_reply(
    first_reply: dict[str, Any], tmp_path: Path
) -> None:
    """Otherwise the SDK would repeat the whole run twice."""
    script = [first_reply, *[server_error()] * 9]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url).with_options(max_retries=2) as client,
    ):
        error = await request_error(client)
    assert (error.status_code, error.response.headers["x-should-retry"]) == (500, "false")
    assert len(backend.requests) == 1 + ATTEMPTS


@pytest.mark.parametrize("stream", [False, True])
async def test_sdk_does_not_retry_an_error_that_the_proxy_has_retried(
    stream: bool, tmp_path: Path
) -> None:
    async with (
        scripted_backend([server_error()] * 30) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=60.0) as url,
        openai_client(url).with_options(max_retries=2) as client,
    ):
        error = await request_error(client, stream=stream)
    assert (error.status_code, error.response.headers["x-should-retry"]) == (500, "false")
    assert len(backend.requests) == ATTEMPTS


@pytest.mark.parametrize("stream", [False, True])
async def test_sdk_retries_an_error_that_the_proxy_does_not_retry(
    stream: bool, tmp_path: Path
) -> None:
    async with scripted_backend([server_error(), text_reply("Here I am.")]) as backend:
        model = OpenAIHTTPModel(backend.base_url, api_key=None, timeout_s=20)
        async with (
            serve(make_services(model, MemorySandboxes(), tmp_path, status_wait_s=60.0)) as url,
            openai_client(url).with_options(max_retries=2) as client,
        ):
            with anyio.fail_after(20):
                await client.chat.completions.create(
                    model="fake-model", messages=MESSAGES, stream=stream
                )
        await model.aclose()
    assert len(backend.requests) == 2


async def test_request_refused_by_the_backend_is_not_retried(tmp_path: Path) -> None:
    no = Refusal(400, "temperature must be at most 1", code="invalid_value")
    async with (
        scripted_backend([no]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client, temperature=2)
    assert isinstance(error, openai.BadRequestError)
    assert error.code == "invalid_value"
    assert "temperature must be at most 1" in error.message
    assert len(backend.requests) == 1


async def test_unreachable_backend_is_a_502(tmp_path: Path) -> None:
    nowhere = ScriptedBackend("vllm", "fake-model")
    nowhere.base_url = "http://127.0.0.1:1/v1"
    async with running_proxy(nowhere, "memory", tmp_path) as url, openai_client(url) as client:
        error = await request_error(client)
        plain = await request_error(client, model="fake-model:plain")
        with pytest.raises(openai.InternalServerError) as listing:
            await client.models.list()
    for found in (error, plain, listing.value):
        assert (found.status_code, found.code) == (502, "backend_unreachable")


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_is_a_400(stream: bool, tmp_path: Path) -> None:
    too_long = Refusal(400, "This model's maximum context length is 4096 tokens.")
    async with (
        scripted_backend([too_long, too_long]) as backend,
        running_proxy(backend, "memory", tmp_path, status_wait_s=60.0) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client, stream=stream)
    assert isinstance(error, openai.BadRequestError)
    assert error.code == "context_length_exceeded"


# Once the stream has begun


async def test_backend_error_during_a_stream_ends_the_stream_with_an_error(
    tmp_path: Path,
) -> None:
    broken = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}
    thought = chunk({"reasoning": "Let me see."})
    script = [Frames(frames(thought, broken, "[DONE]"))]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        body = {"model": "fake-model", "messages": MESSAGES}
        pieces, error = await failed_stream(client, body)
    assert pieces == ["", "Let me see."]
    assert (error.message, error.type, error.code) == ("engine died", "InternalServerError", "500")
    assert len(backend.requests) == 1


async def test_broken_backend_connection_ends_the_stream_with_an_error(
    tmp_path: Path,
) -> None:
    script = [Frames(frames(chunk({"reasoning": "Let me see."})), cut=True)]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        body = {"model": "fake-model", "messages": MESSAGES}
        pieces, error = await failed_stream(client, body)
    assert pieces == ["", "Let me see."]
    assert error.code == "backend_unreachable"


# The backend names a message


USER_HI = {"role": "user", "content": "Hello."}
STEP_BACK = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "step_r1_1",
                "type": "function",
                "function": {"name": "execute_bash", "arguments": "{}"},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "step_r1_1", "content": "42"},
]


@pytest.mark.parametrize(
    ("messages", "backend_message", "expected"),
    [
        ([USER_HI], "messages[1].content is wrong", "messages[0].content is wrong"),
        ([USER_HI], "body.messages.1.content: wrong", "body.messages.0.content: wrong"),
        ([USER_HI], "at ('body', 'messages', 1, 'x')", "at ('body', 'messages', 0, 'x')"),
        ([USER_HI], "messages.[1].role", "messages.[0].role"),
        ([{"role": "system", "content": "Be brief."}, USER_HI], "messages[1]", "messages[1]"),
        ([USER_HI], "messages[0].content is wrong", "messages.content is wrong"),
        ([USER_HI], "messages[7].content is wrong", "messages.content is wrong"),
        ([USER_HI, *STEP_BACK, USER_HI], "messages[2] is wrong", "messages is wrong"),
        ([USER_HI], "3 messages are wrong", "3 messages are wrong"),
    ],
)
async def test_message_index_of_a_backend_error_is_mapped_to_the_clients_messages_or_removed(
    messages: list[Any], backend_message: str, expected: str, tmp_path: Path
) -> None:
    refusal = Refusal(400, backend_message, beside={"param": backend_message})
    async with (
        scripted_backend([refusal]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client, messages=messages)
    assert isinstance(error, openai.BadRequestError)
    body: Any = error.body
    assert (body["message"], error.param) == (expected, expected)


async def test_message_index_is_removed_from_backend_errors_of_the_responses_api(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend([Refusal(400, "messages[1].content is wrong")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with pytest.raises(openai.BadRequestError, match=r"messages\.content is wrong"):
            await client.responses.create(model="fake-model", input="Hello.")
