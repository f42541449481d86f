"""Readers of the recorded utility requests of clients and of the natural prompts."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from proxy.schemas.messages_request import as_chat

_HERE = Path(__file__).parent


class Recorded(NamedTuple):
    """A utility request that a client sends without its user, such as one for a chat title."""

    client: str
    body: dict[str, Any]
    """Body of the chat completion request, after translation from another API."""
    headers: dict[str, str]


def recorded_requests() -> list[Recorded]:
    """Read utility_requests.yaml."""
    entries = yaml.safe_load((_HERE / "utility_requests.yaml").read_text(encoding="utf-8"))
    return [
        Recorded(
            entry["client"],
            as_chat({"model": "m", **entry["body"]}).chat
            if entry.get("api") == "messages"
            else {"model": "m", **entry["body"]},
            entry.get("headers", {}),
        )
        for entry in entries
    ]


def natural_prompts() -> list[str]:
    """Read natural_prompts.yaml."""
    prompts: list[str] = yaml.safe_load(
        (_HERE / "natural_prompts.yaml").read_text(encoding="utf-8")
    )
    return prompts
