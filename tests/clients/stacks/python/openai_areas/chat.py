"""Helpers for chat completions."""

from typing import Any

from model import NAME, Dictation


def asked(said: Dictation, *parts: Any) -> dict[str, Any]:
    """Return the request for a dictation, after other content parts."""
    content = [*parts, {"type": "text", "text": said.words}] if parts else said.words
    return {"model": NAME, "messages": [{"role": "user", "content": content}]}


def ask(client: Any, said: Dictation, *parts: Any, **body: Any) -> Any:
    return client.chat.completions.create(**asked(said, *parts), **body)


def answer(completion: Any) -> str:
    text: str = completion.choices[0].message.content
    return text


def sandbox_of(completion: Any) -> dict[str, Any]:
    """Return the `sandbox` object of a completion."""
    sandbox: dict[str, Any] = completion.model_extra["sandbox"]
    return sandbox


def result(called: Any, content: str) -> dict[str, Any]:
    """Return the tool message for a call of the client's tool."""
    return {"role": "tool", "tool_call_id": called.id, "content": content}
