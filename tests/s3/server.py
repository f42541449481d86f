"""An S3 server for tests: moto's, in an environment of its own. It keeps all objects in memory."""

import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.clients.locked_packages import make_virtualenv

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / ".stacks" / "python-s3"
BUCKET = "sandbox-proxy"
START_S = 60


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server with an empty bucket."""

    url: str

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables by which S3 clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
        }


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Run a server with the bucket `BUCKET`. Raises MissingError if it cannot be installed."""
    python = make_virtualenv(KEPT, HERE / "requirements.txt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python.parent / "moto_server"), "--host=127.0.0.1", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            transport = httpx.HTTPTransport(retries=12)  # with growing pauses, until it listens
            with httpx.Client(transport=transport, timeout=START_S) as client:
                client.put(f"{url}/{BUCKET}").raise_for_status()
            yield S3Server(url)
        finally:
            process.terminate()
