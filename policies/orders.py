"""Which of two values of a setting is the narrower."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from policies.egress import intersection, is_within
from policies.file_types import within


@dataclass(frozen=True, slots=True)
class Order:
    """How the values of one setting compare; the first value is always what is allowed."""

    words: str
    """What is narrower."""
    narrows: Callable[[Any, Any], bool]
    """Whether who is allowed the one may have the other."""
    both: Callable[[Any, Any], Any] | None = None
    """What both allow where neither narrows the other; without it, what is allowed."""


def narrows(path: str, allowed: Any, asked: Any) -> bool:
    """Whether who is allowed the one value of that setting may have the other."""
    return bool(asked == allowed or _order(path).narrows(allowed, asked))


def narrower(path: str, allowed: Any, asked: Any) -> Any:
    """What both values allow."""
    if narrows(path, allowed, asked):
        return asked
    both = _order(path).both
    return both(allowed, asked) if both and asked is not None else allowed


def in_words(path: str, allowed: Any) -> str:
    """What is narrower than the allowed value of that setting."""
    if path in ORDERS:
        return ORDERS[path].words
    return "`false`" if isinstance(allowed, bool) else "less"


def _order(path: str) -> Order:
    return ORDERS.get(path, _BY_TYPE)


def _only(value: object, words: str) -> Order:
    """The one that narrows the other."""
    return Order(words, lambda _, asked: bool(asked == value))


def _by_type(allowed: Any, asked: Any) -> bool:
    """A switch may be switched off, a number be smaller, and no bound be given one."""
    if isinstance(allowed, bool):
        return allowed
    if allowed is None:
        return True
    return asked is not None and isinstance(allowed, int | float) and bool(asked < allowed)


def _goes_on(allowed: tuple[Any, ...], asked: tuple[Any, ...]) -> bool:
    return asked[: len(allowed)] == allowed


def _joined(allowed: tuple[Any, ...], asked: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys((*allowed, *asked)))


def _shared(allowed: tuple[str, ...], asked: tuple[str, ...]) -> tuple[str, ...]:
    return _joined(within(asked, allowed), within(allowed, asked))


_BY_TYPE = Order("less", _by_type)
_FREE = Order("anything", lambda _, __: True)
_GROWING = Order("more, behind those there are", _goes_on, _joined)
ORDERS = {
    "computer": Order("the others, of `auto`", lambda allowed, _: bool(allowed == "auto")),
    "prompt": _FREE,
    "inputs.move_text_over_tokens": _FREE,
    "artifacts.list_files": _FREE,
    "isolation.level": _only("strict", "`strict`"),
    "isolation.egress": Order(
        "what reaches less", lambda allowed, asked: is_within(asked, allowed), intersection
    ),
    "artifacts.allow_types": Order(
        "fewer",
        lambda allowed, asked: (
            allowed is None or (asked is not None and within(asked, allowed) == asked)
        ),
        _shared,
    ),
    "artifacts.deny_types": Order(
        "more", lambda allowed, asked: within(allowed, asked) == allowed, _joined
    ),
    "watch.rules": _GROWING,
    "redact.secrets": _GROWING,
    "redact.patterns": _GROWING,
    "audit.enabled": _only(True, "`true`"),
    "audit.required": _only(True, "`true`"),
}
"""Where it is not as it is with most: see `_by_type`."""
