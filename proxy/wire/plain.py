"""`<model>:plain` in the body of any request of the backend's API."""

import json

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
    others = {key: value for key, value in fields.items() if key != "sandbox"}
    return json.dumps({**others, "model": model.removesuffix(PLAIN_SUFFIX)}).encode()
