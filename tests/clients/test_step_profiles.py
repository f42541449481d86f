"""Each `steps` setting, as the openai SDK, a reader of raw events and Open WebUI receive it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from policies.steps import STEPS_MODES
from proxy.models.scripted import call, text_reply, tool_reply
from sandbox_runtime.errors import NoFreeSandboxError
from tests.fakes.backend import ScriptedBackend, by_history, scripted_backend
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.open_webui import OpenWebUI
from tests.fakes.server import make_services, model_client, running_proxy, serve

COMMAND = "printf 'a\\nb\\n'; printf 'n\\n1\\n' > output/t.csv"
SCRIPT = [
    {"reasoning": "Two letters.", "tool_calls": [call("execute_bash", command=COMMAND)]},
    {"tool_calls": [call("submit", answer="They are a and b.")]},
]
MESSAGES: list[Any] = [{"role": "user", "content": "Letters, please."}]
OBSERVED = "Exit code: 0\n[stdout]\na\nb"
ARGUMENTS = {"command": COMMAND}
OPEN_WEBUI = {"X-OpenWebUI-Chat-Id": "c1"}
Json = dict[str, Any]


@pytest.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    with anyio.fail_after(20):
        async with scripted_backend(by_history(SCRIPT)) as running:
            yield running


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def post(url: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        asked = {"model": "fake-model", "messages": MESSAGES, **body}
        return await client.post(f"{url}/v1/chat/completions", json=asked, headers=headers)


def parse_events(text: str) -> list[tuple[str, Any]]:
    """Return name and data of each event; the last one must be `[DONE]`."""
    *events, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    found = []
    for event in events:
        head, _, data = event.rpartition("data: ")
        found.append((head.removeprefix("event: ").strip(), json.loads(data)))
    return found


def read_by_open_webui(text: str) -> OpenWebUI:
    reader = OpenWebUI()
    for name, frame in parse_events(text):
        assert name == ""
        reader.take(frame)
    return reader


# The SDK


@pytest.mark.parametrize("profile", STEPS_MODES)
async def test_sdk_streams_the_same_answer_for_each_value_of_steps(
    profile: str, backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url, openai_client(url) as client:
        stream = await client.chat.completions.create(
            model="fake-model",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"sandbox": {"steps": profile}},
        )
        # This SDK parses each event as a chunk, so step events become empty chunks.
        chunks = [chunk async for chunk in stream if chunk.object == "chat.completion.chunk"]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "They are a and b."
    assert [choice.delta.tool_calls for choice in choices] == [None] * len(choices)
    assert [c.finish_reason for c in choices if c.finish_reason] == ["stop"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("profile", STEPS_MODES)
async def test_sdk_stream_helper_accepts_each_steps_setting(
    profile: str, backend: ScriptedBackend, tmp_path: Path
) -> None:
    asked: Json = {"model": "fake-model", "messages": MESSAGES}
    async with (
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
        client.chat.completions.stream(
            **asked, extra_body={"sandbox": {"steps": profile}}
        ) as stream,
    ):
        completion = await stream.get_final_completion()
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason) == ("They are a and b.", "stop")
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("profile", STEPS_MODES)
async def test_chat_stream_is_well_formed_for_each_value_of_steps(
    profile: str, backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        answer = await post(url, {"X-Sandbox-Steps": profile}, stream=True)
    frames = [frame for name, frame in parse_events(answer.text) if name == ""]
    chunks = [ChatCompletionChunk.model_validate(frame) for frame in frames]
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{answer.headers['x-sandbox-run']}"}
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert not any("tool_calls" in delta for delta in deltas)
    assert not any(delta.get("reasoning") and delta.get("content") for delta in deltas)
    carrying = [f["choices"][0]["delta"] for f in frames[:-1] if "sandbox" in f]
    assert all(carrying)  # some gateways drop empty chunks
    begun = next(n for n, delta in enumerate(deltas) if delta.get("content"))
    assert not any("reasoning" in delta for delta in deltas[begun:])
    assert [f["choices"][0]["finish_reason"] for f in frames] == [None] * (len(frames) - 1) + [
        "stop"
    ]


@pytest.mark.parametrize("profile", STEPS_MODES)
async def test_error_is_the_same_for_all_values_of_steps_if_no_sandbox_is_free(
    profile: str, tmp_path: Path
) -> None:
    sandboxes = MemorySandboxes(failure=NoFreeSandboxError("all are lent", retry_after_s=1.0))
    async with scripted_backend(by_history(SCRIPT)) as backend:
        model = model_client(backend)
        async with (
            serve(make_services(model, sandboxes, tmp_path)) as url,
            openai_client(url) as client,
        ):
            stream = await client.chat.completions.create(
                model="fake-model",
                messages=MESSAGES,
                stream=True,
                extra_body={"sandbox": {"steps": profile}},
            )
            with anyio.fail_after(10), pytest.raises(openai.APIError) as failure:
                async for _ in stream:
                    pass
        await model.aclose()
    assert failure.value.code == "sandbox_unavailable"


# Selection of the steps setting


@pytest.mark.parametrize(
    ("setting", "header", "body", "shown"),
    [
        ("auto", {}, {}, "reasoning"),
        ("auto", OPEN_WEBUI, {}, "items"),
        ("off", OPEN_WEBUI, {}, "off"),
        ("off", {"X-Sandbox-Steps": "events"}, {}, "events"),
        ("off", {"X-Sandbox-Steps": "events"}, {"sandbox": {"steps": "items"}}, "items"),
        ("auto", OPEN_WEBUI, {"sandbox": {"steps": "reasoning"}}, "reasoning"),
    ],
)
async def test_steps_in_the_body_override_the_header_and_the_header_overrides_the_server(
    setting: str,
    header: dict[str, str],
    body: Json,
    shown: str,
    backend: ScriptedBackend,
    tmp_path: Path,
) -> None:
    async with running_proxy(backend, "memory", tmp_path, steps=setting) as url:
        completion = (await post(url, header, **body)).json()
    thinking = completion["choices"][0]["message"]["reasoning"]
    found = [name for name in ("items", "events") if name in completion["sandbox"]]
    if "$ printf" in thinking:
        found.append("reasoning")
    assert (found or ["off"]) == [shown]


@pytest.mark.parametrize("asked", ["auto", "all", 1, ["items"], {"items": True}])
async def test_unknown_steps_setting_is_refused(
    asked: Any, backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        refused = await post(url, sandbox={"steps": asked})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (
        400,
        "sandbox.steps",
        "invalid_value",
    )
    assert backend.requests == []


# Whole answers


async def test_unstreamed_answer_to_open_webui_contains_step_items(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        shown = (await post(url, OPEN_WEBUI)).json()["sandbox"]
    run = shown["run_id"]
    call_id = f"step_{run}_1"
    assert shown["items"] == [
        {
            "type": "function_call",
            "id": f"fc_{run}_1",
            "call_id": call_id,
            "name": "execute_bash",
            "arguments": json.dumps(ARGUMENTS),
            "status": "completed",
        },
        {
            "type": "function_call_output",
            "id": f"fco_{run}_1",
            "call_id": call_id,
            "output": [{"type": "input_text", "text": OBSERVED}],
            "status": "completed",
        },
    ]


async def test_unstreamed_answer_contains_all_step_events_except_output(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        whole = (await post(url, sandbox={"steps": "events"})).json()["sandbox"]["events"]
        streamed = await post(url, sandbox={"steps": "events"}, stream=True)
    kinds = [
        chunk["sandbox"]["kind"]
        for name, chunk in parse_events(streamed.text)
        if name == "sandbox.step"
    ]
    assert kinds == [
        *("run_started", "tool_start", "tool_output", "tool_end", "file", "run_finished"),
    ]
    assert [e["kind"] for e in whole] == [kind for kind in kinds if kind != "tool_output"]
    assert whole[2]["observation"] == OBSERVED


# As it happens


async def test_output_is_shown_while_its_command_runs(tmp_path: Path) -> None:
    """The command ends only after the client has read its first output."""
    sandboxes = MemorySandboxes()
    command = "mkfifo gate; echo begun; cat gate; echo ended"
    script = [tool_reply(call("execute_bash", command=command)), text_reply("Done.")]
    async with scripted_backend(by_history(script)) as backend:
        model = model_client(backend)
        async with (
            serve(make_services(model, sandboxes, tmp_path)) as url,
            openai_client(url) as client,
        ):
            with anyio.fail_after(10):
                begin = f"````console\n$ {command}\n"
                thinking = ""
                stream = await client.chat.completions.create(
                    model="fake-model", messages=MESSAGES, stream=True
                )
                async for chunk in stream:
                    thinking += (chunk.choices[0].delta.model_extra or {}).get("reasoning", "")
                    if thinking.endswith("begun\n"):
                        assert "ended" not in thinking.removeprefix(begin)
                        await sandboxes.leased[0].exec("echo open > gate", timeout_s=5)
        await model.aclose()
    assert thinking.startswith(f"{begin}begun\nopen\nended\n[exit 0, ")
    assert thinking.endswith("]\n````\n")


# Open WebUI


async def test_open_webui_shows_step_cards_and_status_and_files_and_runs_no_tool(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        reader = read_by_open_webui((await post(url, OPEN_WEBUI, stream=True)).text)
    assert reader.shown == [
        "reasoning: Two letters.",
        f"execute_bash {json.dumps(ARGUMENTS)} completed",
        f"-> {OBSERVED}",
        "message: They are a and b.",
    ]
    assert reader.to_run == []
    assert reader.statuses == [
        (f"Running: {COMMAND}", False),
        (f"Running: {COMMAND} - b", False),
        (f"Ran: {COMMAND}", False),
        ("1 step, 1 file", True),
    ]
    (file,) = reader.files
    assert (file["type"], file["name"], file["size"]) == ("file", "t.csv", 4)
    assert file["url"].startswith(f"{url}/v1/containers/cntr_")


async def test_open_webui_has_no_pending_card_after_a_failed_run(tmp_path: Path) -> None:
    sandboxes = MemorySandboxes(failure=NoFreeSandboxError("all are lent", retry_after_s=1.0))
    async with scripted_backend(by_history(SCRIPT)) as backend:
        model = model_client(backend)
        async with serve(make_services(model, sandboxes, tmp_path)) as url:
            with anyio.fail_after(10):
                reader = read_by_open_webui((await post(url, OPEN_WEBUI, stream=True)).text)
        await model.aclose()
    assert reader.to_run == []
    assert reader.statuses[-1] == ("Stopped after 1 step", True)
    assert reader.error is not None


async def test_step_cards_sent_back_by_open_webui_are_not_sent_to_the_model(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        reader = read_by_open_webui((await post(url, OPEN_WEBUI, stream=True)).text)
        cards = reader.messages
        await post(url, OPEN_WEBUI, messages=[*MESSAGES, *cards, *MESSAGES], stream=True)
    assert [message["role"] for message in cards] == ["assistant", "tool", "assistant"]
    asked_again = backend.requests[2].body["messages"]
    assert asked_again[0]["role"] == "system"
    assert asked_again[1:] == [
        *MESSAGES,
        {"role": "assistant", "content": "They are a and b."},
        *MESSAGES,
    ]


async def test_client_tool_result_beside_step_cards_resumes_its_run(
    tmp_path: Path,
) -> None:
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    weather_call = {"id": "call_w", "type": "function", "function": function}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    calls_it = {"message": {"role": "assistant", "content": None, "tool_calls": [weather_call]}}
    async with (
        scripted_backend([SCRIPT[0], calls_it, text_reply("Rain.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        with anyio.fail_after(10):
            text = (await post(url, OPEN_WEBUI, stream=True, tools=tools)).text
            sent = [frame["choices"][0]["delta"] for _, frame in parse_events(text)]
            reader = read_by_open_webui(text)
            ((shown,),) = [delta["tool_calls"] for delta in sent if "tool_calls" in delta]
            minted = {key: shown[key] for key in ("id", "type", "function")}
            calling = {"role": "assistant", "content": "", "tool_calls": [minted]}
            tool_message = {"role": "tool", "tool_call_id": shown["id"], "content": "Rain."}
            back = [*MESSAGES, *reader.messages, calling, tool_message]
            await post(url, OPEN_WEBUI, messages=back, tools=tools)
    assert shown == {**weather_call, "index": 0, "id": shown["id"]}
    assert reader.to_run == []
    assert [message["role"] for message in reader.messages] == ["assistant", "tool"]
    before, after = (request.body["messages"] for request in backend.requests[1:])
    assert after[: len(before)] == before
    assert after[len(before) :] == [calls_it["message"], {**tool_message, "tool_call_id": "call_w"}]


async def test_steps_in_reasoning_that_a_client_sends_back_are_not_sent_to_the_model(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async with running_proxy(backend, "memory", tmp_path) as url:
        message = (await post(url)).json()["choices"][0]["message"]
        assert "$ printf" in message["reasoning_content"]
        back = {key: message[key] for key in ("role", "content", "reasoning_content")}
        await post(url, messages=[*MESSAGES, back, *MESSAGES])
    answer = {"role": "assistant", "content": "They are a and b."}
    assert backend.requests[2].body["messages"][1:] == [*MESSAGES, answer, *MESSAGES]


async def test_model_with_the_plain_suffix_gets_every_message_unchanged(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    back = [{"role": "assistant", "content": "Hm.", "reasoning": "$ ls\n[exit 0, 0.1 s, 1 line]"}]
    async with running_proxy(backend, "memory", tmp_path) as url:
        await post(url, model="fake-model:plain", messages=[*MESSAGES, *back, *MESSAGES])
    assert backend.requests[0].body["messages"] == [*MESSAGES, *back, *MESSAGES]
