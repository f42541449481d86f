"""Access to the scripted model behind the proxy: send its replies and read its requests."""

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
    """Return a reply that is held until `release` is called."""
    return {"held": reply}


EMPTY_OBSERVATION = "Exit code: 0\n(no output)"


def stdout_observation(text: str) -> str:
    """Return the observation of a command that wrote this text to stdout."""
    return f"Exit code: 0\n[stdout]\n{text}"


class Script:
    """The replies of the model, one for each turn."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self._name = uuid.uuid4().hex
        self.prompt = f"Script {self._name}: {json.dumps(replies)}"
        """The prompt that contains the script."""

    def requests(self, count: int = 0) -> list[dict[str, Any]]:
        """Return the request bodies that the model received, after waiting for `count` of them."""
        found: list[dict[str, Any]] = _get_json(
            f"requests/{self._name}" + f"/{count}" * bool(count)
        )
        return found

    def observations(self) -> list[str]:
        """Return the tool results of the last request, of sandbox tools and client tools."""
        messages = self.requests()[-1]["messages"]
        return [message["content"] for message in messages if message["role"] == "tool"]

    def release(self) -> None:
        """Release the held reply."""
        _get_json(f"release/{self._name}")


def _get_json(path: str) -> Any:
    with urlopen(Request(f"{URL}/{path}"), timeout=TIMEOUT_S) as answer:
        return json.load(answer)
