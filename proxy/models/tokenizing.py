"""What servers with a tokenizer are asked and say: vLLM's, SGLang's and llama.cpp's `/tokenize`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from proxy.errors import BackendError
from proxy.models.backend_errors import parsed

PATH = "/tokenize"
NOT_THERE = (404, 405, 501)
"""What a server says that does not have a path."""


Dialect = Literal["prompt", "content"]
"""What the text is called: `content` by llama.cpp, which then tells the tokens themselves, and says
that a request without has none."""


@dataclass(slots=True)
class Tokenizer:
    """What is known of a server's."""

    is_there: bool = True
    dialect: Dialect = "prompt"


def question(dialect: Dialect, model: str, text: str) -> dict[str, Any]:
    """What is asked."""
    if dialect == "content":
        return {"model": model, "content": text, "add_special": False}
    return {"model": model, "prompt": text, "add_special_tokens": False}


def wants_content(answer: bytes) -> bool:
    """Whether a server that was asked in the other dialect understands `content`."""
    told = _told(answer)
    return "count" not in told and isinstance(told.get("tokens"), list)


def tokens_in(answer: bytes) -> int | None:
    """How many tokens llama.cpp has made of a text."""
    tokens = _told(answer).get("tokens")
    return len(tokens) if isinstance(tokens, list) else None


def count_in(answer: bytes) -> int | None:
    """How many tokens a text, or a conversation, was told to have."""
    count = _told(answer).get("count")
    return count if isinstance(count, int) else None


def _told(answer: bytes) -> Mapping[str, Any]:
    try:
        told = parsed(answer)
    except BackendError:
        return {}
    return told if isinstance(told, dict) else {}
