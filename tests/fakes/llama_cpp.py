"""A fake llama.cpp server: window, tokenizer and refusals. Four characters are a token.

server = LlamaCpp([tool_reply(call("submit", answer="42"))])
async with scripted_backend(
    server, style="llama.cpp", window=server.window, elsewhere=server.elsewhere
) as backend:
    ...
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from tests.fakes.backend import Item, Refusal
from tests.fakes.small_window import tokens


class LlamaCpp:
    """Answers from a script, with one item for each request that it does not refuse."""

    def __init__(self, script: Sequence[Mapping[str, Any]], *, window: int = 1_000_000) -> None:
        self.window = window
        self.tokenized: list[Any] = []
        """The bodies of the requests to /tokenize."""
        self._script = list(script)

    def __call__(self, body: dict[str, Any]) -> Item:
        if body.get("tools") and "grammar" in body:
            words = "Cannot use custom grammar constraints with tools."
            return Refusal(400, words, "invalid_request_error")
        prompt = tokens([body["messages"], body.get("tools")])
        if prompt > self.window:
            return Refusal(
                400,
                f"request ({prompt} tokens) exceeds the available context size"
                f" ({self.window} tokens), try increasing it",
                "exceed_context_size_error",
                beside={"n_prompt_tokens": prompt, "n_ctx": self.window},
            )
        return self._script.pop(0)

    async def elsewhere(self, request: web.Request) -> web.Response:
        """Serve /tokenize."""
        if request.path != "/tokenize":
            return web.Response(status=404)
        body = await request.json()
        self.tokenized.append(body)
        # It has no word for a request without content.
        return web.json_response({"tokens": [7] * (len(body.get("content", "")) // 4)})
