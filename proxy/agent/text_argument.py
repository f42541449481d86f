"""A text read out of a tool call's arguments while the model still writes them."""

import json
import re

_UNIT = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}"
    r'|\\u[0-9a-fA-F]{0,3}(?=[^0-9a-fA-F])|\\[^u]|[^"\\]+'
)
_END = re.compile(r'"\s*(?:[,}]|\Z)')
_CUT_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")


class TextArgument:
    """Fed with pieces of `{"<name>": "…"}`, gives back the pieces of the text inside."""

    def __init__(self, name: str) -> None:
        self._start = re.compile(rf'\A\s*\{{\s*"{name}"\s*:\s*"')
        self._head = f'{{"{name}":"'
        self._pending = ""
        self._state = "before"
        self.text = ""
        """What has been read so far."""

    def feed(self, arguments: str) -> str:
        """The part of the text that this piece completes."""
        self._pending += arguments
        if self._state == "before":
            self._look_for_start()
        if self._state != "inside":
            return ""
        piece = self._take()
        self.text += piece
        return piece

    @property
    def is_whole(self) -> bool:
        """Whether what has been read is the text, as far as it was written: no stray quote ended
        it."""
        return self._state == "inside" or bool(_END.match(self._pending))

    def _look_for_start(self) -> None:
        if start := self._start.match(self._pending):
            self._pending = self._pending[start.end() :]
            self._state = "inside"
        elif not self._head.startswith("".join(self._pending.split())):
            self._state = "after"  # another argument, or no text: it is read at the end

    def _take(self) -> str:
        position = 0
        units = []
        while unit := _UNIT.match(self._pending, position):
            if _CUT_PAIR.match(self._pending, position):
                break  # half of a surrogate pair
            units.append(unit.group())
            position = unit.end()
        self._pending = self._pending[position:]
        if self._pending.startswith('"'):
            self._state = "after"
        return "".join(_unescaped(unit) for unit in units)


def recovered_answer(arguments: str) -> str:
    """The answer in arguments that are not valid JSON, cut off or wrongly escaped; or ""."""
    stream = TextArgument("answer")
    stream.feed(arguments)
    return stream.text if stream.is_whole else ""


def _unescaped(unit: str) -> str:
    try:
        return str(json.loads(f'"{unit}"', strict=False))
    except ValueError:
        return unit  # no escape of JSON's, such as the \\( of LaTeX: meant literally
