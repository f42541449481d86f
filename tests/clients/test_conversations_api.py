"""/v1/conversations, by the openai SDK: their items, and responses that go on from them."""

from pathlib import Path
from typing import Any

import pytest

from proxy.models.scripted import text_reply
from tests.clients.responses import ask, bash, client, container_of, other, refused, results, told
from tests.fakes.backend import Refusal, scripted_backend

HELLO: Any = {"role": "user", "content": "Hello."}


def texts(items: Any) -> list[str]:
    """What messages say."""
    return [item.content[0].text for item in items if item.type == "message"]


async def test_a_conversation_is_made_changed_and_deleted(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend:
        async with client(backend, tmp_path) as mine:
            made = await mine.conversations.create(metadata={"topic": "primes"}, items=[HELLO])
            assert (made.object, made.metadata) == ("conversation", {"topic": "primes"})
        async with client(backend, tmp_path) as mine:
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
            assert (await refused(mine.conversations.retrieve(made.id))).status_code == 404
            assert (await refused(mine.conversations.delete(made.id))).status_code == 404


async def test_items_are_added_listed_and_taken_out(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend, client(backend, tmp_path) as mine:
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
            assert (await refused(asking)).status_code == 404
        again: list[Any] = [{"type": "item_reference", "id": added.data[1].id}]
        other_one = await mine.conversations.create(items=again)
        assert texts((await mine.conversations.items.list(other_one.id)).data) == ["Two."]


@pytest.mark.parametrize("as_object", [False, True])
async def test_responses_go_on_from_a_conversation_and_add_to_it(
    as_object: bool, tmp_path: Path
) -> None:
    script = [bash("echo one > file"), text_reply("Done."), bash("cat file"), text_reply("One.")]
    async with scripted_backend(script) as backend:
        async with client(backend, tmp_path) as mine:
            made = await mine.conversations.create(items=[HELLO])
            named: Any = {"id": made.id} if as_object else made.id
            first = await ask(mine, "Begin.", conversation=named, instructions="Be brief.")
            assert first.conversation
            assert first.conversation.id == made.id
        async with client(backend, tmp_path) as mine:
            second = await ask(mine, "Go on.", conversation=named)
            items = await mine.conversations.items.list(made.id, order="asc")
            said = ["Hello.", "Begin.", "Done.", "Go on.", "One."]
            assert texts(items.data) == said
            inputs = await mine.responses.input_items.list(second.id, order="asc")
            assert texts(inputs.data) == said[:4]
            branch = await mine.responses.input_items.list(first.id, order="asc")
            assert texts(branch.data) == said[:2]
            await mine.responses.delete(first.id)
            assert texts((await mine.conversations.items.list(made.id)).data) == said[::-1]
        assert "one" in results(backend, 3)[-1]
        assert [text for role, text in told(backend, 2) if role == "user"] == [
            *("Hello.", "Begin.", "Go on.")
        ]
        assert "Be brief." not in str(backend.requests[2].body)
    assert container_of(second) == container_of(first)


async def test_a_response_can_go_on_from_one_that_had_a_conversation(tmp_path: Path) -> None:
    script = [text_reply("First."), text_reply("Second."), text_reply("Third.")]
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        made = await mine.conversations.create(items=[HELLO])
        first = await ask(mine, "One.", conversation=made.id)
        await ask(mine, "Two.", conversation=made.id)
        await ask(mine, "Three.", previous_response_id=first.id)
        words = [text for _, text in told(backend, 2)]
        items = await mine.conversations.items.list(made.id)
    assert words == ["Hello.", "One.", "First.", "Three."]
    assert len(items.data) == 5


async def test_a_response_that_fails_adds_nothing(tmp_path: Path) -> None:
    async with scripted_backend([Refusal(400, "no")]) as backend, client(backend, tmp_path) as mine:
        made = await mine.conversations.create(items=[HELLO])
        await refused(ask(mine, "Begin.", conversation=made.id))
        assert texts((await mine.conversations.items.list(made.id)).data) == ["Hello."]


async def test_a_conversation_is_its_key_s_own(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend, client(backend, tmp_path) as mine:
        made = await mine.conversations.create(items=[HELLO])
        item = (await mine.conversations.items.list(made.id)).data[0].id
        assert item
        yours = other(mine)
        for asking in (
            yours.conversations.retrieve(made.id),
            yours.conversations.update(made.id, metadata={}),
            yours.conversations.delete(made.id),
            yours.conversations.items.create(made.id, items=[HELLO]),
            yours.conversations.items.list(made.id),
            yours.conversations.items.retrieve(item, conversation_id=made.id),
            yours.conversations.items.delete(item, conversation_id=made.id),
            ask(yours, "Go on.", conversation=made.id),
        ):
            assert (await refused(asking)).status_code == 404
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
async def test_what_is_no_conversation_is_refused(
    body: dict[str, Any], param: str, code: str, tmp_path: Path
) -> None:
    async with scripted_backend([]) as backend, client(backend, tmp_path) as mine:
        error = await refused(mine.conversations.create(extra_body=body))
        made = await mine.conversations.create()
        missing = await refused(mine.post(f"/conversations/{made.id}/items", cast_to=object))
    assert (error.status_code, error.param, error.code) == (400, param, code)
    assert (missing.status_code, missing.param) == (400, "items")
