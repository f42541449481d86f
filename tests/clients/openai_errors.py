"""Send requests that must fail with the openai SDK and return their errors."""

from typing import Any

import anyio
import openai
import pytest

MESSAGES: list[Any] = [{"role": "user", "content": "Hello."}]


def openai_client(url: str, api_key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)


async def request_error(client: openai.AsyncOpenAI, **body: Any) -> openai.APIStatusError:
    """Send a chat request that must fail before any event and return its error."""
    payload = {"model": "fake-model", "messages": MESSAGES, **body}
    with anyio.fail_after(10), pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**payload)
    return caught.value


async def failed_stream(
    client: openai.AsyncOpenAI, body: dict[str, Any]
) -> tuple[list[str], openai.APIError]:
    """Return the text received before the stream failed, and the error that ended it."""
    pieces: list[str] = []

    async def read() -> None:
        async for piece in await client.chat.completions.create(**body, stream=True):
            delta = piece.choices[0].delta
            pieces.append(delta.content or (delta.model_extra or {}).get("reasoning", ""))

    with anyio.fail_after(10), pytest.raises(openai.APIError) as caught:
        await read()
    return pieces, caught.value
