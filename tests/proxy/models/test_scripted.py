"""The scripted model."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.agent.events import ReasoningDelta, TextDelta, ToolCallDelta
from proxy.errors import BackendError, ContextOverflowError
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.models.delta_recorder import DeltaRecorder


def after(*texts: str, **fields: Any) -> dict[str, Any]:
    """Return a request with these messages of the assistant, and other fields."""
    user = {"role": "user", "content": "And?"}
    turns = [turn for text in texts for turn in ({"role": "assistant", "content": text}, user)]
    return {"messages": [user, *turns], **fields}


async def content(model: ScriptedModel, body: dict[str, Any]) -> Any:
    return (await model.complete(body, None)).message["content"]


async def test_scripted_reply_depends_on_the_history_of_the_request() -> None:
    model = ScriptedModel([text_reply("one"), text_reply("two")])
    assert await content(model, after("one")) == "two"
    assert await content(model, after()) == "one"


async def test_scripted_model_replies_to_concurrent_conversations_independently() -> None:
    model = ScriptedModel([text_reply("one"), text_reply("two"), text_reply("three")])

    async def converse() -> list[str]:
        texts: list[str] = []
        while len(texts) < 3:
            texts.append(await content(model, after(*texts)))
            await asyncio.sleep(0)
        return texts

    assert await asyncio.gather(*(converse() for _ in range(5))) == [["one", "two", "three"]] * 5


async def test_script_without_further_replies_is_an_error() -> None:
    with pytest.raises(BackendError, match="the script has no more replies"):
        await content(ScriptedModel([text_reply("one")]), after("one"))


async def test_cycling_script_starts_again_after_its_last_reply() -> None:
    model = ScriptedModel([text_reply("one"), text_reply("two")], cycle=True)
    assert await content(model, after("one", "two", "one")) == "two"


async def test_cycling_script_without_replies_is_an_error() -> None:
    with pytest.raises(BackendError, match="the script has no more replies"):
        await content(ScriptedModel([], cycle=True), after())


async def test_scripted_error_is_raised_only_once() -> None:
    error = {"error": {"status": 429, "message": "slow down", "retry_after_s": 2}}
    model = ScriptedModel([text_reply("one"), error, text_reply("two")])
    assert await content(model, after()) == "one"
    with pytest.raises(BackendError, match="slow down") as raised:
        await content(model, after("one"))
    assert (raised.value.status, raised.value.retry_after_s) == (429, 2)
    assert await content(model, after("one")) == "two"


async def test_scripted_overflow_is_raised_as_a_context_overflow() -> None:
    error = {"status": 400, "message": "too long", "code": "context_length_exceeded"}
    with pytest.raises(ContextOverflowError):
        await content(ScriptedModel([{"error": error}]), after())


async def test_scripted_tool_arguments_are_streamed_in_small_pieces() -> None:
    deltas = DeltaRecorder()
    reply = {
        **tool_reply(call("bash", command="ls -l"), content="Looking."),
        "reasoning": "Hm, look",
    }
    await ScriptedModel([reply]).complete(after(), deltas)
    assert deltas == [
        ReasoningDelta("Hm, look"),
        TextDelta("Looking."),
        ToolCallDelta(0, "bash", ""),
        ToolCallDelta(0, "bash", '{"comman'),
        ToolCallDelta(0, "bash", 'd": "ls '),
        ToolCallDelta(0, "bash", '-l"}'),
    ]


async def test_scripted_model_records_copies_of_requests() -> None:
    model, body = ScriptedModel([text_reply("one")]), after()
    await model.complete(body, None)
    body["messages"].append({"role": "user", "content": "changed later"})
    assert model.requests == [after()]


async def test_scripted_model_is_listed_under_its_name_and_owned_by_script() -> None:
    models = await ScriptedModel([], name="demo").models()
    assert models == [{"id": "demo", "object": "model", "created": 0, "owned_by": "script"}]


async def test_raw_arguments_and_messages_of_a_script_are_unchanged() -> None:
    raw_call = {"name": "bash", "arguments": '{"broken', "id": "mine"}
    message = {"role": "assistant", "content": None, "odd": [1]}
    model = ScriptedModel([tool_reply(raw_call), {"message": message, "finish_reason": "length"}])
    first = await model.complete(after(), None)
    second = await model.complete(after("x"), None)
    assert first.message["tool_calls"] == [
        {"id": "mine", "type": "function", "function": {"name": "bash", "arguments": '{"broken'}}
    ]
    assert (second.message, second.finish_reason) == (message, "length")


async def test_yaml_script_is_played_in_a_cycle(tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(
        """
model: demo
replies:
  - reasoning: I should compute.
    tool_calls:
      - {name: bash, arguments: {command: echo 42}}
    usage: {total_tokens: 12}
  - content: It is 42.
""",
        encoding="utf-8",
    )
    model = ScriptedModel.from_yaml(path)
    first = await model.complete(after(), None)
    assert first.message["tool_calls"][0]["function"] == {
        "name": "bash",
        "arguments": '{"command": "echo 42"}',
    }
    assert first.usage == {"total_tokens": 12}
    assert await content(model, after("x", "y", "z")) == "It is 42."
    assert (await model.models())[0]["id"] == "demo"


async def test_file_with_several_scripts_plays_the_script_of_the_requested_model(
    tmp_path: Path,
) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(
        """
- model: first
  replies: [{content: one}, {content: two}]
- model: second
  replies: [{error: {message: "Not now."}}, {content: three}]
""",
        encoding="utf-8",
    )
    model = ScriptedModel.from_yaml(path)
    assert [each["id"] for each in await model.models()] == ["first", "second"]
    assert await content(model, after("x", model="first")) == "two"
    with pytest.raises(BackendError, match="Not now"):
        await content(model, after(model="second"))
    assert await content(model, after(model="second")) == "three"
    assert await content(model, after(model="unknown")) == "one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "the script: List should have at least 1 item"),
        ("- replies: []\n- model: x", "1.replies: Field required"),
        ("replies: [", "not YAML: while parsing a flow"),
        ("", "the script: Input should be"),
        ("model: x", "replies: Field required"),
        ("replies: [{contents: x}]", "replies.0.contents: Extra inputs are not permitted"),
        ("replies: [{tool_calls: [{}]}]", "replies.0.tool_calls.0.name: Field required"),
    ],
)
def test_malformed_script_is_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "script.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"script\.yaml") as raised:
        ScriptedModel.from_yaml(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: {message}")
    assert "\n" not in line
