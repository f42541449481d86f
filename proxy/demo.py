"""`sandbox-proxy demo`: sends one request to a temporary server and prints the answer as it
streams."""

import sys
from importlib import resources
from pathlib import Path

import openai

from proxy.api.dependencies import Services
from proxy.app import Lifespan
from proxy.command_client import Answer, ask, download, print_dimmed, temporary_server

SCRIPT = Path(str(resources.files("proxy"))) / "demo.yaml"
QUESTION = (
    "How do the prime numbers thin out? Count the primes up to 10, 100, … 1,000,000, compare with"
    " n / ln n, and give me a table as CSV and a chart."
)
OUTPUT_DIRECTORY = Path("demo-output")


async def run_demo(
    services: Services, lifespan: Lifespan, question: str | None, model: str | None
) -> int:
    """Start a server, send it one request, print the answer and download its files. Return the exit
    code."""
    try:
        async with (
            temporary_server(services, lifespan) as (base_url, key),
            openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client,
        ):
            if model is None:
                _print_text(
                    "No model is used here: a script plays its part. Everything else is real.\n"
                )
            _print_text(f"> {question or QUESTION}\n\n")
            answer = Answer()
            await ask(client, answer, model, question or QUESTION, {}, _show_step, _print_text)
            _print_text("\n\n")
            for path in await download(answer.files, OUTPUT_DIRECTORY):
                _print_text(f"{path}  {path.stat().st_size} bytes\n")
    except openai.APIError as error:
        sys.stderr.write(f"sandbox-proxy: {error.message}\n")
        return 1
    return 0 if answer.text else 1


def _print_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _show_step(text: str) -> None:
    print_dimmed(sys.stdout, text)
