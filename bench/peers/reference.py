"""The reference package on the same script, run with the Python interpreter of its own virtualenv.

`python reference.py BASE_URL MODEL IMAGE`

Imports the package once, outside of the measured time. Makes one run for each line of stdin and
prints one line with its result.
"""

import importlib
import json
import signal
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def main() -> None:
    """Make a run for each line of stdin."""
    base_url, model, image = sys.argv[1:]
    cli = importlib.import_module("llm_in_sandbox.cli")
    # On SIGTERM during a run, the container is still removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for _ in sys.stdin:
        sys.stdout.write(f"{json.dumps(_run(cli, base_url, model, image))}\n")
        sys.stdout.flush()


def _run(cli: Any, base_url: str, model: str, image: str) -> dict[str, Any]:
    closing: list[float] = []
    close = cli.DockerRuntime.close

    def timed_close(runtime: Any) -> None:
        closing.append(time.perf_counter())
        close(runtime)

    cli.DockerRuntime.close = timed_close  # a stopwatch; what it does is unchanged
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, redirect_stdout(sys.stderr):
        started = time.perf_counter()
        cli.run_agent_query(
            "What is 6 * 7?",
            llm_name=f"openai/{model}",
            llm_base_url=base_url,
            api_key="none",
            docker_image=image,
            output_dir=directory,
        )
        ended = time.perf_counter()
        answers = [file.read_text() for file in Path(directory).rglob("answer.txt")]
    cli.DockerRuntime.close = close
    return {
        "answer": answers[0].strip() if answers else None,
        "to_answer_s": closing[0] - started,
        "removal_s": ended - closing[0],
    }


if __name__ == "__main__":
    main()
