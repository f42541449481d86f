"""Tool calls out of their streamed pieces. Pure."""

from collections.abc import Mapping
from typing import Any

from proxy.agent.events import ModelDelta, ToolCallDelta
from proxy.agent.model import MAX_CALLS
from proxy.models.backend_errors import bad_response
from proxy.models.merging import merge

MAX_ARGUMENTS_CHARS = 64 << 20
"""Of all calls of one reply together."""
MAX_NAME_CHARS = 4096
"""The length of a function's name."""


class ToolCallAssembly:
    """Puts the pieces of a reply's tool calls together, however a backend numbers them."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._chars = 0

    def add(self, pieces: list[dict[str, Any]]) -> list[ModelDelta]:
        """Take the `tool_calls` of one delta in; gives what they add."""
        deltas: list[ModelDelta] = []
        for piece in pieces:
            if len(self._calls) > MAX_CALLS:
                break  # whoever hears of one too many ends the reply
            call = self._call_of(piece)
            arguments = call.add(piece)
            self._chars += len(arguments)
            if self._chars > MAX_ARGUMENTS_CHARS:
                raise bad_response(f"its calls have more than {MAX_ARGUMENTS_CHARS} characters")
            if arguments or (piece.get("function") or {}).get("name"):
                deltas.append(ToolCallDelta(self._calls.index(call), call.name, arguments))
        return deltas

    def whole(self) -> list[dict[str, Any]]:
        """The calls as an assistant message lists them."""
        return [call.whole() for call in self._calls]

    def _call_of(self, piece: Mapping[str, Any]) -> "_Call":
        index = piece.get("index")
        started = [call for call in self._calls if index is None or call.index == index]
        if started and not started[-1].is_over_before(piece):
            return started[-1]
        call = _Call(index)
        self._calls.append(call)
        return call


class _Call:
    def __init__(self, index: int | None) -> None:
        self.index = index
        self.name = ""
        self._arguments: list[str] = []
        self._fields: dict[str, Any] = {}
        self._function: dict[str, Any] = {}

    def is_over_before(self, piece: Mapping[str, Any]) -> bool:
        """Whether the piece opens another call. Gemini numbers parallel calls all 0 and some
        servers number none: then a name with another id, or a name after arguments, is a new call.
        An id alone is no sign, since old vLLM made up a new one for every piece."""
        if not (piece.get("function") or {}).get("name"):
            return False
        old_id, new_id = self._fields.get("id"), piece.get("id")
        if old_id and new_id:
            return bool(old_id != new_id)
        return piece.get("index") is None and bool(self._arguments)

    def add(self, piece: Mapping[str, Any]) -> str:
        """Take the piece in; gives the arguments it adds."""
        function = dict(piece.get("function") or {})
        name, arguments = function.pop("name", None), function.pop("arguments", None)
        if name and name != self.name:  # some servers repeat the name in every piece
            if len(self.name) + len(name) > MAX_NAME_CHARS:
                raise bad_response(f"a call names a function of over {MAX_NAME_CHARS} characters")
            self.name += name
        merge(self._function, function)
        known = ("index", "function", "id") if self._fields.get("id") else ("index", "function")
        merge(self._fields, {key: piece[key] for key in piece if key not in known})
        if not isinstance(arguments, str):
            return ""
        self._arguments.append(arguments)
        return arguments

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self._arguments), **self._function}
        return {"type": "function", **self._fields, "function": function}
