"""Kinds of files, as settings name them: by media type or by the ending of a name."""

import re
from collections.abc import Collection

from policies.file_names import as_saved, type_of

_PATTERN = re.compile(r"\.[a-z0-9]{1,16}|[a-z0-9.+-]{1,60}/(?:\*|[a-z0-9.+-]{1,100})")


def check_types(patterns: Collection[str]) -> None:
    """Raises ValueError for one that means nothing."""
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern):
            known = "an ending (.csv) nor a type (text/csv, image/*)"
            raise ValueError(f"{pattern!r} is neither {known}")


def is_of(path: str, patterns: Collection[str]) -> bool:
    """Whether one of them names the file at that path."""
    name = as_saved(path).lower()
    return any(_names(pattern, name, type_of(path)) for pattern in patterns)


def within(patterns: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    """Those that name nothing but what one of the others names too."""
    return tuple(each for each in patterns if any(_covers(other, each) for other in others))


def _names(pattern: str, path: str, mime_type: str) -> bool:
    if pattern.startswith("."):
        return path.endswith(pattern)
    return _covers(pattern, mime_type)


def _covers(pattern: str, other: str) -> bool:
    wide, star, _ = pattern.partition("*")
    return pattern == other or bool(star and other.startswith(wide))
