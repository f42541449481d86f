"""`sandbox-proxy demo`: sends one request to a temporary server and prints the answer as it
streams."""

import asyncio
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from proxy.api.dependencies import Services
from proxy.app import Lifespan, create_app

SCRIPT = Path(str(resources.files("proxy"))) / "demo.yaml"
QUESTION = (
    "How do the prime numbers thin out? Count the primes up to 10, 100, … 1,000,000, compare with"
    " n / ln n, and give me a table as CSV and a chart."
)
OUTPUT = Path("demo-output")
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


async def run_demo(
    services: Services, lifespan: Lifespan, question: str | None, model: str | None
) -> int:
    """Start a server, send it one request, print the answer and download its files. Return the exit
    code."""
    app = create_app(services, lifespan)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            return 1
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        if model is None:
            _say("No model is used here: a script plays its part. Everything else is real.\n")
        return await _ask(f"http://127.0.0.1:{port}/v1", question or QUESTION, model)
    except openai.APIError as error:
        sys.stderr.write(f"sandbox-proxy: {error.message}\n")
        return 1
    finally:
        server.should_exit = True
        await serving


async def _ask(base_url: str, question: str, model: str | None) -> int:
    _say(f"> {question}\n\n")
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        name = model or (await client.models.list()).data[0].id
        stream = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": question}], stream=True
        )
        answer = ""
        sandbox: dict[str, Any] = {}
        async for chunk in stream:
            delta = chunk.choices[0].delta if chunk.choices else None
            thinking = getattr(delta, "reasoning_content", None)
            if thinking:
                _say(f"{DIM}{thinking}{PLAIN}" if sys.stdout.isatty() else thinking)
            if delta and delta.content:
                _say(delta.content if answer else f"\n{delta.content}")
                answer += delta.content
            extra = (chunk.model_extra or {}).get("sandbox") or {}
            sandbox = extra if "files" in extra else sandbox
    _say("\n\n")
    await _download(sandbox.get("files", []))
    return 0 if answer else 1


async def _download(files: list[Mapping[str, Any]]) -> None:
    await asyncio.to_thread(OUTPUT.mkdir, exist_ok=True)
    async with httpx.AsyncClient() as client:
        for file in files:
            response = await client.get(file["url"])
            response.raise_for_status()
            target = OUTPUT / Path(file["filename"]).name
            await asyncio.to_thread(target.write_bytes, response.content)
            _say(f"{target}  {file['bytes']} bytes\n")


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
