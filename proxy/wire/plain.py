"""Bodies of the backend's API on their way past the loop."""

from collections.abc import Mapping
from typing import Any

from policies.artifacts import without_links
from policies.routing import PLAIN_SUFFIX, plain_name

_NAMING = frozenset({"id", "type"})
"""An item with no other fields stands for the one that the backend keeps under that id."""
_REFERENCE = "item_reference"


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a body's fields as the backend knows them if its model is a `:plain` one, or None."""
    model = fields.get("model")
    if not isinstance(model, str) or not model.endswith(PLAIN_SUFFIX):
        return None
    return for_the_backend(fields, plain_name(model))


def for_the_backend(fields: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the fields of a request that are the backend's too: with its own name for the model,
    and without what opens the links to produced files."""
    others = {key: without_links(value) for key, value in fields.items() if key != "sandbox"}
    return {**others, "model": model}


def kept_names(fields: Mapping[str, Any]) -> str | None:
    """Return the first field of a Responses API request that names a conversation, an item or a
    container which the backend keeps, or None."""
    if fields.get("conversation"):
        return "conversation"
    items, tools = fields.get("input"), fields.get("tools")
    if isinstance(items, list):
        for index, item in enumerate(items):
            if isinstance(item, dict) and _names_item(item):
                return f"input[{index}]"
    if isinstance(tools, list):
        for index, tool in enumerate(tools):
            if isinstance(tool, dict) and _names_container(tool):
                return f"tools[{index}]"
    return None


def _names_item(item: Mapping[str, Any]) -> bool:
    return item.get("type") == _REFERENCE or ("id" in item and _NAMING.issuperset(item))


def _names_container(tool: Mapping[str, Any]) -> bool:
    environment = tool.get("environment")
    if isinstance(environment, dict) and environment.get("container_id"):
        return True
    return isinstance(tool.get("container"), str)
