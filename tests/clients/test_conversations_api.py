"""/v1/conversations with the openai SDK: items, and responses that continue a conversation."""

from pathlib import Path
from typing import Any

import pytest

from proxy.models.scripted import text_reply
from tests.clients.responses_sdk import (
    api_error,
    bash,
    container_of,
    create_response,
    responses_client,
    sent_messages,
    tool_results,
    with_other_key,
)
from tests.fakes.backend import Refusal, scripted_backend

HELLO: Any = {"role": "user", "content": "Hello."}


def texts(items: Any) -> list[str]:
    """Return the texts of the message items."""
    return [item.content[0].text for item in items if item.type == "message"]


async def test_conversation_is_created_updated_and_deleted(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend:
        async with responses_client(backend, tmp_path) as mine:
            made = await mine.conversations.create(metadata={"topic": "primes"}, items=[HELLO])
            assert (made.object, made.metadata) == ("conversation", {"topic": "primes"})
        async with responses_client(backend, tmp_path) as mine:
            assert await mine.conversations.retrieve(made.id) == made
            changed = await mine.conversations.update(made.id, metadata={"topic": "squares"})
            assert (changed.id, changed.metadata) == (made.id, {"topic": "squares"})
            assert texts((await mine.conversations.items.list(made.id)).data) == ["Hello."]
            deleted = await mine.conversations.delete(made.id)
            assert deleted.to_dict() == {
                "id": made.id,
                "object": "conversation.deleted",
                "deleted": True,
            }
            assert (await api_error(mine.conversations.retrieve(made.id))).status_code == 404
            assert (await api_error(mine.conversations.delete(made.id))).status_code == 404


async def test_conversation_items_are_added_listed_and_removed(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend, responses_client(backend, tmp_path) as mine:
        made = await mine.conversations.create()
        said: list[Any] = [
            {"role": "user", "content": "One."},
            {"role": "assistant", "content": "Two."},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "Three."},
        ]
        added = await mine.conversations.items.create(made.id, items=said)
        kinds = ["message", "message", "function_call", "function_call_output"]
        assert [item.type for item in added.data] == kinds
        page = await mine.conversations.items.list(made.id, order="asc", limit=3)
        assert [item.id for item in page.data] == [item.id for item in added.data[:3]]
        assert page.has_more
        listed = [item async for item in mine.conversations.items.list(made.id, limit=1)]
        assert listed == list(reversed(added.data))
        one = added.data[0].id
        assert one
        found = await mine.conversations.items.retrieve(one, conversation_id=made.id)
        assert found == added.data[0]
        left = await mine.conversations.items.delete(one, conversation_id=made.id)
        assert left == made
        for asking in (
            mine.conversations.items.retrieve(one, conversation_id=made.id),
            mine.conversations.items.delete(one, conversation_id=made.id),
        ):
            assert (await api_error(asking)).status_code == 404
        again: list[Any] = [{"type": "item_reference", "id": added.data[1].id}]
        other_one = await mine.conversations.create(items=again)
        assert texts((await mine.conversations.items.list(other_one.id)).data) == ["Two."]


@pytest.mark.parametrize("as_object", [False, True])
async def test_responses_continue_a_conversation_and_extend_it(
    as_object: bool, tmp_path: Path
) -> None:
    script = [bash("echo one > file"), text_reply("Done."), bash("cat file"), text_reply("One.")]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path) as mine:
            made = await mine.conversations.create(items=[HELLO])
            named: Any = {"id": made.id} if as_object else made.id
            first = await create_response(
                mine, "Begin.", conversation=named, instructions="Be brief."
            )
            assert first.conversation
            assert first.conversation.id == made.id
        async with responses_client(backend, tmp_path) as mine:
            second = await create_response(mine, "Go on.", conversation=named)
            items = await mine.conversations.items.list(made.id, order="asc")
            said = ["Hello.", "Begin.", "Done.", "Go on.", "One."]
            assert texts(items.data) == said
            inputs = await mine.responses.input_items.list(second.id, order="asc")
            assert texts(inputs.data) == said[:4]
            branch = await mine.responses.input_items.list(first.id, order="asc")
            assert texts(branch.data) == said[:2]
            await mine.responses.delete(first.id)
            assert texts((await mine.conversations.items.list(made.id)).data) == said[::-1]
        assert "one" in tool_results(backend, 3)[-1]
        assert [text for role, text in sent_messages(backend, 2) if role == "user"] == [
            *("Hello.", "Begin.", "Go on.")
        ]
        assert "Be brief." not in str(backend.requests[2].body)
    assert container_of(second) == container_of(first)


async def test_response_can_continue_a_response_of_a_conversation(tmp_path: Path) -> None:
    script = [text_reply("First."), text_reply("Second."), text_reply("Third.")]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        made = await mine.conversations.create(items=[HELLO])
        first = await create_response(mine, "One.", conversation=made.id)
        await create_response(mine, "Two.", conversation=made.id)
        await create_response(mine, "Three.", previous_response_id=first.id)
        words = [text for _, text in sent_messages(backend, 2)]
        items = await mine.conversations.items.list(made.id)
    assert words == ["Hello.", "One.", "First.", "Three."]
    assert len(items.data) == 5


async def test_failed_response_adds_no_items(tmp_path: Path) -> None:
    async with (
        scripted_backend([Refusal(400, "no")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await mine.conversations.create(items=[HELLO])
        await api_error(create_response(mine, "Begin.", conversation=made.id))
        assert texts((await mine.conversations.items.list(made.id)).data) == ["Hello."]


async def test_conversation_of_another_key_is_not_found(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend, responses_client(backend, tmp_path) as mine:
        made = await mine.conversations.create(items=[HELLO])
        item = (await mine.conversations.items.list(made.id)).data[0].id
        assert item
        yours = with_other_key(mine)
        for asking in (
            yours.conversations.retrieve(made.id),
            yours.conversations.update(made.id, metadata={}),
            yours.conversations.delete(made.id),
            yours.conversations.items.create(made.id, items=[HELLO]),
            yours.conversations.items.list(made.id),
            yours.conversations.items.retrieve(item, conversation_id=made.id),
            yours.conversations.items.delete(item, conversation_id=made.id),
            create_response(yours, "Go on.", conversation=made.id),
        ):
            assert (await api_error(asking)).status_code == 404
        assert await mine.conversations.retrieve(made.id) == made


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"items": [HELLO] * 21}, "items", "array_above_max_length"),
        ({"items": "Hello."}, "items", "invalid_type"),
        ({"items": [{"type": "message"}]}, "items[0].role", "missing_required_parameter"),
        ({"metadata": "a"}, "metadata", "invalid_type"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "string_above_max_length"),
        ({"metadata": {"x" * 65: "a"}}, "metadata", "string_above_max_length"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "object_above_max_properties"),
    ],
)
async def test_invalid_conversation_is_refused(
    body: dict[str, Any], param: str, code: str, tmp_path: Path
) -> None:
    async with scripted_backend([]) as backend, responses_client(backend, tmp_path) as mine:
        error = await api_error(mine.conversations.create(extra_body=body))
        made = await mine.conversations.create()
        missing = await api_error(mine.post(f"/conversations/{made.id}/items", cast_to=object))
    assert (error.status_code, error.param, error.code) == (400, param, code)
    assert (missing.status_code, missing.param) == (400, "items")
