"""Asks a backend's server whether a model's chat template passes tools on, at the cost of one or
two generated tokens."""

import json
import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from policies.tool_support import SUPPORTED, ToolVerdict, ignored, refused
from proxy.agent.model import Model, Passage, Passing
from proxy.agent.result import tokens
from proxy.errors import BackendError, ToolsRefusedError
from proxy.models.backend_errors import parsed
from proxy.models.relay import read_at_most
from proxy.models.tokenizing import PATH as TOKENIZE

APPLY_TEMPLATE = "/apply-template"
MAX_ANSWER_BYTES = 4 << 20
"""SGLang's server info is some 10 kB; llama.cpp's properties have a whole chat template in them."""
MAX_VERSION_CHARS = 200
MAX_TOKENS = 1
"""That each of at most two completions may generate."""
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Tells the present time of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class ToolProbe:
    """Looks at the models of one backend. `is_local`: whether its counts of prompts can be
    believed although it does not tell which engine it is."""

    def __init__(self, model: Model, *, is_local: bool = True) -> None:
        self._model = model
        self._is_local = is_local

    async def models(self) -> list[str]:
        """The names of the models that the backend lists. Raises BackendError."""
        return [str(each.get("id")) for each in await self._model.models()]

    async def version(self) -> str | None:
        """Which engine this is, with whatever else it tells that bears on tools; None where it
        tells nothing. Raises BackendError."""
        passage = self._model.passage
        if passage is None:
            return None
        for path, fields in _VERSIONS:
            told = await _ask(passage, "GET", path)
            if isinstance(told, dict) and isinstance(told.get(fields[0]), str):
                written = " ".join(_short(told.get(field)) for field in fields)
                return f"{path} {written}"[:MAX_VERSION_CHARS]
        return None

    async def verdict(self, name: str, version: str | None) -> ToolVerdict | None:
        """Whether a model is told of tools; None where nobody can say. Raises BackendError."""
        passage = self._model.passage
        if passage is None or (version is None and not self._is_local):
            return None
        messages = _greeting()
        passed_on = await _template_passes_tools(passage, name, messages)
        try:
            with_tools = await self._prompt_tokens(name, messages, [_TOOL])
        except ToolsRefusedError as error:
            return refused(name, error.message)
        if passed_on:
            return SUPPORTED
        without = await self._prompt_tokens(name, messages, [])
        if not with_tools or not without:
            return None
        return SUPPORTED if with_tools > without else ignored(name)

    async def refusal(self, name: str) -> ToolVerdict | None:
        """The verdict on a model whose backend refuses a request with a harmless tool, else None.
        Raises BackendError."""
        try:
            await self._prompt_tokens(name, _greeting(), [_TOOL])
        except ToolsRefusedError as error:
            return refused(name, error.message)
        return None

    async def _prompt_tokens(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> int:
        body = {"model": name, "messages": messages, "max_tokens": MAX_TOKENS}
        if tools:
            body["tools"] = tools
        reply = await self._model.complete(body, None)
        return tokens(reply.usage, "prompt_tokens")


def _greeting() -> list[dict[str, Any]]:
    """Return messages that no cache knows."""
    return [{"role": "user", "content": f"Hi {secrets.token_hex(3)}"}]


_VERSIONS: Sequence[tuple[str, Sequence[str]]] = (
    ("/version", ("version",)),  # vLLM
    ("/props", ("build_info", "chat_template", "model_path")),  # llama.cpp
    ("/get_server_info", ("version", "tool_call_parser", "chat_template")),  # SGLang
    ("/api/version", ("version",)),  # Ollama
)
"""Endpoints that report the engine, and the fields that make up its version; the first must be
there."""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else sha256(text.encode(errors="replace")).hexdigest()[:16]


async def _template_passes_tools(
    passage: Passage, name: str, messages: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether the server itself shows that a prompt with a tool is longer. False says little:
    older vLLMs do not look at the tools here."""
    for path in (TOKENIZE, APPLY_TEMPLATE):
        body = {"model": name, "messages": messages}
        without = _size(await _ask(passage, "POST", path, body))
        if without:
            return _size(await _ask(passage, "POST", path, {**body, "tools": [_TOOL]})) > without
    return False


def _size(told: Any) -> int:
    """Of a prompt: in tokens by vLLM's count, in characters as llama.cpp writes it out."""
    if not isinstance(told, dict):
        return 0
    count, prompt = told.get("count"), told.get("prompt")
    if isinstance(count, int):
        return count
    return len(prompt) if isinstance(prompt, str) else 0


async def _ask(
    passage: Passage, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Any:
    """The JSON that the server has at a path, or None. Raises BackendError without an answer."""
    written = None if body is None else json.dumps(body).encode()
    headers = {"accept": "application/json"}
    if written is not None:
        headers["content-type"] = "application/json"
    relayed = await passage.pass_on(Passing(method, path, headers, written))
    if relayed.status != 200:
        await relayed.body.aclose()
        return None
    read = await read_at_most(relayed.body, MAX_ANSWER_BYTES)
    try:
        return None if read is None else parsed(read)
    except BackendError:
        return None
