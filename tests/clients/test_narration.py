"""Narration: text that the model streams beside its tool calls, apart from steps and answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.profile import Profile
from policies.redaction import Redaction
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from proxy.schemas.messages_response import accumulate_message
from tests.clients import chat_http, messages_http, responses_sdk
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.open_webui import OpenWebUI
from tests.fakes.server import running_proxy

NARRATION = "I look at the files first, for nothing else can tell what is in them. " * 4 + "Now."
NARRATED_BASH = tool_reply(call("execute_bash", command="echo one"), content=NARRATION)
BASH = tool_reply(call("execute_bash", command="echo one"))
SUBMIT = tool_reply(call("submit", answer="There are 42."))
NARRATED_RUN = by_history([NARRATED_BASH, SUBMIT])
SECRET = "ghp_" + "q7R2" * 9
REDACTED = Profiles.only(Profile(redaction=Redaction(("all",))))
LONG = "All is well here, and nothing is amiss. " * 12


REASONING = {"reasoning": "Hm."}
THREE_TURNS = by_history([NARRATED_BASH, {**BASH, **REASONING}, {**SUBMIT, **REASONING}])


async def stream_events(
    tmp_path: Path, script: Any, path: str, narration: str = "content", **body: Any
) -> list[Any]:
    """Return the data of each event of a stream."""
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, narration=narration) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as client,
        ):
            response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return responses_sdk.sse_data(response.text.replace("data: [DONE]", ""))


def content_and_reasoning(events: Sequence[Any]) -> tuple[str, str]:
    """Return the content and the reasoning of a chat stream."""
    deltas = [chat_http.delta(frame) for frame in events]
    content = "".join(delta.get("content") or "" for delta in deltas)
    return content, "".join(delta.get("reasoning_content") or "" for delta in deltas)


async def test_chat_steps_shown_as_reasoning_come_after_the_narration(tmp_path: Path) -> None:
    events = await stream_events(
        tmp_path, THREE_TURNS, chat_http.PATH, **chat_http.BODY, sandbox={"steps": "reasoning"}
    )
    deltas = [chat_http.delta(frame) for frame in events]
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thoughts.count("$ echo one\none\n[exit 0") == 2
    assert thoughts.count("Hm.") == 2
    kinds = [kind for delta in deltas for kind in ("reasoning", "content") if delta.get(kind)]
    assert without_repeats(kinds) == ["content", "reasoning", "content"]


def without_repeats(kinds: Sequence[str]) -> list[str]:
    """Return the kinds with consecutive duplicates removed."""
    return [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]


async def test_chat_step_events_follow_the_narration(tmp_path: Path) -> None:
    events = await stream_events(
        tmp_path, THREE_TURNS, chat_http.PATH, **chat_http.BODY, sandbox={"steps": "events"}
    )
    kinds = [
        frame.get("sandbox", {}).get("kind")
        or ("content" if chat_http.delta(frame).get("content") else "")
        for frame in events
    ]
    shown = [kind for kind in kinds if kind in ("content", "tool_start", "tool_end")]
    assert without_repeats(shown) == [
        "content",
        *("tool_start", "tool_end") * 2,
        "content",
    ]


async def test_open_webui_shows_cards_between_narration_and_answer(tmp_path: Path) -> None:
    events = await stream_events(
        tmp_path, THREE_TURNS, chat_http.PATH, **chat_http.BODY, sandbox={"steps": "items"}
    )
    page = OpenWebUI()
    for frame in events:
        page.take(frame)
    card = 'execute_bash {"command": "echo one"} completed'
    assert page.shown == [
        f"message: {NARRATION}\n\n",
        card,
        "-> Exit code: 0\n[stdout]\none",
        "reasoning: Hm.",
        card,
        "-> Exit code: 0\n[stdout]\none",
        "reasoning: Hm.",
        "message: There are 42.",
    ]
    assert page.to_run == []


STEP = ["shell_call", "shell_call_output"]


@pytest.mark.parametrize(
    ("steps", "kinds"),
    [
        ("off", ["message", "message"]),
        ("reasoning", ["message", "reasoning", "message"]),
        (
            "items",
            ["message", *STEP, "reasoning", *STEP, "reasoning", "message"],
        ),
    ],
)
async def test_narration_of_a_response_is_a_separate_item_before_the_steps(
    tmp_path: Path, steps: str, kinds: list[str]
) -> None:
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    asked = {"model": "fake-model", "input": "How many?", "tools": [shell]}
    script = THREE_TURNS if steps != "off" else NARRATED_RUN
    events = await stream_events(
        tmp_path, script, "/v1/responses", **asked, sandbox={"steps": steps}
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == kinds
    begun = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["id"] for event in begun] == [item["id"] for item in output]
    assert [event["item"] for event in sorted(done, key=lambda e: int(e["output_index"]))] == output
    assert events.index(done[0]) < events.index(begun[1])
    said = [item for item in output if item["type"] == "message"]
    assert [item["status"] for item in said] == ["completed"] * 2
    for item in said:
        deltas = [
            event["delta"]
            for event in events
            if event["type"] == "response.output_text.delta" and event["item_id"] == item["id"]
        ]
        assert "".join(deltas) == item["content"][0]["text"]
    assert said[-1]["content"][0]["text"] == "There are 42."


async def test_step_blocks_of_a_messages_stream_follow_the_narration(tmp_path: Path) -> None:
    asked = {**messages_http.BODY, "tools": [messages_http.CODE_EXECUTION]}
    events = await stream_events(
        tmp_path, THREE_TURNS, messages_http.PATH, **asked, sandbox={"steps": "items"}
    )
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == [
        "text",
        *["server_tool_use", "bash_code_execution_tool_result"] * 2,
        "text",
    ]


# Where the answer speaks of files


MAKE = "printf 'n,square\\n1,1\\n' > output/table.csv"
LINK = tool_reply(call("submit", answer="Here: [the table](/testbed/output/table.csv)."))
FILE_RUN = by_history([tool_reply(call("execute_bash", command=MAKE), content=NARRATION), LINK])


async def test_chat_citation_points_into_the_content_that_was_streamed(tmp_path: Path) -> None:
    events = await stream_events(tmp_path, FILE_RUN, chat_http.PATH, **chat_http.BODY)
    content = "".join(chat_http.delta(frame).get("content") or "" for frame in events)
    (note,) = [note for frame in events for note in chat_http.delta(frame).get("annotations", [])]
    cited = note["url_citation"]
    assert content.startswith(f"{NARRATION}\n\nHere: [")
    assert content[cited["start_index"] : cited["end_index"]] == "the table"


async def test_citation_of_a_response_points_into_the_answer_item(tmp_path: Path) -> None:
    events = await stream_events(
        tmp_path, FILE_RUN, "/v1/responses", model="fake-model", input="A table."
    )
    narration, *_, answer = events[-1]["response"]["output"]
    assert narration["content"][0]["annotations"] == []
    (part,) = answer["content"]
    (note,) = part["annotations"]
    assert part["text"][note["start_index"] : note["end_index"]] == "the table"


async def test_citation_offsets_account_for_redacted_narration(tmp_path: Path) -> None:
    said = f"{LONG}It is {SECRET}. {LONG}"
    script = by_history([tool_reply(call("execute_bash", command=MAKE), content=said), LINK])
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, profiles=REDACTED) as url,
            chat_http.http_client(url) as client,
        ):
            response = await chat_http.post_chat(client, stream=True)
    content = chat_http.answer_text(response)
    deltas = [chat_http.delta(chunk) for chunk in chat_http.chunks(response)]
    (note,) = [note for delta in deltas for note in delta.get("annotations", [])]
    cited = note["url_citation"]
    assert SECRET not in content
    assert content[cited["start_index"] : cited["end_index"]] == "the table"


# What is gone on from


async def test_narration_and_answer_of_a_response_become_one_message_in_history(
    tmp_path: Path,
) -> None:
    with anyio.fail_after(40):
        async with (
            scripted_backend([NARRATED_BASH, SUBMIT, text_reply("Bye.")]) as backend,
            responses_sdk.responses_client(backend, tmp_path) as client,
        ):
            stream = await client.responses.create(
                model=responses_sdk.MODEL, input="How many?", stream=True
            )
            events = [event async for event in stream]
            last = events[-1]
            assert last.type == "response.completed"
            kept = await client.responses.retrieve(last.response.id)
            await responses_sdk.create_response(
                client, "Thanks.", previous_response_id=last.response.id
            )
    assert kept.to_dict()["output"] == last.response.to_dict()["output"]
    assert responses_sdk.sent_messages(backend, 2) == [
        ("user", "How many?"),
        ("assistant", f"{NARRATION}\n\nThere are 42."),
        ("user", "Thanks."),
    ]


async def test_narration_and_answer_of_a_messages_stream_become_one_message_in_history(
    tmp_path: Path,
) -> None:
    asked = {
        **messages_http.BODY,
        "tools": [messages_http.CODE_EXECUTION],
        "sandbox": {"steps": "items"},
    }
    async with messages_http.messages_client(
        [NARRATED_BASH, SUBMIT, text_reply("Bye.")], tmp_path
    ) as client:
        streamed = accumulate_message(
            messages_http.events(await client.ask(**{**asked, "stream": True}))
        )
        thanks = {"role": "user", "content": "Thanks."}
        said = {"role": "assistant", "content": streamed["content"]}
        await client.message(**{**asked, "messages": [*asked["messages"], said, thanks]})
    assert [(each["role"], each["content"]) for each in client.last_request["messages"][1:]] == [
        ("user", "A dot, please."),
        ("assistant", f"{NARRATION}\n\nThere are 42."),
        ("user", "Thanks."),
    ]


# Announced in a turn of its own


ANNOUNCEMENT = (
    "I will count the rows of the table, and then I tell you how many there are. " * 3
    + "Let me see:"
)
ANNOUNCED_RUN = by_history([text_reply(ANNOUNCEMENT), {**BASH, **REASONING}, SUBMIT])


async def test_steps_of_a_chat_stream_follow_an_announcement_that_had_no_tool_call(
    tmp_path: Path,
) -> None:
    asked = {**chat_http.BODY, "sandbox": {"steps": "reasoning"}}
    events = await stream_events(tmp_path, ANNOUNCED_RUN, chat_http.PATH, **asked)
    content, thoughts = content_and_reasoning(events)
    assert content == f"{ANNOUNCEMENT}\n\nThere are 42."
    assert "$ echo one\none\n[exit 0" in thoughts


async def test_announcement_of_a_response_ends_before_the_steps(tmp_path: Path) -> None:
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    asked = {"model": "fake-model", "input": "How many?", "tools": [shell]}
    events = await stream_events(
        tmp_path, ANNOUNCED_RUN, "/v1/responses", **asked, sandbox={"steps": "items"}
    )
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == [
        "message",
        "shell_call",
        "shell_call_output",
        "message",
    ]


# With narration: reasoning


@pytest.mark.parametrize("narration", [NARRATION, NARRATION * 9], ids=["short", "long"])
async def test_narration_is_streamed_only_as_reasoning_if_narration_is_set_to_reasoning(
    tmp_path: Path, narration: str
) -> None:
    script = by_history([{**BASH, "content": narration}, {**BASH, "content": "More."}, SUBMIT])
    events = await stream_events(tmp_path, script, chat_http.PATH, "reasoning", **chat_http.BODY)
    content, thoughts = content_and_reasoning(events)
    assert content == "There are 42."
    assert narration in thoughts
    assert "More." in thoughts


async def test_text_that_announces_a_missing_call_is_streamed_as_reasoning_if_so_configured(
    tmp_path: Path,
) -> None:
    events = await stream_events(
        tmp_path, ANNOUNCED_RUN, chat_http.PATH, "reasoning", **chat_http.BODY
    )
    content, thoughts = content_and_reasoning(events)
    assert content == "There are 42."
    assert ANNOUNCEMENT in thoughts


async def test_answer_written_as_text_is_streamed_as_content_if_narration_is_set_to_reasoning(
    tmp_path: Path,
) -> None:
    events = await stream_events(
        tmp_path, by_history([text_reply(LONG)]), chat_http.PATH, "reasoning", **chat_http.BODY
    )
    assert content_and_reasoning(events) == (LONG.strip(), "")


async def test_answer_with_a_response_format_is_the_only_streamed_content(tmp_path: Path) -> None:
    script = by_history([NARRATED_BASH, text_reply('{"n": 42}')])
    form = {"response_format": {"type": "json_object"}}
    events = await stream_events(tmp_path, script, chat_http.PATH, **chat_http.BODY, **form)
    content, thoughts = content_and_reasoning(events)
    assert content == '{"n": 42}'
    assert NARRATION in thoughts
