"""Print the token counts and times of ten small requests, plain and through the agent loop.

`python -m tests.engines.table [--seeds N] [--prompts N] [--columns NAME,...]`, with ENGINE=vllm in
the environment for vLLM.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from tests.engines.installation import NotInstalledError
from tests.engines.measured_requests import MAX_TOKENS, TEMPERATURE, MeasuredAnswer, ask, request
from tests.engines.prompts import OURS, PROMPTS
from tests.engines.servers import ENGINE, ModelServer, model_server, proxy, tools_always

COLUMNS = ("plain", "shipped", "always")
"""plain: the model server itself. shipped: the default proxy, with a chat template without tools.
always: the proxy with `tool_support: always`, with a chat template with tools."""
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Cell:
    """One request in the table."""

    column: str
    prompt: str
    seed: int
    seconds: float
    answer: MeasuredAnswer


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.engines.table", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    options = parser.parse_args()
    try:
        cells = anyio.run(_cells, options)
    except NotInstalledError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.writelines(f"{line}\n" for line in (*_rows(cells), "", *_sums(cells, options)))
    return 0


async def _cells(options: argparse.Namespace) -> list[Cell]:
    cells: list[Cell] = []
    for column in options.columns.split(","):
        async with _servers(column) as (url, server):
            for prompt in PROMPTS[: options.prompts]:
                for seed in range(options.seeds):
                    body = request(
                        prompt,
                        seed=seed,
                        max_tokens=options.max_tokens,
                        temperature=options.temperature,
                    )
                    started = time.monotonic()
                    answer = await ask(url, server, body)
                    cells.append(Cell(column, prompt, seed, time.monotonic() - started, answer))
    return cells


@asynccontextmanager
async def _servers(column: str) -> AsyncIterator[tuple[str, ModelServer]]:
    tools = ENGINE.with_tools if column == "always" else ENGINE.without_tools
    async with model_server(tools=tools) as server:
        if column == "plain":
            yield server.url, server
            return
        more = tools_always() if column == "always" else {}
        async with proxy(server.url, **more) as ours:
            yield f"http://127.0.0.1:{ours.port}", server


def _rows(cells: list[Cell]) -> list[str]:
    lines = [f"{'':8} seed  usage  engine prompt  seconds finish     answer"]
    for prompt in dict.fromkeys(cell.prompt for cell in cells):
        lines.append(f"-- {prompt}")
        mine = [cell for cell in cells if cell.prompt == prompt]
        for cell in sorted(mine, key=lambda cell: cell.seed):
            answer = cell.answer
            lines.append(
                f"{cell.column:8} {cell.seed:4} {answer.usage.completion:6}"
                f" {answer.counted.completion:7} {answer.usage.prompt:6} {cell.seconds:8.1f}"
                f" {answer.finish_reason:10} {' '.join(answer.text.split())[:SHOWN_CHARS]}"
            )
    return lines


def _sums(cells: list[Cell], options: argparse.Namespace) -> list[str]:
    """Return one line per column: reported and generated tokens."""
    lines = ["column     usage  engine  x plain  seconds  over limit  our words  finish reasons"]
    of_plain = sum(cell.answer.counted.completion for cell in cells if cell.column == "plain")
    for column in dict.fromkeys(cell.column for cell in cells):
        mine = [cell for cell in cells if cell.column == column]
        generated = sum(cell.answer.counted.completion for cell in mine)
        over = sum(cell.answer.counted.completion > options.max_tokens * 1.05 for cell in mine)
        ours = sum(bool(OURS.search(cell.answer.text)) for cell in mine)
        reasons = Counter(cell.answer.finish_reason for cell in mine)
        lines.append(
            f"{column:8} {sum(cell.answer.usage.completion for cell in mine):7} {generated:7}"
            f" {generated / of_plain if of_plain else float('nan'):8.2f}"
            f" {sum(cell.seconds for cell in mine):8.1f} {over:11} {ours:10}"
            f"  {', '.join(f'{name} {count}' for name, count in sorted(reasons.items()))}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
