"""The model behind the house: a story dictates what it says and hears what it was asked."""

import json
import os
import uuid
from typing import Any
from urllib.request import Request, urlopen

URL = os.environ["MODEL_URL"]
NAME = os.environ["MODEL"]
TIMEOUT_S = 30


def says(text: str, **reply: Any) -> dict[str, Any]:
    return {"content": text, **reply}


def calls(*named: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": given} for name, given in named]}


def bash(command: str) -> dict[str, Any]:
    return calls(("execute_bash", {"command": command}))


def submits(answer: str) -> dict[str, Any]:
    return calls(("submit", {"answer": answer}))


def held(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply that waits until it is let go."""
    return {"held": reply}


OF_NOTHING = "Exit code: 0\n(no output)"


def of(printed: str) -> str:
    """What the model is told of a command that printed this."""
    return f"Exit code: 0\n[stdout]\n{printed}"


class Dictation:
    """What the model is to say, turn by turn."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self._name = uuid.uuid4().hex
        self.words = f"Dictation {self._name}: {json.dumps(replies)}"
        """What the user says."""

    def asked(self, times: int = 0) -> list[dict[str, Any]]:
        """The bodies that the model was asked with, once it was that often."""
        found: list[dict[str, Any]] = _told(f"asked/{self._name}" + f"/{times}" * bool(times))
        return found

    def observed(self) -> list[str]:
        """What tools have told it, ours and the client's."""
        messages = self.asked()[-1]["messages"]
        return [said["content"] for said in messages if said["role"] == "tool"]

    def release(self) -> None:
        """Let go what is held."""
        _told(f"release/{self._name}")


def _told(path: str) -> Any:
    with urlopen(Request(f"{URL}/{path}"), timeout=TIMEOUT_S) as answer:
        return json.load(answer)
