"""A fake inference engine that counts prompt tokens, with or without tool support.

engine = FakeEngine(template="ignores tools")
async with scripted_backend(engine.reply, elsewhere=engine.elsewhere) as backend:
    ...
assert engine.probes
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

from proxy.models.scripted import text_reply
from tests.fakes.backend import Item, Refusal

NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
TOOL_TOKENS = 60
"""Number of tokens that each tool adds to a prompt."""


@dataclass
class FakeEngine:
    """An inference engine. A test may change its fields at any time, as if the engine restarted."""

    template: Literal["passes tools on", "ignores tools"] = "passes tools on"
    refusal: str | None = None
    """The error message for every request with tools; None: they are accepted."""
    version: str | None = "1.0"
    tokenizes: Literal["with tools", "without tools", "no"] = "with tools"
    """Support of vLLM's /tokenize: with the tools of a request, without them, or none."""
    renders: Literal["as text", "as tokens", "no"] = "no"
    """Support of rendered prompts: llama.cpp's /apply-template, vLLM's /detokenize, or none."""
    default_instruction: str = ""
    """The system message that its template adds to a request without a system message."""
    system_status: int = 200
    """The status of renderings of a system message, which some templates refuse."""
    statuses: dict[str, int] = field(default_factory=dict)
    """The status of paths that fail."""
    unknown_path_status: int = 404
    hanging_path: str | None = None
    """A path that is never answered."""
    is_hanging: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request for `hanging_path` has arrived."""
    counts: bool = True
    """True if its answers report usage."""
    answer: str = "Hello."
    call: Mapping[str, Any] | None = None
    """Its reply to a client's request with tools; None: `answer`."""
    paths: list[str] = field(default_factory=list)
    """The requested paths, without chat completions."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of chat completion requests, including probes."""

    @property
    def probes(self) -> list[dict[str, Any]]:
        """The bodies of the probe requests."""
        return [body for body in self.requests if body.get("max_tokens") == 1]

    @property
    def client_requests(self) -> list[dict[str, Any]]:
        """The bodies of the clients' requests."""
        return [body for body in self.requests if body.get("max_tokens") != 1]

    def reply(self, body: dict[str, Any]) -> Item:
        """Return the reply to a chat completion request."""
        self.requests.append(body)
        if body.get("tools") and self.refusal is not None:
            return Refusal(400, self.refusal)
        usage = {"prompt_tokens": self._size(body), "completion_tokens": 1}
        reply: Mapping[str, Any] = text_reply(self.answer)
        if body.get("tools") and body.get("max_tokens") != 1:
            reply = self.call or reply
        return {**reply, **({"usage": usage} if self.counts else {})}

    async def elsewhere(self, request: web.Request) -> web.Response:
        """Answer requests for other paths."""
        self.paths.append(request.path)
        if request.path == self.hanging_path:
            self.is_hanging.set()
            await asyncio.Event().wait()
        if status := self.statuses.get(request.path):
            return web.json_response({"detail": "failed"}, status=status)
        return await self._answer_path(request)

    async def _answer_path(self, request: web.Request) -> web.Response:
        if request.path == "/version" and self.version is not None:
            return web.json_response({"version": self.version})
        if request.path == "/tokenize" and self.tokenizes != "no":
            body = await request.json()
            if self.tokenizes == "without tools":
                body.pop("tools", None)
            count = {"count": self._size(body), "max_model_len": 4096}
            tokens = (
                {"tokens": list(map(ord, self._render(body)))} if "tokens" in self.renders else {}
            )
            return web.json_response({**count, **tokens})
        if request.path == "/apply-template" and self.renders == "as text":
            body = await request.json()
            if any(each["role"] == "system" for each in body["messages"]):
                return web.json_response({"prompt": self._render(body)}, status=self.system_status)
            return web.json_response({"prompt": self._render(body)})
        if request.path == "/detokenize" and self.renders == "as tokens":
            return web.json_response(
                {"prompt": "".join(map(chr, (await request.json())["tokens"]))}
            )
        return web.json_response({"detail": "Not Found"}, status=self.unknown_path_status)

    def _render(self, body: dict[str, Any]) -> str:
        """Return the prompt of a request in the ChatML format."""
        messages = body["messages"]
        if messages[0]["role"] != "system" and self.default_instruction:
            messages = [{"role": "system", "content": self.default_instruction}, *messages]
        turns = (f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
        return "".join([*turns, "<|im_start|>assistant\n"])

    def _size(self, body: dict[str, Any]) -> int:
        words = sum(len(str(each["content"]).split()) for each in body["messages"])
        shown = self.template == "passes tools on"
        return words + (TOOL_TOKENS * len(body.get("tools") or []) if shown else 0)
