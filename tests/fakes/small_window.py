"""A model server with a small context window that it enforces. Four characters are a token.

play = SmallWindow(lambda body: tool_reply(call("submit", answer="42")))
async with scripted_backend(play) as backend:
    ...
assert play.refused == 0
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.fakes.backend import Item, Refusal

Play = Callable[[dict[str, Any]], Mapping[str, Any]]
Refuse = Callable[[int, int, int], str]
"""Return an error message from the window, the prompt tokens and the requested answer tokens."""


def vllm(window: int, prompt: int, answer: int) -> str:
    """Return vLLM's error message."""
    if answer > window:
        return (
            f"max_tokens={answer} cannot be greater than max_model_len={window}. Please request"
            f" fewer output tokens. (parameter=max_tokens, value={answer})"
        )
    if answer:
        return (
            f"'max_tokens' or 'max_completion_tokens' is too large: {answer}. This model's maximum"
            f" context length is {window} tokens and your request has {prompt} input tokens"
            f" ({answer} > {window} - {prompt})."
        )
    return (
        f"This model's maximum context length is {window} tokens. However, your request has"
        f" {prompt} input tokens. Please reduce the length of the input messages."
    )


def wordless(window: int, prompt: int, answer: int) -> str:
    """Return an error message without numbers, as older versions of llama.cpp did."""
    return "the request exceeds the available context size. try increasing the context size"


class SmallWindow:
    """Answers requests with `play`, or refuses a request that exceeds the window."""

    def __init__(
        self, play: Play, *, window: int = 4096, refuse: Refuse = vllm, reports: bool = True
    ) -> None:
        """If `reports` is true, replies contain their usage."""
        self._play = play
        self._window = window
        self._refuse = refuse
        self._reports = reports
        self.refused = 0
        self.bodies: list[dict[str, Any]] = []
        """The bodies of the requests that fitted the window."""

    def __call__(self, body: dict[str, Any]) -> Item:
        prompt = tokens([body["messages"], body.get("tools")])
        budget = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if prompt + max(1, budget) > self._window:
            self.refused += 1
            return Refusal(400, self._refuse(self._window, prompt, budget))
        self.bodies.append(body)
        reply = self._play(body)
        answer = min(tokens(reply), self._window - prompt)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer}
        usage["total_tokens"] = prompt + answer
        return {**reply, "usage": usage} if self._reports else reply


def tokens(value: Any) -> int:
    """Return the number of tokens of a value."""
    return len(json.dumps(value)) // 4
