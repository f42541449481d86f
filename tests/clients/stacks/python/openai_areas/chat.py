"""Helpers for chat completions."""

from typing import Any

from model import NAME, Script


def chat_request(script: Script, *parts: Any) -> dict[str, Any]:
    """Return the request body with a script's prompt after other content parts."""
    content = [*parts, {"type": "text", "text": script.prompt}] if parts else script.prompt
    return {"model": NAME, "messages": [{"role": "user", "content": content}]}


def ask(client: Any, script: Script, *parts: Any, **body: Any) -> Any:
    return client.chat.completions.create(**chat_request(script, *parts), **body)


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
