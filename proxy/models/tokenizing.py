"""What servers with a tokenizer say of it: vLLM's and SGLang's `/tokenize`."""

from proxy.errors import BackendError
from proxy.models.backend_errors import parsed

PATH = "/tokenize"
NOT_THERE = (404, 405, 501)
"""What a server says that does not have a path."""


def count_in(answer: bytes) -> int | None:
    """How many tokens a text, or a conversation, was told to have."""
    try:
        told = parsed(answer)
    except BackendError:
        return None
    count = told.get("count") if isinstance(told, dict) else None
    return count if isinstance(count, int) else None
