"""Asking for a chat completion, whole or streamed."""

from typing import Any

from model import NAME, Dictation


def asked(said: Dictation, *parts: Any) -> dict[str, Any]:
    """The words of a dictation, after parts that are no words."""
    content = [*parts, {"type": "text", "text": said.words}] if parts else said.words
    return {"model": NAME, "messages": [{"role": "user", "content": content}]}


def ask(client: Any, said: Dictation, *parts: Any, **body: Any) -> Any:
    return client.chat.completions.create(**asked(said, *parts), **body)


def answer(completion: Any) -> str:
    text: str = completion.choices[0].message.content
    return text


def told(completion: Any) -> dict[str, Any]:
    """What stands beside the answer."""
    sandbox: dict[str, Any] = completion.model_extra["sandbox"]
    return sandbox


def result(called: Any, content: str) -> dict[str, Any]:
    """The answer to a call of the client's own tool."""
    return {"role": "tool", "tool_call_id": called.id, "content": content}
