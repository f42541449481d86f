"""Parses the tool calls in a model's reply, malformed calls included, and the text in arguments
that are still incomplete."""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from policies.json_bounds import decode_json
from proxy.agent.history import text_of
from proxy.agent.model import MAX_CALLS, Message

_TAG = re.compile(r"<tool_call>\s*")
_FENCE = re.compile(r"```(?:json|tool_call|tool_code)?\s*\n\s*")
_DECODER = json.JSONDecoder()
_TAG_OR_END = re.compile(r"</?tool_call>")
NAME_KEYS = ("name", "tool")
"""Keys of the tool's name in a call written as JSON."""
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
"""Keys of the arguments in a call written as JSON."""
_UNIT = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}"
    r'|\\u[0-9a-fA-F]{0,3}(?=[^0-9a-fA-F])|\\[^u]|[^"\\]+'
)
"""Matches an escape sequence, a surrogate pair or plain characters inside a JSON string."""
_STRING_END = re.compile(r'"\s*(?:[,}]|\Z)')
"""Matches the end of a JSON string that is a value in an object."""
_CUT_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")
"""Matches the first half of a surrogate pair at the end of the text received so far."""
_SHOWN_CHARS = 200
"""Maximum number of characters of a malformed call that an observation quotes."""
_WrittenCall = tuple[str, Any] | str
"""Name and arguments of a call, or the text of a call that cannot be parsed."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One parsed tool call."""

    id: str
    name: str
    arguments: Any
    """Parsed JSON of any type; None if the arguments are invalid."""
    raw: Mapping[str, Any]
    """The entry of `tool_calls`, with the arguments as the model wrote them."""
    invalid_arguments: str = ""
    """The text of invalid arguments, or of a whole written call that cannot be parsed; else ""."""
    mistake: str | None = None
    """The observation for a call that is not run because it is invalid; else None."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A parsed reply: the message for the history, and the calls to run."""

    message: Message
    """The message as the backend sent it, with its calls repaired; see `repair_calls`."""
    calls: tuple[ToolCall, ...]
    calls_are_text: bool
    """True if the calls were written as text, so that no `tool` message can answer them."""
    has_more_calls: bool = False
    """True if the reply had more than `MAX_CALLS` calls; the rest was dropped."""


def keep_calls_of(turn: Turn, tool_names: Collection[str]) -> Turn:
    """Return the turn with only the calls of these tools."""
    kept = tuple(call for call in turn.calls if call.name in tool_names)
    if len(kept) == len(turn.calls):
        return turn
    message = {key: value for key, value in turn.message.items() if key != "tool_calls"}
    if kept and not turn.calls_are_text:
        entries = turn.message["tool_calls"]
        message["tool_calls"] = [
            entry for entry in entries if entry["function"]["name"] in tool_names
        ]
    return replace(
        turn, message=message, calls=kept, calls_are_text=turn.calls_are_text and bool(kept)
    )


def parse_turn(message: Message, tool_names: Collection[str], new_ids: Iterator[str]) -> Turn:
    """Return the parsed reply. `tool_names` are the names of all tools; `new_ids` yields ids for
    calls without a unique id."""
    entries = message.get("tool_calls")
    if isinstance(entries, list) and entries:
        has_more_calls = len(entries) > MAX_CALLS
        if has_more_calls:
            message = {**message, "tool_calls": entries[:MAX_CALLS]}
        fixed = repair_calls(message, new_ids)
        calls = tuple(parse_call(entry) for entry in fixed["tool_calls"])
        return Turn(fixed, calls, calls_are_text=False, has_more_calls=has_more_calls)
    written = _written_calls(text_of(message), tool_names)
    calls = tuple(_to_tool_call(call, next(new_ids)) for call in written[:MAX_CALLS])
    return Turn(message, calls, calls_are_text=bool(calls), has_more_calls=len(written) > MAX_CALLS)


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a call of a `custom` tool: the value of `input`, or the
    arguments themselves if `input` is missing or not a text."""
    parsed = _loads(arguments)
    text = parsed.get("input") if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments


def to_custom_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function call as a call of OpenAI's `custom` type."""
    function = call["function"]
    custom = {"name": function["name"], "input": custom_input(function["arguments"])}
    return {"id": call["id"], "type": "custom", "custom": custom}


def calls_known_tool(value: Any, tool_names: Collection[str]) -> bool:
    """Return True if a JSON value is a call of one of the tools, or a list with such a call."""
    return any(call[0] in tool_names for call in _as_calls(value) if isinstance(call, tuple))


def repair_calls(message: Message, new_ids: Iterator[str]) -> Message:
    """Return the message, or a copy with calls that backends accept in a prompt.

    A call without a unique id cannot be answered, and chat templates fail on arguments that are not
    a JSON object. Both would make the next request fail.
    """
    seen: set[str] = set()
    entries = []
    for entry in message["tool_calls"]:
        fixed = _repaired_entry(entry, seen, new_ids)
        seen.add(fixed["id"])
        entries.append(fixed)
    if entries == message["tool_calls"]:
        return message
    return {**message, "tool_calls": entries}


def _repaired_entry(entry: Any, seen_ids: set[str], new_ids: Iterator[str]) -> dict[str, Any]:
    fixed = dict(entry) if isinstance(entry, dict) else {}
    if not isinstance(fixed.get("id"), str) or not fixed["id"] or fixed["id"] in seen_ids:
        fixed["id"] = next(new_ids)
    function = fixed.get("function")
    function = fixed["function"] = dict(function) if isinstance(function, dict) else {}
    fixed.setdefault("type", "function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        function["name"] = "unknown"
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        function["arguments"] = json.dumps(arguments)
    elif arguments is None or arguments == "":
        function["arguments"] = "{}"  # some models call a tool without parameters like this
    elif not isinstance(arguments, str) or not isinstance(_loads(arguments), dict):
        function["arguments"] = json.dumps({"invalid_arguments": arguments})
    return fixed


def parse_call(entry: Mapping[str, Any]) -> ToolCall:
    """Return the call of a repaired entry of `tool_calls`."""
    function = entry["function"]
    arguments = _loads(function["arguments"])
    if isinstance(arguments, dict) and set(arguments) == {"invalid_arguments"}:
        invalid = arguments["invalid_arguments"]
        written = invalid if isinstance(invalid, str) else json.dumps(invalid)
        raw = {**entry, "function": {**function, "arguments": written}}
        return ToolCall(
            entry["id"], function["name"], None, raw, written, _arguments_mistake(written)
        )
    return ToolCall(entry["id"], function["name"], arguments, entry)


def _arguments_mistake(invalid_arguments: str) -> str:
    shown = invalid_arguments[:_SHOWN_CHARS]
    try:
        value = json.loads(invalid_arguments)
    except (ValueError, RecursionError) as error:
        return (
            f"The arguments are not valid JSON ({error}), so nothing was run: {shown!r}. Call the"
            ' tool again with a JSON object; inside strings write \\n for a newline and \\" for a'
            " quote."
        )
    return (
        f"The arguments must be a JSON object, got {type(value).__name__}, so nothing was run:"
        f" {shown!r}. Call the tool again with its parameters by name."
    )


def _loads(text: str) -> Any:
    try:
        return decode_json(text)
    except (ValueError, RecursionError):
        return None


def _written_calls(text: str, tool_names: Collection[str]) -> list[_WrittenCall]:
    """Return the calls written as text: in tags, in tags with the tool's name, in code fences, or
    as the only text."""
    if tagged := _json_after_each_match(_TAG, text):
        # A tag always means a call, so the model gets an observation if it cannot be parsed.
        return _distinct_calls(
            _as_calls(value) or [_text_up_to_tag(text, at)] for value, at in tagged
        )
    if named := _distinct_calls([call] for call in _named_tag_calls(text, tool_names)):
        return named
    candidates = [value for value, _ in _json_after_each_match(_FENCE, text)] or [
        _loads(text.strip())
    ]
    found = _distinct_calls(_as_calls(value) for value in candidates)
    return [call for call in found if isinstance(call, tuple) and call[0] in tool_names]


def _json_after_each_match(opening: "re.Pattern[str]", text: str) -> list[tuple[Any, int]]:
    """Return a pair for each match of `opening`: the JSON value that follows the match (None if
    there is none), and the offset at which the match ends."""
    found = []
    position = 0
    while start := opening.search(text, position):
        try:
            value, position = _DECODER.raw_decode(text, start.end())
        except (ValueError, RecursionError):
            value, position = None, start.end()
        found.append((value, start.end()))
    return found


def _named_tag_calls(text: str, tool_names: Collection[str]) -> Iterator[_WrittenCall]:
    """Yield the calls written as `<name>{arguments}`."""
    if not tool_names or "<" not in text:
        return
    opening = rf"<({'|'.join(map(re.escape, tool_names))})>\s*(?=\{{)"
    for tag in re.finditer(opening, text):
        try:
            value, _ = _DECODER.raw_decode(text, tag.end())
        except (ValueError, RecursionError):
            continue
        call = _as_call(value)
        if call and call[0] in tool_names:
            yield call
        elif not _is_call_of_other_tool(value):
            yield tag[1], value


def _is_call_of_other_tool(value: dict[str, Any]) -> bool:
    """Return True if an object is a call of another tool instead of the arguments of a call: its
    first key is in NAME_KEYS, and a key is in ARGUMENT_KEYS."""
    named = next(iter(value), "") in NAME_KEYS
    return named and not value.keys().isdisjoint(ARGUMENT_KEYS)


def _text_up_to_tag(text: str, at: int) -> str:
    """Return the text from `at` to the next tag."""
    end = _TAG_OR_END.search(text, at)
    return text[at : end.start() if end else None].strip()


def _distinct_calls(call_groups: Iterable[list[_WrittenCall]]) -> list[_WrittenCall]:
    calls: list[_WrittenCall] = []
    for call in itertools.chain.from_iterable(call_groups):
        if call not in calls:
            calls.append(call)
        if len(calls) > MAX_CALLS:
            break  # one more than the maximum shows that there are more
    return calls


def _as_calls(value: Any) -> list[_WrittenCall]:
    values = value if isinstance(value, list) else [value]
    return [call for call in map(_as_call, values) if call]


def _as_call(value: Any) -> tuple[str, Any] | None:
    """Return the name and the arguments of a tool call, or None if the value is no call.

    Accepts `{"name": …, "arguments": …}`, also inside `function`, and `{"name": …, "path": …}` with
    the arguments beside the name. `tool` or `function` may stand for `name`, and any of
    ARGUMENT_KEYS for `arguments`. The arguments need not be an object; an invalid JSON text gives
    None as the arguments.
    """
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") or value.get("tool") or value.get("function")
    if not isinstance(name, str):
        return None
    for key in ARGUMENT_KEYS:
        if key in value:
            arguments = value[key]
            return name, _loads(arguments) if isinstance(arguments, str) else arguments
    return name, {k: v for k, v in value.items() if k not in ("name", "tool", "function", "type")}


def _to_tool_call(written_call: _WrittenCall, id: str) -> ToolCall:
    if isinstance(written_call, str):
        mistake = (
            f"This is no tool call: {written_call[:_SHOWN_CHARS]!r}. Write one JSON object with the"
            ' tool\'s name and its arguments: {"name": ..., "arguments": {...}}.'
        )
        return ToolCall(id, "unknown", None, {}, written_call, mistake)
    name, arguments = written_call
    text = json.dumps(arguments if isinstance(arguments, dict) else {})
    raw = {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
    return ToolCall(id, name, arguments, raw)


class TextArgumentReader:
    """Reads the text in a call's arguments, `{"<name>": "…"}`, while they arrive."""

    def __init__(self, name: str) -> None:
        self._start_pattern = re.compile(rf'\A\s*\{{\s*"{name}"\s*:\s*"')
        self._head = f'{{"{name}":"'
        self._pending = ""
        self._state = "before"
        self.text = ""
        """The text so far."""

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments. Return the text that it completes."""
        self._pending += arguments
        if self._state == "before":
            self._look_for_start()
        if self._state != "inside":
            return ""
        piece = self._take_text()
        self.text += piece
        return piece

    @property
    def is_complete(self) -> bool:
        """True if `text` is everything that arrived of the string: up to the quote that ends it
        (the next character is a comma, a brace or the end of the arguments), or up to the point
        where the arguments are cut off. False if the string has not begun, or if the reading
        stopped too early, at a quote that the model forgot to escape."""
        return self._state == "inside" or bool(_STRING_END.match(self._pending))

    def _look_for_start(self) -> None:
        if start := self._start_pattern.match(self._pending):
            self._pending = self._pending[start.end() :]
            self._state = "inside"
        elif not self._head.startswith("".join(self._pending.split())):
            self._state = "after"  # not a text: the complete arguments are parsed later

    def _take_text(self) -> str:
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
        return "".join(_unescape(unit) for unit in units)


def recover_answer(arguments: str) -> str:
    """Return the answer in arguments of `submit` that are cut off or wrongly escaped, or "" if no
    answer can be read from them."""
    stream = TextArgumentReader("answer")
    stream.feed(arguments)
    return stream.text if stream.is_complete else ""


def _unescape(unit: str) -> str:
    try:
        return str(json.loads(f'"{unit}"', strict=False))
    except ValueError:
        return unit  # not a JSON escape, such as the \\( of LaTeX: taken literally
