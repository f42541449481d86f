"""The self-check: evaluate the scripted model through a real proxy with real sandboxes, and compare
the report with the known one."""

import asyncio
import contextlib
import difflib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

from evaluation.journal import ResultsError
from evaluation.results import REPORT_FILE
from evaluation.runner import RunError
from evaluation.samples import load_suites
from evaluation.scripted import MODEL_NAME, ScriptedModel, serve_model

KNOWN_RESULTS_FILE = "known_results.md"
"""The file of this package with the known results: the part of the report that does not depend on
time."""
COMMAND = (sys.executable, "-m", "evaluation")
MAX_TURNS = 4
START_TIMEOUT_S, STOP_TIMEOUT_S = 120, 20
_SERVING_LINE = re.compile(r"serving at (http://\S+/v1)\b")


def check(output: Path) -> int:
    """Prepare the suites, evaluate the scripted model and write the report into a new directory.
    Return 0 if the results are the known ones, else 1.

    Raises ResultsError if the directory is not empty, RunError if the proxy or the evaluation
    fails, and CalledProcessError if another step fails.
    """
    output = output.resolve()
    if output.exists() and any(output.iterdir()):
        raise ResultsError(f"{output}: the directory is not empty. Remove it, or name another.")
    data = output / "data"
    subprocess.run([*COMMAND, "prepare", "--data", str(data)], check=True)
    suites = load_suites(data, sorted(path.name for path in data.iterdir()))
    samples = [sample for suite in suites for sample in suite.samples]
    asyncio.run(_evaluate(output, data, ScriptedModel(samples)))
    subprocess.run([*COMMAND, "report", str(output)], check=True)
    found = time_independent_part((output / REPORT_FILE).read_text(encoding="utf-8"))
    known = (resources.files("evaluation") / KNOWN_RESULTS_FILE).read_text(encoding="utf-8")
    if found == known:
        print("The results are those known in advance.", file=sys.stderr)
        return 0
    lines = (known.splitlines(), found.splitlines())
    print(*difflib.unified_diff(*lines, "known", "found", lineterm=""), sep="\n", file=sys.stderr)
    return 1


def time_independent_part(report: str) -> str:
    """Return the part of a report about the scripted model that does not depend on time."""
    return report[report.index(f"## {MODEL_NAME}") : report.index("## Speed")]


def run_arguments(output: Path, data: Path, base_url: str) -> list[str]:
    """Return the arguments of `sandbox-eval` that evaluate the scripted model at a proxy."""
    limits = json.dumps({"limits": {"max_turns": MAX_TURNS}})
    return [
        *("run", "--output", str(output), "--data", str(data), "--base-url", base_url),
        *("--models", MODEL_NAME, "--max-retries", "0", "--sandbox", limits, "--capture"),
    ]


async def _evaluate(output: Path, data: Path, model: ScriptedModel) -> None:
    async with serve_model(model.reply) as model_url, _run_proxy(output, model_url) as base_url:
        arguments = run_arguments(output, data, base_url)
        process = await asyncio.create_subprocess_exec(*COMMAND, *arguments)
        # Exit code 3: the script has errors of the backend, which the known results contain.
        if await process.wait() not in (0, 3):
            raise RunError("the evaluation of the scripted model failed")


@asynccontextmanager
async def _run_proxy(output: Path, model_url: str) -> AsyncIterator[str]:
    """Run a proxy with bubblewrap sandboxes in front of the model; yield the proxy's URL, with
    /v1."""
    config = output / "config.yaml"
    settings = {
        "server": {"data_dir": str(output / "proxy")},
        "backend": {"base_url": model_url, "max_retries": 0, "tool_support": "always"},
        "sandbox": {"backend": "bubblewrap"},
    }
    config.write_text(json.dumps(settings), encoding="utf-8")
    arguments = ("serve", "--config", str(config), "--port", "0", "--allow-weak")
    with (output / "proxy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", *arguments), stdout=log, stderr=log
        )
    try:
        yield await _proxy_url(process, output / "proxy.log")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _proxy_url(process: asyncio.subprocess.Process, log: Path) -> str:
    """Return the URL, with /v1, that the proxy writes to its log when it is ready."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_TIMEOUT_S):
            while process.returncode is None:
                text = await asyncio.to_thread(log.read_text, encoding="utf-8", errors="replace")
                if found := _SERVING_LINE.search(text):
                    return found[1]
                await asyncio.sleep(0.05)
    raise RunError(f"the proxy does not start: see {log}")
