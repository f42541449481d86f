"""Requests that must fail, by the openai SDK."""

from typing import Any

import anyio
import openai
import pytest

ASKED: list[Any] = [{"role": "user", "content": "Hello."}]


def client_of(url: str, api_key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)


async def refused(client: openai.AsyncOpenAI, **body: Any) -> openai.APIStatusError:
    """The error of one request that must fail before anything is streamed."""
    asked = {"model": "fake-model", "messages": ASKED, **body}
    with anyio.fail_after(10), pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**asked)
    return caught.value


async def failed_stream(
    client: openai.AsyncOpenAI, body: dict[str, Any]
) -> tuple[list[str], openai.APIError]:
    """The text that came, and the error that ended the stream."""
    pieces: list[str] = []

    async def read() -> None:
        async for piece in await client.chat.completions.create(**body, stream=True):
            delta = piece.choices[0].delta
            pieces.append(delta.content or (delta.model_extra or {}).get("reasoning", ""))

    with anyio.fail_after(10), pytest.raises(openai.APIError) as caught:
        await read()
    return pieces, caught.value
