"""Answers of POST /v1/messages, streamed or not."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.sessions import container_id
from proxy.api.dependencies import owner_of
from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.messages_http import BODY, CODE_EXECUTION, PATH, events, messages_client, texts
from tests.fakes.backend import Frames, Held, Refusal, chunk, frames, scripted_backend
from tests.fakes.server import running_proxy

COMMAND = "printf 'GIF89a;' > output/dot.gif; echo made; echo oh >&2"
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
SCRIPT: list[Any] = [
    {
        "reasoning": "A dot.",
        "tool_calls": [call("execute_bash", command=COMMAND)],
        "usage": USAGE,
    },
    tool_reply(call("str_replace_editor", command="create", path="a.txt", file_text="a\n")),
    {"tool_calls": [call("submit", answer="See /testbed/output/dot.gif")], "usage": USAGE},
]
REASONING = f"A dot.\n````console\n$ {COMMAND}\nmade\noh\n[exit 0, "


def start(index: int, block: Any) -> Any:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, field: str, text: str) -> Any:
    return {
        "type": "content_block_delta",
        "index": index,
        "delta": {"type": kind, field: text},
    }


def stop(index: int) -> Any:
    return {"type": "content_block_stop", "index": index}


def server_tool_use(id: str, name: str, **given: Any) -> Any:
    return {"type": "server_tool_use", "id": id, "name": name, "input": given}


def bash_result(id: str, stdout: str, stderr: str, *outputs: Any) -> Any:
    result = {"stdout": stdout, "stderr": stderr, "return_code": 0, "content": list(outputs)}
    return {
        "type": "bash_code_execution_tool_result",
        "tool_use_id": id,
        "content": {"type": "bash_code_execution_result", **result},
    }


def editor_result(id: str, words: str) -> Any:
    lines = dict.fromkeys(("num_lines", "start_line", "total_lines"))
    kind = "text_editor_code_execution_view_result"
    return {
        "type": "text_editor_code_execution_tool_result",
        "tool_use_id": id,
        "content": {"type": kind, "file_type": "text", "content": words, **lines},
    }


def message_start(run_id: str) -> Any:
    """Return the `message_start` event, with zero usage."""
    usage = {
        "input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0,
        "service_tier": "standard",
    }
    message = {
        "id": f"msg_{run_id}",
        "type": "message",
        "role": "assistant",
        "model": "fake-model",
        "content": [],
        "container": None,
        **dict.fromkeys(("stop_reason", "stop_sequence", "stop_details")),
        "usage": usage,
    }
    return {"type": "message_start", "message": message}


async def test_answer_is_one_text_block_with_links_to_its_files(
    tmp_path: Path,
) -> None:
    async with messages_client(SCRIPT, tmp_path) as client:
        response = await client.ask()
        message = response.json()
        (file,) = message["sandbox"]["files"]
        opened = await client.http.get(file["url"])
    run_id = response.headers["x-sandbox-run"]
    usage, sandbox = message.pop("usage"), message.pop("sandbox")
    assert message == {
        "id": f"msg_{run_id}",
        "type": "message",
        "role": "assistant",
        "model": "fake-model",
        "content": [{"type": "text", "text": f"See [dot.gif]({file['url']})"}],
        "container": None,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
    }
    assert response.headers["request-id"] == f"req_{run_id}"
    assert opened.content == b"GIF89a;"
    assert sandbox["stop_reason"] == "submitted"
    assert usage.pop("sandbox")["llm_calls"] == 3
    calls = usage.pop("iterations")
    assert [each["type"] for each in calls] == ["message"] * 3
    for counted in ("input_tokens", "cache_read_input_tokens", "output_tokens"):
        assert sum(each[counted] for each in calls) == usage[counted]
    assert usage == {
        "input_tokens": 12,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": 10,
        "output_tokens_details": {"thinking_tokens": 4},
        "server_tool_use": None,
        "service_tier": "standard",
    }


async def test_thinking_block_contains_reasoning_and_steps(tmp_path: Path) -> None:
    async with messages_client(SCRIPT, tmp_path) as client:
        message = await client.message(thinking={"type": "enabled", "budget_tokens": 1024})
        hidden = await client.message(thinking={"type": "adaptive", "display": "omitted"})
    thinking, text = message["content"]
    assert text["type"] == "text"
    assert thinking["signature"] == ""
    assert thinking["thinking"].startswith(REASONING)
    assert thinking["thinking"].count("\n[exit 0") == 1
    assert [block["type"] for block in hidden["content"]] == ["text"]


@pytest.mark.parametrize(
    ("steps", "kinds", "expected_reasoning"),
    [
        ("off", ["thinking", "text"], "A dot."),
        ("reasoning", ["thinking", "text"], REASONING),
        ("items", ["thinking", *["server_tool_use", "result"] * 2, "text", "files"], "A dot."),
        ("events", ["thinking", "text"], "A dot."),
    ],
)
async def test_steps_setting_decides_which_blocks_of_a_message_are_shown(
    steps: str, kinds: list[str], expected_reasoning: str, tmp_path: Path
) -> None:
    async with messages_client(SCRIPT, tmp_path) as client:
        asked = {"sandbox": {"steps": steps}, "thinking": {"type": "adaptive"}}
        message = await client.message(**asked)
    found = [block["type"] for block in message["content"]]
    if found[-2:] == ["server_tool_use", "bash_code_execution_tool_result"]:
        found[-2:] = ["files"]
    assert ["result" if kind.endswith("_tool_result") else kind for kind in found] == kinds
    assert message["content"][0]["thinking"].startswith(expected_reasoning)
    text = [step["kind"] for step in message["sandbox"].get("events", [])]
    assert ("tool_start" in text) == (steps == "events")


@pytest.mark.parametrize("version", ["20250522", "20250825", "20260521"])
async def test_each_code_execution_version_gives_the_request_a_sandbox(
    version: str, tmp_path: Path
) -> None:
    async with messages_client([text_reply("Hello.")], tmp_path) as client:
        message = await client.message(
            tools=[{**CODE_EXECUTION, "type": f"code_execution_{version}"}]
        )
    assert message["container"]["id"]
    assert "code_execution" not in str(client.last_request["tools"])


async def test_code_execution_returns_step_blocks_and_the_container(
    tmp_path: Path,
) -> None:
    async with messages_client(SCRIPT, tmp_path) as client:
        message = await client.message(tools=[CODE_EXECUTION])
    run_id = message["sandbox"]["run_id"]
    (file,) = message["sandbox"]["files"]
    ids = [f"srvtoolu_{run_id}_{step}" for step in (1, 2, "files")]
    editing = {"command": "create", "path": "a.txt", "file_text": "a\n"}
    output = {"type": "bash_code_execution_output", "file_id": file["id"]}
    assert message["content"] == [
        server_tool_use(ids[0], "bash_code_execution", command=COMMAND),
        bash_result(ids[0], "made\n", "oh\n"),
        server_tool_use(ids[1], "text_editor_code_execution", **editing),
        editor_result(ids[1], "Created /testbed/a.txt (2 bytes, 1 lines)."),
        {"type": "text", "text": f"See [dot.gif]({file['url']})"},
        server_tool_use(ids[2], "bash_code_execution", command="find /testbed/output -type f"),
        bash_result(ids[2], "/testbed/output/dot.gif\n", "", output),
    ]
    container = message["container"]
    assert container.pop("expires_at").endswith("Z")
    assert container == {"id": container_id(owner_of(""), run_id), "skills": None}


async def test_command_that_never_ran_has_return_code_minus_one(tmp_path: Path) -> None:
    script: list[Any] = [tool_reply(call("execute_bash", command="  ")), text_reply("Well.")]
    async with messages_client(script, tmp_path) as client:
        message = await client.message(tools=[CODE_EXECUTION])
    result = message["content"][1]["content"]
    assert result["return_code"] == -1
    assert "the command is empty" in result["stderr"]


async def test_lone_surrogate_in_a_command_is_replaced(tmp_path: Path) -> None:
    script: list[Any] = [tool_reply(call("execute_bash", command="echo \ud83d")), text_reply("!")]
    async with messages_client(script, tmp_path) as client:
        message = await client.message(tools=[CODE_EXECUTION])
        response = await client.ask(stream=True, tools=[CODE_EXECUTION])
    assert message["content"][0]["input"] == {"command": "echo ?"}
    assert "\\ud83d" not in response.text


async def test_streamed_events_add_up_to_the_message(
    tmp_path: Path,
) -> None:
    async with messages_client(SCRIPT, tmp_path) as client:
        response = await client.ask(
            stream=True, tools=[CODE_EXECUTION], thinking={"type": "adaptive"}
        )
    found = events(response)
    run_id = response.headers["x-sandbox-run"]
    end = found[-2]
    url = end["sandbox"]["files"][0]["url"]
    assert found[0] == message_start(run_id)
    written = json.dumps({"command": COMMAND})
    assert found[1:7] == [
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking_delta", "thinking", "A dot."),
        stop(0),
        start(1, server_tool_use(f"srvtoolu_{run_id}_1", "bash_code_execution")),
        delta(1, "input_json_delta", "partial_json", written),
        stop(1),
    ]
    text = next(
        event["index"]
        for event in found
        if event.get("content_block") == {"type": "text", "text": ""}
    )
    said = [e["delta"]["text"] for e in found if e.get("index") == text and "delta" in e]
    assert "".join(said) == f"See [dot.gif]({url})"
    assert end["type"] == "message_delta"
    assert end["delta"]["stop_reason"] == "end_turn"
    assert end["delta"]["container"]["id"] == response.headers["x-sandbox-container"]
    assert end["usage"]["output_tokens"] == 10
    assert found[-1] == {"type": "message_stop"}


async def test_streamed_blocks_do_not_overlap(
    tmp_path: Path,
) -> None:
    async with messages_client(SCRIPT, tmp_path) as client:
        response = await client.ask(
            stream=True, tools=[CODE_EXECUTION], thinking={"type": "adaptive"}
        )
    open_block, last = None, -1
    for event in events(response)[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (None, last + 1)
                open_block = last = event["index"]
            case "content_block_delta":
                assert event["index"] == open_block
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
    assert open_block is None


async def test_step_events_are_sent_in_pings(tmp_path: Path) -> None:
    async with messages_client(SCRIPT, tmp_path) as client:
        response = await client.ask(stream=True, sandbox={"steps": "events"})
    pings = [event for event in events(response) if event["type"] == "ping"]
    kinds = [ping["sandbox"]["kind"] for ping in pings]
    assert kinds[:4] == ["run_started", "tool_start", "tool_output", "tool_output"]
    assert kinds[-1] == "run_finished"


async def test_silent_messages_stream_sends_pings(tmp_path: Path) -> None:
    speak = asyncio.Event()
    async with (
        scripted_backend([Held(text_reply("Done."), speak)]) as backend,
        running_proxy(backend, "memory", tmp_path, keep_alive_s=0.02) as url,
        httpx.AsyncClient() as client,
    ):
        with anyio.fail_after(10):
            asked = {**BODY, "stream": True}
            async with client.stream("POST", f"{url}{PATH}", json=asked) as answer:
                lines = answer.aiter_lines()
                first = [await anext(lines) for _ in range(6)]
                speak.set()
                rest = [line async for line in lines]
    assert first[0] == "event: message_start"
    assert first[3:] == ["event: ping", 'data: {"type": "ping"}', ""]
    assert "event: message_stop" in rest


async def test_error_during_a_stream_closes_the_open_block(
    tmp_path: Path,
) -> None:
    broken = {"error": {"message": "engine died", "type": "InternalServerError", "code": 500}}
    script: list[Any] = [Frames(frames(chunk({"reasoning": "Let me see."}), broken, "[DONE]"))]
    async with messages_client(script, tmp_path) as client:
        response = await client.ask(stream=True, thinking={"type": "adaptive"})
    name = response.headers["request-id"]
    assert events(response)[2:] == [
        delta(0, "thinking_delta", "thinking", "Let me see."),
        stop(0),
        {
            "type": "error",
            "error": {"type": "api_error", "message": "engine died"},
            "request_id": name,
        },
    ]


async def test_failure_after_the_status_line_of_an_unstreamed_answer_sends_an_anthropic_error_body(
    tmp_path: Path,
) -> None:
    speak = asyncio.Event()
    async with (
        scripted_backend([Held(Frames([]), speak), Refusal(400, "no such thing")]) as backend,
        running_proxy(backend, "memory", tmp_path, nonstream_keep_alive_s=0.02) as url,
        httpx.AsyncClient() as client,
    ):
        with anyio.fail_after(10):
            async with client.stream("POST", f"{url}{PATH}", json=BODY) as answer:
                speak.set()
                text = (await answer.aread()).decode()
    assert text.lstrip().startswith('{"type": "error", "error": {"type": "')


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (text_reply("Well."), "end_turn", None),
        ({"content": "We", "finish_reason": "length"}, "max_tokens", None),
        ({"content": "", "message": {"role": "assistant", "refusal": "No."}}, "refusal", None),
        ({"content": "We", "finish_reason": "content_filter"}, "refusal", None),
    ],
)
async def test_finish_reason_becomes_the_anthropic_stop_reason(
    reply: Any, reason: str, sequence: str | None, tmp_path: Path
) -> None:
    async with messages_client([reply, reply, reply], tmp_path) as client:
        message = await client.message()
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_model_refusal_becomes_a_text_block_with_stop_details(tmp_path: Path) -> None:
    script: list[Any] = [{"message": {"role": "assistant", "content": None, "refusal": "No."}}]
    async with messages_client(script, tmp_path) as client:
        message = await client.message()
    assert texts(message) == ["No."]
    assert message["stop_details"] == {"type": "refusal", "category": None, "explanation": "No."}


async def test_stop_sequence_is_reported(tmp_path: Path) -> None:
    async with messages_client([text_reply("One Two")], tmp_path) as client:
        response = await client.ask(stream=True, stop_sequences=["Two"])
    assert "stop" not in client.last_request  # a stop sequence could also end a call's arguments
    assert events(response)[-2]["delta"]["stop_reason"] == "stop_sequence"
    assert events(response)[-2]["delta"]["stop_sequence"] == "Two"
