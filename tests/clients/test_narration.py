"""What the model says beside its calls, once a stream has shown it: apart from steps and answer."""

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
from tests.clients import chat, messages, responses
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.open_webui import OpenWebUI
from tests.fakes.server import running_proxy

NARRATION = "I look at the files first, for nothing else can tell what is in them. " * 4 + "Now."
TOLD = tool_reply(call("execute_bash", command="echo one"), content=NARRATION)
BASH = tool_reply(call("execute_bash", command="echo one"))
SUBMIT = tool_reply(call("submit", answer="There are 42."))
WORK = by_history([TOLD, SUBMIT])
SECRET = "ghp_" + "q7R2" * 9
REDACTED = Profiles.only(Profile(redaction=Redaction(("all",))))
LONG = "All is well here, and nothing is amiss. " * 12


THINKS = {"reasoning": "Hm."}
THREE = by_history([TOLD, {**BASH, **THINKS}, {**SUBMIT, **THINKS}])


async def frames(
    tmp_path: Path, script: Any, path: str, narration: str = "content", **body: Any
) -> list[Any]:
    """The data of each frame of a stream."""
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, narration=narration) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as client,
        ):
            response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return responses.frames(response.text.replace("data: [DONE]", ""))


def both(heard: Sequence[Any]) -> tuple[str, str]:
    """The content and the thinking of a chat."""
    deltas = [chat.delta(frame) for frame in heard]
    content = "".join(delta.get("content") or "" for delta in deltas)
    return content, "".join(delta.get("reasoning_content") or "" for delta in deltas)


async def test_chat_steps_as_thinking_show_after_narration(tmp_path: Path) -> None:
    heard = await frames(tmp_path, THREE, chat.PATH, **chat.ASKED, sandbox={"steps": "reasoning"})
    deltas = [chat.delta(frame) for frame in heard]
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thoughts.count("$ echo one\none\n[exit 0") == 2
    assert thoughts.count("Hm.") == 2
    kinds = [kind for delta in deltas for kind in ("reasoning", "content") if delta.get(kind)]
    assert _runs(kinds) == ["content", "reasoning", "content"]


def _runs(kinds: Sequence[str]) -> list[str]:
    """Each kind once for all that follow each other."""
    return [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]


async def test_chat_steps_as_events_show_after_narration(tmp_path: Path) -> None:
    heard = await frames(tmp_path, THREE, chat.PATH, **chat.ASKED, sandbox={"steps": "events"})
    told = [frame.get("sandbox", {}).get("kind") for frame in heard]
    assert told.count("tool_start") == told.count("tool_end") == 2


async def test_open_webui_has_cards_between_narration_and_answer(tmp_path: Path) -> None:
    heard = await frames(tmp_path, THREE, chat.PATH, **chat.ASKED, sandbox={"steps": "items"})
    page = OpenWebUI()
    for frame in heard:
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
async def test_responses_narration_is_an_item_of_its_own_that_ends_before_the_steps(
    tmp_path: Path, steps: str, kinds: list[str]
) -> None:
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    asked = {"model": "fake-model", "input": "How many?", "tools": [shell]}
    script = THREE if steps != "off" else WORK
    heard = await frames(tmp_path, script, "/v1/responses", **asked, sandbox={"steps": steps})
    assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
    output = heard[-1]["response"]["output"]
    assert [item["type"] for item in output] == kinds
    begun = [event for event in heard if event["type"] == "response.output_item.added"]
    done = [event for event in heard if event["type"] == "response.output_item.done"]
    assert [event["item"]["id"] for event in begun] == [item["id"] for item in output]
    assert [event["item"] for event in sorted(done, key=lambda e: int(e["output_index"]))] == output
    assert heard.index(done[0]) < heard.index(begun[1])
    said = [item for item in output if item["type"] == "message"]
    assert [item["status"] for item in said] == ["completed"] * 2
    for item in said:
        deltas = [
            event["delta"]
            for event in heard
            if event["type"] == "response.output_text.delta" and event["item_id"] == item["id"]
        ]
        assert "".join(deltas) == item["content"][0]["text"]
    assert said[-1]["content"][0]["text"] == "There are 42."


async def test_messages_steps_show_as_blocks_after_narration(tmp_path: Path) -> None:
    asked = {**messages.ASKED, "tools": [messages.COMPUTER]}
    heard = await frames(tmp_path, THREE, messages.PATH, **asked, sandbox={"steps": "items"})
    begun = [event["content_block"] for event in heard if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == [
        "text",
        *["server_tool_use", "bash_code_execution_tool_result"] * 2,
        "text",
    ]


# Where the answer speaks of files


MAKE = "printf 'n,square\\n1,1\\n' > output/table.csv"
LINK = tool_reply(call("submit", answer="Here: [the table](/testbed/output/table.csv)."))
MADE = by_history([tool_reply(call("execute_bash", command=MAKE), content=NARRATION), LINK])


async def test_chat_citation_points_into_the_content_that_was_streamed(tmp_path: Path) -> None:
    heard = await frames(tmp_path, MADE, chat.PATH, **chat.ASKED)
    content = "".join(chat.delta(frame).get("content") or "" for frame in heard)
    (note,) = [note for frame in heard for note in chat.delta(frame).get("annotations", [])]
    cited = note["url_citation"]
    assert content.startswith(f"{NARRATION}\n\nHere: [")
    assert content[cited["start_index"] : cited["end_index"]] == "the table"


async def test_responses_citation_points_into_the_answers_own_item(tmp_path: Path) -> None:
    heard = await frames(tmp_path, MADE, "/v1/responses", model="fake-model", input="A table.")
    narration, *_, answer = heard[-1]["response"]["output"]
    assert narration["content"][0]["annotations"] == []
    (part,) = answer["content"]
    (note,) = part["annotations"]
    assert part["text"][note["start_index"] : note["end_index"]] == "the table"


async def test_citation_is_right_after_narration_that_was_redacted(tmp_path: Path) -> None:
    said = f"{LONG}It is {SECRET}. {LONG}"
    script = by_history([tool_reply(call("execute_bash", command=MAKE), content=said), LINK])
    with anyio.fail_after(40):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path, profiles=REDACTED) as url,
            chat.client(url) as client,
        ):
            response = await chat.ask(client, stream=True)
    content = chat.answer(response)
    deltas = [chat.delta(chunk) for chunk in chat.chunks(response)]
    (note,) = [note for delta in deltas for note in delta.get("annotations", [])]
    cited = note["url_citation"]
    assert SECRET not in content
    assert content[cited["start_index"] : cited["end_index"]] == "the table"


# What is gone on from


async def test_responses_narration_is_told_with_the_answer_as_one_message_next_time(
    tmp_path: Path,
) -> None:
    with anyio.fail_after(40):
        async with (
            scripted_backend([TOLD, SUBMIT, text_reply("Bye.")]) as backend,
            responses.client(backend, tmp_path) as client,
        ):
            stream = await client.responses.create(
                model=responses.MODEL, input="How many?", stream=True
            )
            events = [event async for event in stream]
            last = events[-1]
            assert last.type == "response.completed"
            kept = await client.responses.retrieve(last.response.id)
            await responses.ask(client, "Thanks.", previous_response_id=last.response.id)
    assert kept.to_dict()["output"] == last.response.to_dict()["output"]
    assert responses.told(backend, 2) == [
        ("user", "How many?"),
        ("assistant", f"{NARRATION}\n\nThere are 42."),
        ("user", "Thanks."),
    ]


async def test_messages_narration_is_told_with_the_answer_as_one_message_next_time(
    tmp_path: Path,
) -> None:
    asked = {**messages.ASKED, "tools": [messages.COMPUTER], "sandbox": {"steps": "items"}}
    async with messages.asking([TOLD, SUBMIT, text_reply("Bye.")], tmp_path) as client:
        streamed = accumulate_message(
            messages.events(await client.ask(**{**asked, "stream": True}))
        )
        thanks = {"role": "user", "content": "Thanks."}
        said = {"role": "assistant", "content": streamed["content"]}
        await client.message(**{**asked, "messages": [*asked["messages"], said, thanks]})
    assert [(each["role"], each["content"]) for each in client.heard["messages"][1:]] == [
        ("user", "A dot, please."),
        ("assistant", f"{NARRATION}\n\nThere are 42."),
        ("user", "Thanks."),
    ]


# Announced in a turn of its own


ANNOUNCED = (
    "I will count the rows of the table, and then I tell you how many there are. " * 3
    + "Let me see:"
)
IN_TWO_TURNS = by_history([text_reply(ANNOUNCED), {**BASH, **THINKS}, SUBMIT])


async def test_chat_steps_show_after_a_call_was_announced_and_asked_for(tmp_path: Path) -> None:
    asked = {**chat.ASKED, "sandbox": {"steps": "reasoning"}}
    heard = await frames(tmp_path, IN_TWO_TURNS, chat.PATH, **asked)
    content, thoughts = both(heard)
    assert content == f"{ANNOUNCED}\n\nThere are 42."
    assert "$ echo one\none\n[exit 0" in thoughts


async def test_responses_announcement_ends_before_the_steps(tmp_path: Path) -> None:
    shell = {"type": "shell", "environment": {"type": "container_auto"}}
    asked = {"model": "fake-model", "input": "How many?", "tools": [shell]}
    heard = await frames(
        tmp_path, IN_TWO_TURNS, "/v1/responses", **asked, sandbox={"steps": "items"}
    )
    done = [event["item"] for event in heard if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == [
        "message",
        "shell_call",
        "shell_call_output",
        "message",
    ]


# With narration: reasoning


@pytest.mark.parametrize("narration", [NARRATION, NARRATION * 9], ids=["short", "long"])
async def test_strict_separation_streams_narration_as_thinking_alone(
    tmp_path: Path, narration: str
) -> None:
    script = by_history([{**BASH, "content": narration}, {**BASH, "content": "More."}, SUBMIT])
    heard = await frames(tmp_path, script, chat.PATH, "reasoning", **chat.ASKED)
    content, thoughts = both(heard)
    assert content == "There are 42."
    assert narration in thoughts
    assert "More." in thoughts


async def test_strict_separation_streams_what_was_announced_as_thinking(tmp_path: Path) -> None:
    heard = await frames(tmp_path, IN_TWO_TURNS, chat.PATH, "reasoning", **chat.ASKED)
    content, thoughts = both(heard)
    assert content == "There are 42."
    assert ANNOUNCED in thoughts


async def test_strict_separation_streams_an_answer_of_prose(tmp_path: Path) -> None:
    heard = await frames(
        tmp_path, by_history([text_reply(LONG)]), chat.PATH, "reasoning", **chat.ASKED
    )
    assert both(heard) == (LONG.strip(), "")


async def test_answer_that_must_be_checked_is_the_only_content(tmp_path: Path) -> None:
    script = by_history([TOLD, text_reply('{"n": 42}')])
    form = {"response_format": {"type": "json_object"}}
    heard = await frames(tmp_path, script, chat.PATH, **chat.ASKED, **form)
    content, thoughts = both(heard)
    assert content == '{"n": 42}'
    assert NARRATION in thoughts
