"""A llama.cpp server as the backend: its request fields, context window, tokenizer and errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest

from policies.context import estimate_tokens
from policies.workspace import INPUT_DIR
from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.openai_errors import MESSAGES, failed_stream, openai_client, request_error
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.llama_cpp import LlamaCpp
from tests.fakes.server import running_proxy

BASH = tool_reply(call("execute_bash", command="true"))
SUBMIT = tool_reply(call("submit", answer="Forty-two."))
GRAMMAR = 'root ::= "yes" | "no"'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NUMBER = '{"n": 42}'


@asynccontextmanager
async def llama_cpp_client(
    server: LlamaCpp, tmp_path: Path
) -> AsyncIterator[tuple[ScriptedBackend, openai.AsyncOpenAI]]:
    async with (
        scripted_backend(
            server, style="llama.cpp", window=server.window, elsewhere=server.elsewhere
        ) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            yield backend, client


async def complete(client: openai.AsyncOpenAI, content: str = "Hello.", **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": content}]
    return await client.chat.completions.create(
        model="fake-model", messages=messages, extra_body=fields
    )


def documents(tokens: int) -> str:
    """Return a prompt with one document of at least `tokens` estimated tokens."""
    lines: list[str] = []
    while estimate_tokens("".join(lines)) < tokens:
        lines.append(f"Line {len(lines)} of the book.\n")
    return f"<document title='a.txt'>\n{''.join(lines)}</document>\nWho wrote it?"


async def test_grammar_applies_only_to_the_final_answer(tmp_path: Path) -> None:
    server = LlamaCpp([BASH, SUBMIT, text_reply("yes")])
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        completion = await complete(client, grammar=GRAMMAR)
    assert completion.choices[0].message.content == "yes"
    assert [seen.body.get("grammar") for seen in backend.requests] == [None, None, GRAMMAR]


async def test_answer_that_violates_json_schema_is_requested_again(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply('{"n": "42"}'), text_reply(f"```json\n{NUMBER}\n```")])
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        completion = await complete(client, json_schema=SCHEMA)
    assert completion.choices[0].message.content == NUMBER
    body = [seen.body.get("json_schema") for seen in backend.requests]
    assert body == [None, SCHEMA, SCHEMA]
    assert '"42" is not of type "integer"' in backend.requests[-1].body["messages"][-1]["content"]


async def test_empty_json_schema_accepts_any_json(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply("```json\n[7]\n```")])
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        completion = await complete(client, json_schema={})
    assert completion.choices[0].message.content == "[7]"
    assert backend.requests[-1].body["json_schema"] == {}


async def test_n_predict_is_raised_to_leave_room_for_reasoning(tmp_path: Path) -> None:
    server = LlamaCpp([BASH, SUBMIT, text_reply("yes")])
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        await complete(client, n_predict=99, grammar=GRAMMAR)
    assert [seen.body.get("n_predict") for seen in backend.requests] == [4096, 4096, 4096]


async def test_negative_n_predict_sets_no_limit(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply("yes")])
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        await complete(client, n_predict=-1, grammar=GRAMMAR)
    assert not any("n_predict" in seen.body for seen in backend.requests)


async def test_request_with_a_tiny_n_predict_still_uses_tools(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply("yes")])
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        await complete(client, n_predict=5)
    assert all(seen.body["tools"] for seen in backend.requests)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": 7}, "grammar"),
        ({"json_schema": "{"}, "json_schema"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": "7"}, "n_predict"),
    ],
)
async def test_invalid_llama_cpp_field_is_refused(
    fields: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with llama_cpp_client(LlamaCpp([]), tmp_path) as (backend, client):
        error = await request_error(client, extra_body=fields)
    assert (error.status_code, error.param) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize("model", ["fake-model", "whatever-it-is-called"])
async def test_text_over_half_the_window_becomes_a_file(model: str, tmp_path: Path) -> None:
    """llama.cpp serves its only model under any name."""
    server = LlamaCpp([SUBMIT], window=8_000)
    messages: list[Any] = [{"role": "user", "content": documents(7_000)}]
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        await client.chat.completions.create(model=model, messages=messages)
    assert f"{INPUT_DIR}/a.txt" in str(backend.requests[0].body["messages"])


@pytest.mark.parametrize("is_over", [False, True])
async def test_tokenizer_decides_if_a_text_of_about_half_the_context_window_becomes_a_file(
    is_over: bool, tmp_path: Path
) -> None:
    text = documents(5_000)
    counted = len(text) // 4
    server = LlamaCpp([SUBMIT, SUBMIT], window=2 * counted - (1 if is_over else 0))
    async with llama_cpp_client(server, tmp_path) as (backend, client):
        for _ in range(2):
            await complete(client, text)
    content = [str(seen.body["messages"]) for seen in backend.requests]
    assert [f"{INPUT_DIR}/a.txt" in each for each in content] == [is_over, is_over]
    assert [body.get("content") for body in server.tokenized] == [None, text]


async def test_short_text_causes_no_window_lookup(tmp_path: Path) -> None:
    async with llama_cpp_client(LlamaCpp([SUBMIT]), tmp_path) as (backend, client):
        await complete(client)
    assert backend.listings == []


@pytest.mark.parametrize("stream", [False, True])
async def test_context_length_error_keeps_the_token_counts_of_llama_cpp(
    stream: bool, tmp_path: Path
) -> None:
    server = LlamaCpp([], window=2_000)
    payload: dict[str, Any] = {
        "model": "fake-model",
        "messages": [{"role": "system", "content": documents(4_000)}, *MESSAGES],
    }
    async with llama_cpp_client(server, tmp_path) as (_, client):
        if stream:
            _, error = await failed_stream(client, payload)
        else:
            error = await request_error(client, **payload)
    body: Any = error.body
    assert body["code"] == "context_length_exceeded"
    assert body["type"] == "exceed_context_size_error"
    assert body["n_ctx"] == 2_000
    assert body["n_prompt_tokens"] > 2_000
