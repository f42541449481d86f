"""Tests of which backend calls receive each chat parameter, and under which name."""

from pathlib import Path
from typing import Any

import anyio
import pydantic
import pytest
from openai import LengthFinishReasonError

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.openai_errors import MESSAGES, openai_client
from tests.fakes.backend import Frames, Item, chunk, frames, scripted_backend
from tests.fakes.server import running_proxy

BASH = tool_reply(call("execute_bash", command="true"))
SUBMIT = tool_reply(call("submit", answer="Forty-two."))
NUMBER = '{"n": 42}'
EVERY_CALL: dict[str, Any] = {
    "reasoning_effort": "low",
    "metadata": {"team": "a"},
    "store": False,
    "user": "ada",
    "service_tier": "flex",
    "verbosity": "low",
    "safety_identifier": "u-1",
    "prompt_cache_key": "k",
    "web_search_options": {"search_context_size": "low"},
    "modalities": ["text"],
    "temperature": 0.5,
    "seed": 7,
    "extra_body": {"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}, "x_new": [1]},
}
VISIBLE_ANSWER: dict[str, Any] = {
    "prediction": {"type": "content", "content": "42"},
    "stop": ["\n\n"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"7": -100},
    "max_completion_tokens": 99,
}
FUNCTION: Any = {"name": "lookup", "parameters": {"type": "object", "properties": {}}}


class Number(pydantic.BaseModel):
    """The schema of a parsed answer."""

    n: int


async def complete(script: list[Item], tmp_path: Path, **fields: Any) -> tuple[Any, list[Any]]:
    """Return the completion and the backend requests it caused."""
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            completion = await client.chat.completions.create(
                **{"model": "fake-model", "messages": MESSAGES, **fields}
            )
    return completion, [seen.body for seen in backend.requests]


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in names}


async def test_general_parameters_reach_each_backend_call(tmp_path: Path) -> None:
    _, bodies = await complete([BASH, SUBMIT], tmp_path, **EVERY_CALL)
    expected = {**without(EVERY_CALL, "extra_body"), **EVERY_CALL["extra_body"]}
    sent = [without(body, "messages", "tools", "stream_options") for body in bodies]
    assert sent == [{"model": "fake-model", **expected, "stream": True}] * 2


async def test_answer_parameters_reach_only_the_final_call(tmp_path: Path) -> None:
    script = [BASH, SUBMIT, text_reply("42")]
    _, bodies = await complete(script, tmp_path, **VISIBLE_ANSWER)
    sent = [without(body, "messages", "tools", "stream_options") for body in bodies]
    every_call = {"model": "fake-model", "stream": True}
    # Each turn may end in the answer, and needs room for reasoning and tool arguments.
    every_call |= {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4096}
    assert sent == [every_call, every_call, {**VISIBLE_ANSWER, **every_call}]
    assert ["tools" in body for body in bodies] == [True, True, False]


async def test_guided_json_is_sent_as_guided_json_and_as_structured_outputs_in_the_final_call(
    tmp_path: Path,
) -> None:
    schema = {"type": "object"}
    script = [SUBMIT, text_reply(NUMBER)]
    completion, bodies = await complete(script, tmp_path, extra_body={"guided_json": schema})
    assert completion.choices[0].message.content == NUMBER
    assert "guided_json" not in bodies[0]
    assert (bodies[1]["guided_json"], bodies[1]["structured_outputs"]) == (schema, {"json": schema})


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}},
        {"functions": [FUNCTION], "function_call": "none"},
        {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}},
    ],
)
async def test_request_for_a_single_model_call_is_relayed_without_a_sandbox(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    completion, (body,) = await complete([text_reply("Hi.")], tmp_path, **fields)
    sent = {**without(fields, "extra_body"), **fields.get("extra_body", {})}
    assert body == {"model": "fake-model", "messages": MESSAGES, **sent}
    assert "sandbox" not in (completion.model_extra or {})


# The form of the answer


async def test_parsed_answer_has_the_requested_class(tmp_path: Path) -> None:
    """The backend ignores `response_format`, as some do."""
    script = [SUBMIT, text_reply("It is 42."), text_reply(f"```json\n{NUMBER}\n```")]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            completion = await client.chat.completions.parse(
                model="fake-model", messages=MESSAGES, response_format=Number
            )
    assert completion.choices[0].message.parsed == Number(n=42)
    first, second, third = (seen.body for seen in backend.requests)
    assert "response_format" not in first
    assert second["response_format"]["json_schema"]["strict"] is True
    assert third["response_format"] == second["response_format"]


async def test_answer_that_violates_its_schema_is_not_parsed(tmp_path: Path) -> None:
    script = [SUBMIT, text_reply("It is 42."), text_reply('{"n": "42!"}')]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30), pytest.raises(LengthFinishReasonError) as caught:
            await client.chat.completions.parse(
                model="fake-model", messages=MESSAGES, response_format=Number
            )
    completion = caught.value.completion
    assert completion.choices[0].message.content == '{"n": "42!"}'
    (warning,) = (completion.model_extra or {})["sandbox"]["warnings"]
    assert warning["code"] == "response_format_violated"
    assert '"42!" is not of type "integer"' in warning["message"]


async def test_answer_that_is_checked_against_a_schema_is_streamed_in_pieces(
    tmp_path: Path,
) -> None:
    pieces = ['{"n"', ": 4", "2}"]
    answer = Frames(frames(*(chunk({"content": piece}) for piece in pieces), chunk({}, "stop")))
    async with (
        scripted_backend([SUBMIT, text_reply("It is 42."), answer]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            stream = await client.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                response_format={"type": "json_object"},
                stream=True,
            )
            heard = [piece.choices[0].delta.content async for piece in stream]
    assert [piece for piece in heard if piece] == pieces


@pytest.mark.parametrize("stream", [False, True])
async def test_model_refusal_reaches_the_client(stream: bool, tmp_path: Path) -> None:
    refusal = {"message": {"role": "assistant", "content": None, "refusal": "I will not."}}
    async with (
        scripted_backend([refusal]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        body: dict[str, Any] = {
            "model": "fake-model",
            "messages": MESSAGES,
            "response_format": Number,
        }
        with anyio.fail_after(30):
            if stream:
                async with client.chat.completions.stream(**body) as events:
                    completion = await events.get_final_completion()
            else:
                completion = await client.chat.completions.parse(**body)
    message = completion.choices[0].message
    assert (message.refusal, message.parsed, message.content or None) == ("I will not.", None, None)
    assert len(backend.requests) == 1


# The deprecated functions


async def test_legacy_function_call_reaches_the_client_and_its_result_reaches_the_model(
    tmp_path: Path,
) -> None:
    script = [tool_reply(call("lookup", key="x")), text_reply("It is 7.")]
    fields = {"functions": [FUNCTION], "function_call": {"name": "lookup"}}
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            body: dict[str, Any] = {"model": "fake-model", **fields}
            first = await client.chat.completions.create(**body, messages=MESSAGES)
            (choice,) = first.choices
            called = choice.message.function_call
            assert called is not None
            result = {"role": "function", "name": called.name, "content": "7"}
            said = choice.message.model_dump(include={"role", "content", "function_call"})
            second = await client.chat.completions.create(
                **body, messages=[*MESSAGES, said, result]
            )
    assert (choice.finish_reason, choice.message.tool_calls) == ("function_call", None)
    assert (called.name, called.arguments) == ("lookup", '{"key": "x"}')
    assert second.choices[0].message.content == "It is 7."
    before, after = (seen.body for seen in backend.requests)
    assert before["tools"][-1] == {"type": "function", "function": FUNCTION}
    assert before["tool_choice"] == {"type": "function", "function": {"name": "lookup"}}
    assert not {"functions", "function_call"} & before.keys()
    assert [message["role"] for message in after["messages"]][-2:] == ["assistant", "tool"]


async def test_legacy_function_call_is_streamed(tmp_path: Path) -> None:
    async with (
        scripted_backend([tool_reply(call("lookup", key="x"))]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        with anyio.fail_after(30):
            stream = await client.chat.completions.create(
                model="fake-model", messages=MESSAGES, functions=[FUNCTION], stream=True
            )
            choices = [piece.choices[0] async for piece in stream]
    (called,) = [choice.delta.function_call for choice in choices if choice.delta.function_call]
    assert (called.name, called.arguments) == ("lookup", '{"key": "x"}')
    assert (choices[-1].finish_reason, choices[-1].delta.tool_calls) == ("function_call", None)


async def test_token_ids_of_an_answer_truncated_at_max_tokens_are_kept(tmp_path: Path) -> None:
    pieces = frames(
        {**chunk({"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2]},
        *[chunk({"content": f"{word} "}, token_ids=[word]) for word in range(5)],
        {**chunk({}, "length"), "system_fingerprint": "vllm-1"},
        "[DONE]",
    )
    fields = {"max_tokens": 3, "extra_body": {"return_token_ids": True}}
    completion, bodies = await complete([Frames(pieces), Frames(pieces)], tmp_path, **fields)
    choice = completion.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("0 1 2 ", "length")
    assert (choice.token_ids, completion.prompt_token_ids) == ([0, 1, 2], [1, 2])
    assert bodies[-1]["return_token_ids"] is True
