"""A llama.cpp server as the backend: its fields, its window, its tokenizer, its refusals."""

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
from tests.clients.errors import ASKED, client_of, failed_stream, refused
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.llama_cpp import LlamaCpp
from tests.fakes.server import running_proxy

BASH = tool_reply(call("execute_bash", command="true"))
SUBMIT = tool_reply(call("submit", answer="Forty-two."))
GRAMMAR = 'root ::= "yes" | "no"'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
NUMBER = '{"n": 42}'


@asynccontextmanager
async def proxied(
    server: LlamaCpp, tmp_path: Path
) -> AsyncIterator[tuple[ScriptedBackend, openai.AsyncOpenAI]]:
    async with (
        scripted_backend(
            server, style="llama.cpp", window=server.window, elsewhere=server.elsewhere
        ) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        client_of(url) as client,
    ):
        with anyio.fail_after(30):
            yield backend, client


async def answered(client: openai.AsyncOpenAI, said: str = "Hello.", **fields: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": said}]
    return await client.chat.completions.create(
        model="fake-model", messages=messages, extra_body=fields
    )


def documents(tokens: int) -> str:
    """A text with one document, of so many tokens by our estimate."""
    lines: list[str] = []
    while estimate_tokens("".join(lines)) < tokens:
        lines.append(f"Line {len(lines)} of the book.\n")
    return f"<document title='a.txt'>\n{''.join(lines)}</document>\nWho wrote it?"


async def test_a_grammar_holds_for_the_visible_answer_alone(tmp_path: Path) -> None:
    server = LlamaCpp([BASH, SUBMIT, text_reply("yes")])
    async with proxied(server, tmp_path) as (backend, client):
        completion = await answered(client, grammar=GRAMMAR)
    assert completion.choices[0].message.content == "yes"
    assert [seen.body.get("grammar") for seen in backend.requests] == [None, None, GRAMMAR]


async def test_a_json_schema_is_a_form_of_the_answer_that_is_checked(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply('{"n": "42"}'), text_reply(f"```json\n{NUMBER}\n```")])
    async with proxied(server, tmp_path) as (backend, client):
        completion = await answered(client, json_schema=SCHEMA)
    assert completion.choices[0].message.content == NUMBER
    asked = [seen.body.get("json_schema") for seen in backend.requests]
    assert asked == [None, SCHEMA, SCHEMA]
    assert '"42" is not of type "integer"' in backend.requests[-1].body["messages"][-1]["content"]


async def test_an_empty_json_schema_wants_any_json(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply("```json\n[7]\n```")])
    async with proxied(server, tmp_path) as (backend, client):
        completion = await answered(client, json_schema={})
    assert completion.choices[0].message.content == "[7]"
    assert backend.requests[-1].body["json_schema"] == {}


async def test_n_predict_bounds_every_call_with_room_for_thinking(tmp_path: Path) -> None:
    server = LlamaCpp([BASH, SUBMIT, text_reply("yes")])
    async with proxied(server, tmp_path) as (backend, client):
        await answered(client, n_predict=99, grammar=GRAMMAR)
    assert [seen.body.get("n_predict") for seen in backend.requests] == [4096, 4096, 4096]


async def test_n_predict_without_end_is_no_bound(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply("yes")])
    async with proxied(server, tmp_path) as (backend, client):
        await answered(client, n_predict=-1, grammar=GRAMMAR)
    assert not any("n_predict" in seen.body for seen in backend.requests)


async def test_a_tiny_n_predict_has_a_run_too(tmp_path: Path) -> None:
    server = LlamaCpp([SUBMIT, text_reply("yes")])
    async with proxied(server, tmp_path) as (backend, client):
        await answered(client, n_predict=5)
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
async def test_a_wrong_field_of_its_is_refused(
    fields: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with proxied(LlamaCpp([]), tmp_path) as (backend, client):
        error = await refused(client, extra_body=fields)
    assert (error.status_code, error.param) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize("model", ["fake-model", "whatever-it-is-called"])
async def test_a_text_over_half_the_window_becomes_a_file(model: str, tmp_path: Path) -> None:
    """llama.cpp serves one model, by whatever name it is asked for."""
    server = LlamaCpp([SUBMIT], window=8_000)
    messages: list[Any] = [{"role": "user", "content": documents(7_000)}]
    async with proxied(server, tmp_path) as (backend, client):
        await client.chat.completions.create(model=model, messages=messages)
    assert f"{INPUT_DIR}/a.txt" in str(backend.requests[0].body["messages"])


@pytest.mark.parametrize("is_over", [False, True])
async def test_near_half_the_window_its_tokenizer_decides(is_over: bool, tmp_path: Path) -> None:
    text = documents(5_000)
    counted = len(text) // 4
    server = LlamaCpp([SUBMIT, SUBMIT], window=2 * counted - (1 if is_over else 0))
    async with proxied(server, tmp_path) as (backend, client):
        for _ in range(2):
            await answered(client, text)
    said = [str(seen.body["messages"]) for seen in backend.requests]
    assert [f"{INPUT_DIR}/a.txt" in each for each in said] == [is_over, is_over]
    assert [body.get("content") for body in server.tokenized] == [None, text]


async def test_for_a_short_text_nobody_asks_for_the_window(tmp_path: Path) -> None:
    async with proxied(LlamaCpp([SUBMIT]), tmp_path) as (backend, client):
        await answered(client)
    assert backend.listings == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sizes_of_what_is_too_long_stay_in_the_error(
    stream: bool, tmp_path: Path
) -> None:
    server = LlamaCpp([], window=2_000)
    asked: dict[str, Any] = {
        "model": "fake-model",
        "messages": [{"role": "system", "content": documents(4_000)}, *ASKED],
    }
    async with proxied(server, tmp_path) as (_, client):
        if stream:
            _, error = await failed_stream(client, asked)
        else:
            error = await refused(client, **asked)
    body: Any = error.body
    assert body["code"] == "context_length_exceeded"
    assert body["type"] == "exceed_context_size_error"
    assert body["n_ctx"] == 2_000
    assert body["n_prompt_tokens"] > 2_000
