"""Token counts of several model calls as one."""

from collections.abc import Mapping
from typing import Any


def add(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Every number summed, nested ones too; fields that only one side has are kept."""
    summed = dict(total)
    for key, value in more.items():
        before = summed.get(key)
        if _is_number(value) and _is_number(before):
            summed[key] = before + value
        elif isinstance(value, Mapping):
            summed[key] = add(before if isinstance(before, Mapping) else {}, value)
        elif value is not None:
            summed[key] = value
    return summed


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # and not bool, which is an int too


def tokens(usage: Mapping[str, Any], key: str) -> int:
    """One count of a usage report, 0 where it has none."""
    value = usage.get(key)
    return value if isinstance(value, int) else 0
