"""Bodies of the backend's API on their way past the loop."""

from collections.abc import Mapping
from typing import Any

from policies.file_links import without_links
from policies.routing import PLAIN_SUFFIX, plain_name


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
