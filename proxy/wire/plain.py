"""`<model>:plain` in the body of any request of the backend's API."""

import json
from collections.abc import Mapping
from typing import Any

from policies.routing import PLAIN_SUFFIX


def as_the_backend_knows_it(body: bytes) -> bytes | None:
    """The body with the backend's own name for the model. None if it names none as plain: it is to
    be left as it is."""
    if PLAIN_SUFFIX.encode() not in body:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model = fields.get("model") if isinstance(fields, dict) else None
    if not isinstance(model, str) or not model.endswith(PLAIN_SUFFIX):
        return None
    return json.dumps(renamed(fields, model.removesuffix(PLAIN_SUFFIX))).encode()


def renamed(fields: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The fields of a request that are the backend's too, with its own name for the model."""
    others = {key: value for key, value in fields.items() if key != "sandbox"}
    return {**others, "model": model}
