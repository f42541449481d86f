"""Streaming of client tool calls while the model writes them, in each API."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from policies.profile import Profile
from policies.redaction import Redaction
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.clients.openai_errors import MESSAGES, openai_client
from tests.fakes.backend import Frames, Held, Item, ScriptedBackend, chunk, frames, scripted_backend
from tests.fakes.server import running_proxy

TEXT = "a line of the file that the client is to write, " * 5
ARGUMENTS = {"path": "notes.txt", "text": TEXT}
ARGUMENTS_JSON = json.dumps(ARGUMENTS)
WRITE = call("write_file", **ARGUMENTS)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTION = {"name": "write_file", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}
LOOKUP: Any = {"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}
MODEL = {"model": "fake-model", "stream": True}
CHAT = {**MODEL, "messages": MESSAGES, "tools": [TOOL, LOOKUP]}
Frame = dict[str, Any]


def chat_piece(frame: Frame) -> str:
    calls = frame["choices"][0]["delta"].get("tool_calls") if frame.get("choices") else None
    return calls[0]["function"]["arguments"] if calls else ""


def responses_piece(frame: Frame) -> str:
    is_piece = frame["type"] == "response.function_call_arguments.delta"
    return frame["delta"] if is_piece else ""


def messages_piece(frame: Frame) -> str:
    is_piece = frame["type"] == "content_block_delta"
    return frame["delta"].get("partial_json", "") if is_piece else ""


APIS: Sequence[tuple[str, dict[str, Any], Callable[[Frame], str]]] = [
    ("/v1/chat/completions", CHAT, chat_piece),
    (
        "/v1/responses",
        {**MODEL, "input": "?", "tools": [TOOL["function"] | {"type": "function"}]},
        responses_piece,
    ),
    (
        "/v1/messages",
        {
            **MODEL,
            "max_tokens": 1000,
            "messages": MESSAGES,
            "tools": [{"name": "write_file", "input_schema": SCHEMA}],
        },
        messages_piece,
    ),
]
every_api = pytest.mark.parametrize(
    ("path", "body", "arguments_delta"), APIS, ids=["chat", "responses", "messages"]
)


@asynccontextmanager
async def serve_script(
    script: Sequence[Item], state_dir: Path, **changes: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedBackend]]:
    with anyio.fail_after(20):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", state_dir, **changes) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            yield http, backend


async def frames_of(
    http: httpx.AsyncClient, path: str, body: Mapping[str, Any], **headers: str
) -> AsyncIterator[Frame]:
    async with http.stream("POST", path, json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def stream_chat(http: httpx.AsyncClient, **body: Any) -> list[Frame]:
    return [frame async for frame in frames_of(http, APIS[0][0], {**CHAT, **body})]


def sent_calls(found: Sequence[Frame], choice: int = 0) -> dict[int, Frame]:
    """Return the calls assembled from the chunks of a choice, by index."""
    made: dict[int, Frame] = {}
    for frame in found:
        for each in frame.get("choices", ()):
            if each["index"] == choice:
                for piece in each["delta"].get("tool_calls", ()):
                    merge_piece(made.setdefault(piece["index"], {}), piece)
    return made


def merge_piece(made: Frame, piece: Frame) -> None:
    function = made.setdefault("function", {"arguments": ""})
    given = piece.get("function", {})
    function["arguments"] += given.get("arguments", "")
    function |= {key: value for key, value in given.items() if key != "arguments"}
    made |= {key: value for key, value in piece.items() if key not in ("function", "index")}


def argument_deltas(found: Sequence[Frame]) -> list[str]:
    return [piece for frame in found if (piece := chat_piece(frame))]


def finish_reasons(found: Sequence[Frame]) -> tuple[str, str]:
    """Return the finish reason and the stop reason."""
    return found[-1]["choices"][0]["finish_reason"], found[-1]["sandbox"]["stop_reason"]


@every_api
async def test_client_tool_call_arrives_while_the_model_writes_it(
    path: str, body: dict[str, Any], arguments_delta: Callable[[Frame], str], tmp_path: Path
) -> None:
    release = asyncio.Event()
    pieces: list[str] = []
    held = Held(tool_reply(WRITE), release, after_pieces=6)
    async with serve_script([held], tmp_path) as (http, _):
        async for frame in frames_of(http, path, body):
            if piece := arguments_delta(frame):
                pieces.append(piece)
            if len(pieces) == 4:
                release.set()  # the backend sends the rest only after these arrived
    assert len(pieces) >= 20
    assert "".join(pieces) == ARGUMENTS_JSON


async def test_streamed_call_has_the_id_name_and_arguments_of_an_unstreamed_call(
    tmp_path: Path,
) -> None:
    async with serve_script([tool_reply(WRITE)] * 2, tmp_path) as (http, _):
        found = await stream_chat(http)
        whole = (await http.post(APIS[0][0], json={**CHAT, "stream": False})).json()
    run_id = found[-1]["sandbox"]["run_id"]
    first = next(frame for frame in found if "tool_calls" in frame["choices"][0]["delta"])
    assert first["choices"][0]["delta"]["tool_calls"] == [
        {
            "index": 0,
            "id": f"call_{run_id}_1",
            "type": "function",
            "function": {"name": "write_file", "arguments": ""},
        }
    ]
    (expected,) = whole["choices"][0]["message"]["tool_calls"]
    assert sent_calls(found) == {0: {**expected, "id": f"call_{run_id}_1"}}
    assert finish_reasons(found) == ("tool_calls", "client_tool_calls")


async def test_sdk_stream_helper_assembles_a_tool_call_of_the_chat_api(tmp_path: Path) -> None:
    async with (
        serve_script([tool_reply(WRITE), text_reply("Written.")], tmp_path) as (http, backend),
        openai_client(str(http.base_url).rstrip("/")) as client,
    ):
        asked: Any = {"model": "fake-model", "tools": [TOOL]}
        async with client.chat.completions.stream(messages=MESSAGES, **asked) as stream:
            kinds = [event.type async for event in stream]
            completion = await stream.get_final_completion()
        message = completion.choices[0].message
        (made,) = message.tool_calls or ()
        result: Any = {"role": "tool", "tool_call_id": made.id, "content": "ok"}
        back: Any = {"role": "assistant", "tool_calls": [made.model_dump(exclude={"index"})]}
        second = await client.chat.completions.create(messages=[*MESSAGES, back, result], **asked)
    assert kinds.count("tool_calls.function.arguments.delta") >= 20
    assert json.loads(made.function.arguments) == ARGUMENTS
    assert second.choices[0].message.content == "Written."
    messages = backend.requests[1].body["messages"]
    assert [message["role"] for message in messages[-3:]] == ["user", "assistant", "tool"]
    assert messages[-2]["tool_calls"][0]["id"] == messages[-1]["tool_call_id"] == "call_0_0"


async def test_sdk_stream_helper_assembles_a_tool_call_of_the_responses_api(tmp_path: Path) -> None:
    async with (
        serve_script([tool_reply(WRITE), text_reply("Written.")], tmp_path) as (http, _),
        openai_client(str(http.base_url).rstrip("/")) as client,
    ):
        tools: Any = APIS[1][1]["tools"]
        asked: Any = {"model": "fake-model", "tools": tools}
        async with client.responses.stream(input="?", **asked) as stream:
            events = [event async for event in stream]
            response = await stream.get_final_response()
        (made,) = response.output
        assert made.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "ok"}
        second = await client.responses.create(
            input=[result], previous_response_id=response.id, **asked
        )
    kinds = [event.type for event in events]
    pieces = [k for k in kinds if k == "response.function_call_arguments.delta"]
    assert len(pieces) >= 20
    assert kinds[2:] == [
        "response.output_item.added",
        *pieces,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert (made.status, json.loads(made.arguments)) == ("completed", ARGUMENTS)
    assert second.output_text == "Written."


async def test_tool_call_in_a_messages_stream_follows_the_text_block(tmp_path: Path) -> None:
    path, body, _ = APIS[2]
    script = [tool_reply(WRITE, content="I write it.")]
    async with serve_script(script, tmp_path) as (http, _):
        found = [frame async for frame in frames_of(http, path, body)]
    started = [f["content_block"] for f in found if f["type"] == "content_block_start"]
    stopped = [f["index"] for f in found if f["type"] == "content_block_stop"]
    call_id = started[1]["id"]
    assert started == [
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": call_id, "name": "write_file", "input": {}},
    ]
    assert stopped == [0, 1]
    assert json.loads("".join(map(messages_piece, found))) == ARGUMENTS
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


async def test_streamed_prose_is_followed_by_a_blank_line_before_the_call(tmp_path: Path) -> None:
    prose = "I shall write down what was asked for, line by line, into one file. " * 3
    async with serve_script([tool_reply(WRITE, content=prose)], tmp_path) as (http, _):
        found = await stream_chat(http)
    deltas = [frame["choices"][0]["delta"] for frame in found]
    called = next(at for at, delta in enumerate(deltas) if "tool_calls" in delta)
    assert "".join(delta.get("content", "") for delta in deltas[:called]) == f"{prose}\n\n"
    assert not any("content" in delta for delta in deltas[called:])


async def test_parallel_calls_are_sent_one_after_the_other(tmp_path: Path) -> None:
    both = tool_reply(WRITE, call("lookup", key="x"))
    async with serve_script([both], tmp_path) as (http, _):
        found = await stream_chat(http)
    run_id = found[-1]["sandbox"]["run_id"]
    made = sent_calls(found)
    assert [made[n]["id"] for n in (0, 1)] == [f"call_{run_id}_1", f"call_{run_id}_2"]
    assert [made[n]["function"]["arguments"] for n in (0, 1)] == [ARGUMENTS_JSON, '{"key": "x"}']
    assert len(argument_deltas(found)) > 20


def opening(index: int, name: str, arguments: str = "") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": f"t{index}", "type": "function", "function": function}


def continuation(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments}}


def call_chunks(*calls: dict[str, Any]) -> list[bytes]:
    """Return a reply with one chunk for each piece of a call."""
    return frames(*(chunk({"tool_calls": [each]}) for each in calls))


END = frames(chunk({}, "tool_calls"), "[DONE]")


async def test_client_calls_in_a_turn_without_sandbox_tools_are_sent_once_beside_an_unknown_call(
    tmp_path: Path,
) -> None:
    unknown, lookup = call("no_such_tool", x=1), call("lookup", word="a")
    script = [tool_reply(unknown), tool_reply(unknown), tool_reply(unknown, WRITE, lookup)]
    async with serve_script(script, tmp_path) as (http, backend):
        found = await stream_chat(http)
    assert "execute_bash" not in json.dumps(backend.requests[2].body["tools"])
    functions = [made["function"] for made in sent_calls(found).values()]
    assert [function["name"] for function in functions] == ["write_file", "lookup"]
    assert [json.loads(function["arguments"]) for function in functions] == [
        ARGUMENTS,
        {"word": "a"},
    ]


@every_api
async def test_client_tool_calls_with_interleaved_pieces_arrive_complete(
    path: str, body: dict[str, Any], arguments_delta: Callable[[Frame], str], tmp_path: Path
) -> None:
    mixed = call_chunks(
        opening(0, "write_file", '{"a": '),
        opening(1, "write_file", '{"b": '),
        continuation(0, "1}"),
        continuation(1, "2}"),
    )
    async with serve_script([Frames([*mixed, *END])], tmp_path) as (http, _):
        found = [frame async for frame in frames_of(http, path, body)]
    assert [piece for frame in found if (piece := arguments_delta(frame))] == [
        *('{"a": ', "1}", '{"b": 2}')
    ]


async def test_client_call_beside_a_sandbox_call_is_streamed_and_the_sandbox_call_runs(
    tmp_path: Path,
) -> None:
    bash = call("execute_bash", command="echo hello")
    async with serve_script([tool_reply(WRITE, bash), tool_reply(bash, WRITE)], tmp_path) as (
        http,
        _,
    ):
        theirs_first, ours_first = await stream_chat(http), await stream_chat(http)
    for found in (theirs_first, ours_first):
        assert sent_calls(found)[0]["function"]["arguments"] == ARGUMENTS_JSON
        assert len(argument_deltas(found)) > 20
        assert "hello" in "".join(
            frame["choices"][0]["delta"].get("reasoning", "") for frame in found
        )
        assert finish_reasons(found) == ("tool_calls", "client_tool_calls")


async def test_submit_call_after_a_streamed_client_call_is_not_run(tmp_path: Path) -> None:
    both = tool_reply(WRITE, call("submit", answer="Done."))
    async with serve_script([both, text_reply("Now it is done.")], tmp_path) as (http, backend):
        found = await stream_chat(http)
        made = sent_calls(found)[0]
        result = {"role": "tool", "tool_call_id": made["id"], "content": "ok"}
        back = {"role": "assistant", "tool_calls": [made]}
        second = await stream_chat(http, messages=[*MESSAGES, back, result])
    assert finish_reasons(found) == ("tool_calls", "client_tool_calls")
    assert second[-1]["choices"][0]["finish_reason"] == "stop"
    observations = {
        m["tool_call_id"]: m["content"] for m in backend.requests[1].body["messages"][-2:]
    }
    assert observations["call_0_0"] == "ok"
    assert observations["call_0_1"].startswith("Not run: other tools were called beside it.")


async def test_client_tool_call_after_a_submit_call_is_not_sent(tmp_path: Path) -> None:
    both = tool_reply(call("submit", answer="Done."), WRITE)
    async with serve_script([both], tmp_path) as (http, _):
        found = await stream_chat(http)
    assert sent_calls(found) == {}
    assert finish_reasons(found) == ("stop", "submitted")


async def test_extra_fields_of_a_client_tool_call_are_kept(tmp_path: Path) -> None:
    signed = {**opening(0, "write_file", ARGUMENTS_JSON), "extra_content": {"signature": "abc"}}
    async with serve_script([Frames([*call_chunks(signed), *END])], tmp_path) as (http, _):
        found = await stream_chat(http)
    assert sent_calls(found)[0]["extra_content"] == {"signature": "abc"}
    assert sent_calls(found)[0]["function"]["arguments"] == ARGUMENTS_JSON


async def test_client_tool_calls_of_each_choice_are_streamed(tmp_path: Path) -> None:
    async with serve_script([tool_reply(WRITE)] * 2, tmp_path) as (http, _):
        found = await stream_chat(http, n=2)
    for choice in (0, 1):
        (made,) = sent_calls(found, choice).values()
        assert made["function"]["arguments"] == ARGUMENTS_JSON


async def test_client_tool_call_is_sent_in_one_piece_when_redaction_is_on(tmp_path: Path) -> None:
    profiles = Profiles.only(Profile(redaction=Redaction(detectors=frozenset({"all"}))))
    async with serve_script([tool_reply(WRITE)], tmp_path, profiles=profiles) as (http, _):
        found = await stream_chat(http)
    assert argument_deltas(found) == [ARGUMENTS_JSON]


# What breaks off


@every_api
async def test_reply_truncated_inside_a_call_fails_without_a_retry(
    path: str, body: dict[str, Any], arguments_delta: Callable[[Frame], str], tmp_path: Path
) -> None:
    begun = call_chunks(opening(0, "write_file"), continuation(0, '{"path": "no'))
    async with serve_script([Frames(begun, cut=True)], tmp_path) as (http, backend):
        found = [frame async for frame in frames_of(http, path, body)]
    assert "".join(map(arguments_delta, [f for f in found if "error" not in f])) == '{"path": "no'
    assert len(backend.requests) == 1
    assert any("error" in frame for frame in found[-2:])


async def test_deadline_during_a_streamed_call_ends_the_call_as_truncated(tmp_path: Path) -> None:
    begun = Frames([*call_chunks(opening(0, "write_file"), continuation(0, '{"path": "no')), *END])
    script = [Held(begun, asyncio.Event(), after_pieces=2)] * 3

    async def heard(path: str, body: dict[str, Any]) -> list[Frame]:
        headers = {"X-Sandbox-Deadline": "2"}
        return [frame async for frame in frames_of(http, path, body, **headers)]

    async with serve_script(script, tmp_path) as (http, backend):
        found = await asyncio.gather(*(heard(path, body) for path, body, _ in APIS))
    in_chat, in_responses, in_messages = found
    assert finish_reasons(in_chat) == ("length", "deadline")
    assert argument_deltas(in_chat) == ['{"path": "no']
    response = in_responses[-1]["response"]
    assert (response["status"], in_responses[-1]["type"]) == ("incomplete", "response.incomplete")
    (item,) = response["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert in_messages[-2]["delta"]["stop_reason"] == "max_tokens"
    assert in_messages[-3] == {"type": "content_block_stop", "index": 0}
    assert len(backend.requests) == 3


async def test_sdk_raises_the_backend_error_that_ended_a_streamed_tool_call(tmp_path: Path) -> None:
    broken = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}
    begun = call_chunks(opening(0, "write_file"), continuation(0, '{"path": "no'))
    async with (
        serve_script([Frames([*begun, *frames(broken, "[DONE]")])], tmp_path) as (http, _),
        openai_client(str(http.base_url).rstrip("/")) as client,
    ):
        asked: Any = {"model": "fake-model", "messages": MESSAGES, "tools": [TOOL]}
        with pytest.raises(openai.APIError, match="engine died"):
            async with client.chat.completions.stream(**asked) as stream:
                await stream.until_done()
