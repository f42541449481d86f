"""The visible prose of one reply: when it may be shown, and when the reply must end."""

import json
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from policies.prices import CHARS_PER_TOKEN
from policies.reply_checks import EchoCheck, ProxyTexts, RepetitionCheck
from proxy.agent.events import TextDelta
from proxy.agent.model import CompletionStopped
from proxy.agent.tool_calls import ARGUMENT_KEYS, NAME_KEYS, calls_known_tool

HOLD_CHARS = 160
"""Number of characters up to which prose is held back: most narration before a tool call is
shorter."""
HOLD_S = 1.0
"""Maximum time that prose is held back, in seconds, so that a stream does not seem to hang."""
MAX_HELD_STOP_CHARS = 256
"""Maximum number of characters held back because a stop string may begin there. The limit bounds
the search for each piece; a longer stop string may be shown in part."""
LONG_PIECE_CHARS = 12
"""Average number of characters above which pieces are assumed to contain several tokens each.
Engines normally send one token per piece."""
_DECODER = json.JSONDecoder()
_TAG = "<tool_call>"
_FENCE = re.compile(r"```(\w*)[ \t]*(?:\n\s*|\Z)|`{1,2}\Z")
_CALL_FENCE_LANGUAGES = ("", "json", "tool_call", "tool_code")
_FIRST_KEY = re.compile(r'\s*(?:\[\s*)?\{\s*(?:"([^"]*)("\s*(?::\s*(?:"([^"]*)(")?)?)?)?)?')
_SECOND_KEY = re.compile(rf'\s*,\s*"(?:{"|".join(ARGUMENT_KEYS)})"\s*:')
"""Matches the key of a call's arguments after the tool's name."""
_ARGUMENTS = re.compile(r'\s*(?:\{\s*(?:["}]|\Z)|\Z)')
"""Matches the beginning of a call's arguments, or the end of the text."""
_CALL_KEYS = frozenset({*NAME_KEYS, *ARGUMENT_KEYS, "function", "type", "id"})


@dataclass(frozen=True, slots=True)
class ProseRules:
    """The limits of a run's visible prose, and the texts that must not appear in it."""

    max_tokens: int | None = None
    """The client's token limit for visible prose."""
    stop_strings: tuple[str, ...] = ()
    """The client's stop strings."""
    proxy_texts: ProxyTexts = field(default_factory=lambda: ProxyTexts(()))
    """The proxy's own texts. A reply that repeats them is ended."""
    client_texts: Sequence[str] = ()
    """The texts of the client's messages, which replies may quote."""
    tool_names: Collection[str] = ()
    ends_replies: bool = True
    """True if a reply that repeats itself or the proxy's own texts is ended."""


UNCHECKED_RULES = ProseRules(ends_replies=False)


@lru_cache(maxsize=16)
def build_proxy_texts(prompts: tuple[str, ...], instructions: tuple[str, ...]) -> ProxyTexts:
    """Return the ProxyTexts of these texts. Cached, because building a ProxyTexts takes
    milliseconds."""
    return ProxyTexts(prompts, instructions)


class Prose:
    """The visible prose of one reply while it arrives.

    Pieces are held until `take_ready_deltas` returns them, so that no tool call written as text,
    none of the proxy's own texts and no beginning of a stop string is shown.
    """

    def __init__(
        self, rules: ProseRules, *, max_chars: int | None = None, ends_at_echo: bool = True
    ) -> None:
        """`max_chars` is the maximum length of the prose in a reply to the proxy's request for a
        tool call, in characters; None: no limit. If `ends_at_echo` is False, a reply that repeats
        the proxy's own texts is not ended, because a tool call may follow, but its prose is
        dropped."""
        self.rules = rules
        self._max_chars = max_chars
        self._ends_at_echo = ends_at_echo
        self._echo_check = EchoCheck(rules.proxy_texts, rules.client_texts)
        self._repetition_check = RepetitionCheck()
        self._pieces: list[str] = []
        self._held_deltas: deque[TextDelta] = deque()
        self._held_chars = 0
        self._has_held_text = False
        """True if the held text is more than white space."""
        self._call_offset = 0
        """Offset in the held text at which a written tool call may begin, as of the last search. No
        call begins before it, so the next search begins there."""
        self._search_at_chars = 0
        """Length of the held text at which to search for a call again."""
        self._chars = 0
        self._tail = ""
        """The end of the text, in which a stop string may begin."""
        self.is_shown = False
        """True once `take_ready_deltas` or `take_remaining_deltas` has returned a piece."""
        self.is_echo = False
        """True once the prose has repeated one of the proxy's own texts."""

    def empty_with_same_rules(self) -> "Prose":
        """Return an empty Prose with the same rules."""
        return Prose(self.rules, max_chars=self._max_chars, ends_at_echo=self._ends_at_echo)

    @property
    def text(self) -> str:
        """The prose so far."""
        return "".join(self._pieces)

    def add(self, delta: TextDelta) -> None:
        """Add a piece. Raises CompletionStopped if the reply has to end; `text` is then the final
        text."""
        piece = delta.text
        if self.rules.stop_strings and (found := self._find_stop(piece)):
            at, stop = found
            kept = piece[: max(0, at - self._chars)]
            self._append_delta(TextDelta(kept, delta.logprobs))
            self._trim(at)
            raise CompletionStopped("stop", stop)
        self._append_delta(delta)
        if self.rules.ends_replies:
            self._raise_if_repetitive(piece)
        limit = self.rules.max_tokens
        if limit is not None and self.tokens >= limit and not self._may_be_call():
            raise CompletionStopped("max_tokens")
        most = self._max_chars
        if most is not None and self._chars > most and not self._may_be_call():
            raise CompletionStopped("no_call")

    def _raise_if_repetitive(self, piece: str) -> None:
        self.is_echo = self.is_echo or self._echo_check.add_and_check(piece)
        if self.is_echo and self._ends_at_echo:
            raise CompletionStopped("echo")
        if self._repetition_check.add_and_check(piece):
            raise CompletionStopped("runaway")

    def is_echo_at_end(self) -> bool:
        """Return True if the complete prose repeats one of the proxy's own texts. Call at the end
        of the reply."""
        if self._chars and self.rules.ends_replies:
            self.is_echo = self.is_echo or self._echo_check.add_and_check("", at_end=True)
        return self.is_echo

    @property
    def tokens(self) -> int:
        """The estimated number of tokens so far."""
        return estimated_tokens(len(self._pieces), self._chars)

    def take_ready_deltas(self, *, is_hold_over: bool = False) -> list[TextDelta]:
        """Return the pieces that may be shown now. `is_hold_over` is True after HOLD_S."""
        if not self._held_deltas or self._echo_check.is_suspect or self.is_echo:
            return []
        if not (self.is_shown or is_hold_over or self._held_chars >= HOLD_CHARS):
            return []
        if not (self.is_shown or self._has_held_text):
            return []
        return self._release(min(self._possible_call_offset(), self._possible_stop_offset()))

    def take_remaining_deltas(self) -> list[TextDelta]:
        """Return all held pieces; none if the prose is an echo. Call at the end of the reply."""
        return [] if self.is_echo else self._release(self._held_chars)

    def _release(self, chars: int) -> list[TextDelta]:
        released: list[TextDelta] = []
        while self._held_deltas and len(self._held_deltas[0].text) <= chars:
            delta = self._held_deltas.popleft()
            chars -= len(delta.text)
            self._held_chars -= len(delta.text)
            self._call_offset = max(0, self._call_offset - len(delta.text))
            self._search_at_chars = 0
            if not self.is_shown:
                if not delta.text.strip():
                    continue  # leading white space is dropped
                delta = TextDelta(delta.text.lstrip(), delta.logprobs)
            self.is_shown = True
            released.append(delta)
        return released

    def _append_delta(self, delta: TextDelta) -> None:
        self._pieces.append(delta.text)
        self._held_deltas.append(delta)
        self._held_chars += len(delta.text)
        self._has_held_text = self._has_held_text or bool(delta.text.strip())
        self._chars += len(delta.text)

    def _find_stop(self, piece: str) -> tuple[int, str] | None:
        """Return the position of the first stop string in the text, and the string, or None."""
        text = self._tail + piece
        found = [(at, stop) for stop in self.rules.stop_strings if (at := text.find(stop)) >= 0]
        begins_at = self._chars - len(self._tail)
        longest = max(map(len, self.rules.stop_strings))
        self._tail = text[-(longest - 1) :] if longest > 1 else ""
        if not found:
            return None
        at, stop = min(found)
        return begins_at + at, stop

    def _trim(self, chars: int) -> None:
        """Drop the text beyond the first `chars` characters, which was not shown yet."""
        self._pieces = [self.text[:chars]]
        over = self._chars - chars
        while over > 0 and self._held_deltas:
            last = self._held_deltas.pop()
            kept = last.text[: max(0, len(last.text) - over)]
            over -= len(last.text) - len(kept)
            self._held_chars -= len(last.text) - len(kept)
            if kept:
                self._held_deltas.append(TextDelta(kept, last.logprobs))
        self._chars = chars
        self._call_offset = self._search_at_chars = 0

    def _possible_stop_offset(self) -> int:
        """Return the offset in the held text at which a stop string may begin, or the length of the
        held text."""
        longest = min(self._held_chars, len(self._tail), MAX_HELD_STOP_CHARS)
        for size in range(longest, 0, -1):
            end = self._tail[-size:]
            if any(stop.startswith(end) for stop in self.rules.stop_strings):
                return self._held_chars - size
        return self._held_chars

    def _may_be_call(self) -> bool:
        return self._possible_call_offset() < self._held_chars

    def _possible_call_offset(self) -> int:
        """Return the offset in the held text at which a written tool call may begin, or the length
        of the held text."""
        if self._held_chars >= self._search_at_chars:
            held = "".join(delta.text for delta in self._held_deltas)
            before, text = held[: self._call_offset], held[self._call_offset :]
            is_alone = not (self.is_shown or before.strip())
            self._call_offset += self._find_call(text, is_alone=is_alone)
            # A search is linear in the text of the possible call, so it is repeated only after each
            # growth by 1/8.
            self._search_at_chars = len(held) + (len(held) - self._call_offset) // 8
        return self._call_offset

    def _find_call(self, text: str, *, is_alone: bool) -> int:
        """Return the offset at which a call may begin in a part of the held text. `is_alone` is
        True if no text precedes the part."""
        tool_names = self.rules.tool_names
        ends = [
            len(text),
            _tag_offset(text),
            *(_named_tag_offset(text, name, tool_names) for name in tool_names),
        ]
        if is_alone and _may_be_call_object(text, tool_names, must_be_alone=True):
            ends.append(0)
        ends += [
            match.start()
            for match in _FENCE.finditer(text)
            if match[1] is None or _fence_may_hold_call(match, text, tool_names)
        ]
        return min(ends)


def estimated_tokens(pieces: int, chars: int) -> int:
    """Return the estimated tokens of a text: one per piece, more if the pieces are long."""
    if chars <= LONG_PIECE_CHARS * pieces:
        return pieces
    return max(pieces, chars // CHARS_PER_TOKEN)


def _tag_offset(held_text: str) -> int:
    if (at := held_text.find(_TAG)) >= 0:
        return at
    for size in range(min(len(_TAG) - 1, len(held_text)), 0, -1):
        if _TAG.startswith(held_text[-size:]):
            return len(held_text) - size
    return len(held_text)


def _named_tag_offset(held_text: str, name: str, tool_names: Collection[str]) -> int:
    """Return the offset at which `<name>{arguments}` may begin in the held text, or the length of
    the held text."""
    tag, at = f"<{name}>", -1
    while (at := held_text.find("<", at + 1)) >= 0:
        begun = held_text[at : at + len(tag)]
        inside = at + len(begun)
        may_be_tag = tag.startswith(begun) and _ARGUMENTS.match(held_text, inside)
        if may_be_tag and not _calls_unknown_tool(held_text, inside, tool_names):
            return at
    return len(held_text)


def _calls_unknown_tool(text: str, at: int, tool_names: Collection[str]) -> bool:
    """Return True if the first two keys of the object at `at` make it a call of an unknown tool."""
    match = _FIRST_KEY.match(text, at)
    if match is None or match[1] not in NAME_KEYS or not match[4]:
        return False
    return match[3] not in tool_names and _SECOND_KEY.match(text, match.end()) is not None


def _fence_may_hold_call(
    match: "re.Match[str]", held_text: str, tool_names: Collection[str]
) -> bool:
    language, inside = match[1], held_text[match.end() :]
    if match.end() == len(held_text) and not match.group().endswith("\n"):
        return any(each.startswith(language) for each in _CALL_FENCE_LANGUAGES)
    return language in _CALL_FENCE_LANGUAGES and (
        not inside.strip() or _may_be_call_object(inside, tool_names)
    )


def _may_be_call_object(
    text: str, tool_names: Collection[str], *, must_be_alone: bool = False
) -> bool:
    """Return True if a text begins with a tool call in JSON, or with an incomplete object that may
    become a call, judging by its first key and the tool's name. With `must_be_alone`, no other text
    may follow the call."""
    begun = text.strip()
    if not begun or begun[0] not in "{[":
        return False
    try:
        value, end = _DECODER.raw_decode(begun)
    except (ValueError, RecursionError):
        return _may_become_call(begun, tool_names)
    return calls_known_tool(value, tool_names) and not (must_be_alone and begun[end:].strip())


def _may_become_call(text: str, tool_names: Collection[str]) -> bool:
    match = _FIRST_KEY.match(text)
    if match is None:
        return text == "["
    key, key_ended, value, value_ended = match.groups()
    if key is None:
        return match.end() == len(text)
    if not key_ended:
        return any(each.startswith(key) for each in _CALL_KEYS)
    if key in NAME_KEYS and value is not None:
        return (
            value in tool_names
            if value_ended
            else any(name.startswith(value) for name in tool_names)
        )
    return key in _CALL_KEYS
