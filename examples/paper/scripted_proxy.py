"""Start a proxy in which a script plays the model. `run.py --scripted` uses it."""

import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager

import yaml


@contextmanager
def scripted_proxy(replies):
    """Run `sandbox-proxy serve` on a free port with these replies as its model; yield its URL."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as script:
        yaml.safe_dump({"replies": replies}, script)
        script.flush()
        settings = {
            "LLM_SANDBOX_BACKEND__PROVIDER": "scripted",
            "LLM_SANDBOX_BACKEND__SCRIPT": script.name,
        }
        command = [sys.executable, "-m", "proxy", "serve", "--port", "0"]
        environment = {**os.environ, **settings}
        with subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        ) as server:
            try:
                yield read_url(server.stderr)
            finally:
                server.terminate()


def read_url(log):
    """Return the URL that a starting server logs; exit with its log if it logs none."""
    lines = []
    for line in log:
        lines.append(line)
        if found := re.search(r"serving at (\S+)", line):
            return found[1]
    sys.exit("".join(lines))
