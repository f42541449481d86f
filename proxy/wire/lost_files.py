"""Uploads named by what was said before: they may be kept no more, and who goes on from it by name
cannot leave them out."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

Item = Mapping[str, Any]
LOST = "[A file that was given here was deleted since, or has expired.]"


def file_ids(items: Iterable[Item]) -> set[str]:
    """The uploads that items name."""
    named = (part.get("file_id") for item in items for part in _parts(item)[1])
    return {file_id for file_id in named if isinstance(file_id, str)}


def without_files(items: Sequence[Item], lost: Collection[str]) -> list[Item]:
    """The items, with a word in the place of each of these uploads."""
    return [_without(item, lost) if file_ids([item]).intersection(lost) else item for item in items]


def _without(item: Item, lost: Collection[str]) -> Item:
    place, parts = _parts(item)
    word = {"type": "input_text", "text": LOST}
    return {**item, place: [word if part.get("file_id") in lost else part for part in parts]}


def _parts(item: Item) -> tuple[str, Sequence[Item]]:
    """Where its parts stand, and these; what is kept was checked when it came."""
    place = "output" if str(item.get("type")).endswith("_output") else "content"
    parts = item.get(place)
    return place, parts if isinstance(parts, list) else []
