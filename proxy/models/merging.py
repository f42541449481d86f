"""How one piece of a streamed JSON object adds to what came before. Pure."""

from collections.abc import Mapping
from typing import Any

MAX_FIELD_CHARS = 1 << 20
"""Of one text that is put together here: to add a piece costs as much as there is already."""
REPLACED = frozenset({"id", "index", "object", "role", "type", "format"})
"""Fields that are said again, not continued."""


def merge(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a piece's fields to the whole: texts, lists and objects go on, anything else replaces,
    null adds nothing. Raises ValueError for a text longer than `MAX_FIELD_CHARS`."""
    for key, new in piece.items():
        whole[key] = _merged(whole.get(key), new, key in REPLACED)


def _merged(old: Any, new: Any, replaced: bool) -> Any:
    if new is None:
        return old
    if isinstance(new, list):
        old = [] if not isinstance(old, list) or replaced else old
        old.extend(new)  # in place: log probabilities come by the thousand
        return old
    if isinstance(new, dict):
        old = {} if not isinstance(old, dict) or replaced else old
        merge(old, new)
        return old
    if isinstance(old, str) and isinstance(new, str) and not replaced:
        if len(old) + len(new) > MAX_FIELD_CHARS:
            raise ValueError(f"a field has more than {MAX_FIELD_CHARS} characters")
        return old + new
    return new
