"""The scripted model behind the proxy, and the points at which it waits."""

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.openwebui.picture import png
from tests.fakes.backend import Held, Item, Refusal

NAME = "fake-model"
SQUARES = "Squares as a table and as a picture, please."
KEPT = "What is in the file that you kept?"
CLOCK = "Ask your clock, then go on with your work."
ENDLESS = "Work until I stop you."
SLOW = "Take your time."
TALK = "Tell me all the while what you do."
PICTURE = "What kind of file did I give you?"
TEXT = "How many rows did I give you?"
BROKEN = "Break."

TABLE = b"n,square\n1,1\n2,4\n3,9\n"
THOUGHT = "A table and a picture, then."
WORD = "heliotrope"
OUTPUT = "row 3 of many"
DONE = "It is done."
NARRATION = (
    "I count the rows of the table first, since nobody can tell how many there are without. " * 2
)
STORY = "Once there was a table, and it had rows, and nobody knew how many of them there were. " * 4
WRITTEN_PIECES = 24
"""Number of pieces of the story that are sent before the model waits."""
FAULT = "the engine died"
TITLE = "Squares of numbers"
FOLLOW_UP = "And the cubes?"
FOR_ITSELF = {"title": TITLE, "tags": ["Mathematics"], "follow_ups": [FOLLOW_UP]}
"""The answer to Open WebUI's own tasks."""
MAKE = (
    r"printf 'n,square\n1,1\n2,4\n3,9\n' > output/squares.csv; echo "
    f"{base64.b64encode(png()).decode()} | base64 -d > output/squares.png; echo {WORD} > kept.txt"
)

Completion = dict[str, Any]
Turn = Completion | Callable[[str], Completion]
"""A reply, or a function from the last observation to a reply."""


class Model:
    """Selects each reply by the question and the number of turns since."""

    def __init__(self, marker: str) -> None:
        self.may_go_on = {SQUARES: asyncio.Event(), SLOW: asyncio.Event(), TALK: asyncio.Event()}
        """Events that the model waits for after its first command, or inside a story."""
        self._scripts = {
            **SCRIPTS,
            ENDLESS: [_bash(f"seq -f 'row %g of many' 3; exec sleep {marker}")],
        }

    def answer(self, body: Mapping[str, Any]) -> Item:
        """Return the next reply."""
        messages = body["messages"]
        last = max(n for n, message in enumerate(messages) if message["role"] == "user")
        question_text = json.dumps(messages[last]["content"])
        if "### Task:" in question_text and "<chat_history>" in question_text:
            return text_reply(json.dumps(FOR_ITSELF))
        if BROKEN in question_text:
            return Refusal(400, FAULT)
        question = next(words for words in self._scripts if words in question_text)
        since = messages[last + 1 :]
        number = sum(message["role"] == "assistant" for message in since)
        turn = self._scripts[question][number]
        reply = turn(since[-1]["content"]) if callable(turn) else turn
        held = number == 1 and question in self.may_go_on
        pieces = WRITTEN_PIECES if question == TALK else 0
        return Held(reply, self.may_go_on[question], pieces) if held else reply


def _bash(command: str) -> Completion:
    return tool_reply(call("execute_bash", command=command))


def _submit(answer: str) -> Completion:
    return tool_reply(call("submit", answer=answer))


def _quote_last_line(observation: str) -> Completion:
    return _submit(said(observation.splitlines()[-1]))


def said(line: str) -> str:
    """Return the answer that quotes a line of command output."""
    return f"It says {line!r}."


_CLOCK = tool_reply(
    call("execute_bash", command=f"echo {WORD} > begun.txt"),
    call("get_current_timestamp"),
    content=NARRATION,
)
"""A sandbox tool call beside a call of Open WebUI's own tool, after some text."""
SCRIPTS: Mapping[str, Sequence[Turn]] = {
    SQUARES: [
        {"reasoning": THOUGHT, **_bash(MAKE)},
        _bash("cat output/squares.csv"),
        _submit("Here is [the table](/testbed/output/squares.csv)."),
    ],
    KEPT: [_bash("cat kept.txt"), _quote_last_line],
    CLOCK: [_CLOCK, _bash("cat begun.txt"), _quote_last_line],
    SLOW: [_bash("echo begun > output/begun.txt"), _submit(DONE)],
    TALK: [{**_bash("echo 3 rows"), "content": NARRATION}, text_reply(STORY)],
    PICTURE: [_bash("head -c 4 documents/* | tail -c 3"), _quote_last_line],
    TEXT: [_bash("cat documents/* 2>/dev/null | grep -c 'row [0-9]'"), _quote_last_line],
}
