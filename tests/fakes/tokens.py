"""Token ids in the replies of the scripted backend, in the formats of vLLM, SGLang and llama.cpp.

The tokens of a text are its bytes. The chat template writes each message as JSON, so a prompt that
repeats a reply unchanged begins with the tokens of the call before. Like the templates of reasoning
models, it leaves out the reasoning of earlier turns.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

_BEGIN, _END = "\x02", "\x03"
_REASONING = ("reasoning", "reasoning_content")
WEIGHT_VERSION = "step-7"
"""The weight version that SGLang's replies have."""


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text."""
    return list(text.encode())


def text_of_tokens(ids: Sequence[int]) -> str:
    """Return the text of tokens."""
    return bytes(ids).decode()


def logprob_of(token: int) -> float:
    """Return the log probability of a sampled token."""
    return -(token % 16) / 16


def prompt_text(body: Mapping[str, Any]) -> str:
    """Return the prompt of a request, as the chat template writes it."""
    tools = json.dumps(body.get("tools") or [])
    shown = (
        {name: value for name, value in message.items() if name not in _REASONING}
        for message in body["messages"]
    )
    return f"{tools}{''.join(f'{_BEGIN}{json.dumps(each)}{_END}' for each in shown)}{_BEGIN}"


def reply_text(message: Mapping[str, Any]) -> str:
    """Return the text that the model samples for a message."""
    return f"{json.dumps(message)}{_END}"


def add_tokens(completion: dict[str, Any], body: Mapping[str, Any], style: str) -> None:
    """Add token ids and log probabilities to a completion, as far as the request asks for them.
    `style` is "vllm", or "sglang", which has both ids in the choice, or "llama.cpp", which has the
    prompt as text."""
    choice = completion["choices"][0]
    reply_ids = tokens_of(reply_text(choice["message"]))
    prompt_ids = tokens_of(prompt_text(body))
    if body.get("logprobs"):
        choice["logprobs"] = {
            "content": [{"token": chr(each), "logprob": logprob_of(each)} for each in reply_ids]
        }
    if style == "llama.cpp":
        completion["usage"] = {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(reply_ids),
            "total_tokens": len(prompt_ids) + len(reply_ids),
        }
        if body.get("verbose"):
            sampled = reply_ids if body.get("return_tokens") else []
            completion["__verbose"] = {"prompt": prompt_text(body), "tokens": sampled}
        return
    if not body.get("return_token_ids"):
        return
    choice["token_ids"] = reply_ids
    if style == "vllm":
        completion["prompt_token_ids"] = prompt_ids
    else:
        choice["prompt_token_ids"] = prompt_ids
        completion["metadata"] = {"weight_version": WEIGHT_VERSION}


async def tokenize(request: web.Request) -> web.Response:
    """Serve llama.cpp's /tokenize."""
    body = await request.json()
    is_special = body.get("add_special") and body.get("parse_special")
    if request.path != "/tokenize" or not is_special:
        return web.json_response({"error": "not found"}, status=404)
    return web.json_response({"tokens": tokens_of(body["content"])})
