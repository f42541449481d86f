"""Conversations: items, and responses that continue them."""

from typing import Any

import openai
import pytest
from model import Script, bash, stdout_observation, submits
from stored_responses import ask, texts

HELLO: Any = {"role": "user", "content": "Hello."}
ANSWER: Any = {"role": "assistant", "content": "Good day."}


def test_conversation_is_created_updated_and_deleted(client: Any) -> None:
    made = client.conversations.create(metadata={"topic": "primes"}, items=[HELLO])
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "squares"})
    assert (changed.id, changed.metadata) == (made.id, {"topic": "squares"})
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_conversation_items_are_added_listed_and_removed(client: Any) -> None:
    made = client.conversations.create(items=[HELLO])
    items = client.conversations.items
    (added,) = items.create(made.id, items=[ANSWER]).data
    assert texts(items.list(made.id, limit=1)) == ["Good day.", "Hello."]
    assert texts(items.list(made.id, order="asc")) == ["Hello.", "Good day."]
    assert items.retrieve(added.id, conversation_id=made.id) == added
    items.delete(added.id, conversation_id=made.id)
    assert texts(items.list(made.id)) == ["Hello."]
    with pytest.raises(openai.NotFoundError):
        items.retrieve(added.id, conversation_id=made.id)


def test_responses_extend_a_conversation_and_share_files(client: Any) -> None:
    made = client.conversations.create(items=[HELLO])
    begins = Script(bash("echo one > f"), submits("Written."))
    goes_on = Script(bash("cat f"), submits("One."))
    first = ask(client, begins, conversation=made.id)
    second = ask(client, goes_on, conversation={"id": made.id})
    assert first.conversation.id == second.conversation.id == made.id
    assert goes_on.observations() == [stdout_observation("one")]
    heard = [message["content"] for message in goes_on.requests()[0]["messages"][1:]]
    assert heard == ["Hello.", begins.prompt, "Written.", goes_on.prompt]
    kept = client.conversations.items.list(made.id, order="asc")
    assert texts(item for item in kept if item.type == "message") == [*heard, "One."]
