"""/v1/conversations: what we read of a request, and a conversation in OpenAI's shape."""

from collections.abc import Mapping
from typing import Any

from proxy.store.records import Conversation
from proxy.wire.responses_shapes import item
from proxy.wire.validation import array, mapping, require, text, too_much

MAX_ITEMS = 20
"""How many can be added at a time."""
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
"""Of metadata."""


def metadata(body: Mapping[str, Any]) -> dict[str, str]:
    """What the client notes beside a conversation. Raises BadRequestError."""
    pairs = body.get("metadata")
    if pairs is None:
        return {}
    mapping(pairs, "metadata")
    if len(pairs) > MAX_PAIRS:
        raise too_much("metadata", "object_above_max_properties", f"{MAX_PAIRS} pairs")
    for key, value in pairs.items():
        text(value, f"metadata.{key}")
        if len(key) > MAX_KEY_CHARS:
            raise too_much("metadata", "string_above_max_length", f"{MAX_KEY_CHARS} characters")
        if len(value) > MAX_VALUE_CHARS:
            words = f"{MAX_VALUE_CHARS} characters"
            raise too_much(f"metadata.{key}", "string_above_max_length", words)
    return dict(pairs)


def items(body: Mapping[str, Any], *, required: bool) -> list[dict[str, Any]]:
    """What is to be added, as it was written. Raises BadRequestError."""
    if required:
        require(body, "items", "items")
    given: Any = body.get("items")
    if given is None and not required:
        return []
    array(item)(given, "items")
    if len(given) > MAX_ITEMS:
        raise too_much("items", "array_above_max_length", f"{MAX_ITEMS} items")
    return list(given)


def conversation_object(conversation: Conversation) -> dict[str, Any]:
    """OpenAI's conversation object."""
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": dict(conversation.metadata),
    }
