"""SWE-ReX: `python -m bench.peers.swe_rex IMAGE`.

Its DockerDeployment installs the server in the container from the network and publishes the port on
all addresses. Here the server's packages are mounted and the port is published on the loopback
interface only. As in DockerDeployment, the container is started by the Docker command line and used
through RemoteRuntime.
"""

import asyncio
import importlib
import secrets
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from bench.peers.driver import serve

READY_TIMEOUT_S = 30.0


class SweRex:
    """A sandbox of SWE-ReX; see `driver.PeerSandbox`. Commands run in one bash session, as those of
    SWE-ReX's agents do."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._runtimes = importlib.import_module("swerex.runtime.remote")
        self._requests = importlib.import_module("swerex.runtime.abstract")
        self._runner = asyncio.Runner()
        self._runtime: Any = None
        self._name = ""

    def start(self) -> None:
        self._name, token, port = (
            f"bench-swe-rex-{secrets.token_hex(4)}",
            secrets.token_hex(),
            _free_port(),
        )
        packages = sysconfig.get_paths()["purelib"]
        command = ["docker", "run", "--rm", "--detach", "--name", self._name]
        command += ["-p", f"127.0.0.1:{port}:8000", "-v", f"{packages}:/swerex:ro"]
        command += ["-e", "PYTHONPATH=/swerex", self._image]
        server = ["python3", "-m", "swerex.server", "--auth-token", token]
        subprocess.run([*command, *server], check=True, capture_output=True)
        self._runtime = self._runtimes.RemoteRuntime(auth_token=token, port=port, timeout=0.15)
        self._run(self._runtime.wait_until_alive(timeout=READY_TIMEOUT_S))
        self._run(self._runtime.create_session(self._requests.CreateBashSessionRequest()))

    def exec(self, command: str) -> str:
        done = self._run(self._runtime.run_in_session(self._requests.BashAction(command=command)))
        return str(done.output)

    def put(self, source: str, path: str) -> None:
        request = self._requests.UploadRequest(source_path=source, target_path=path)
        self._run(self._runtime.upload(request))

    def get(self, path: str, target: str) -> None:
        read = self._run(self._runtime.read_file(self._requests.ReadFileRequest(path=path)))
        Path(target, Path(path).name).write_text(read.content)

    def stop(self) -> None:
        self._run(self._runtime.close())
        subprocess.run(["docker", "kill", self._name], check=True, capture_output=True)

    def _run(self, work: Any) -> Any:
        return self._runner.run(work)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


if __name__ == "__main__":
    serve(SweRex(sys.argv[1]))
