"""JSON that every client can read."""

import json
from typing import Any


def json_text(value: Any) -> str:
    """One line of ASCII without halves of surrogate pairs, which some parsers refuse."""
    return json.dumps(json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace")))
