"""An agent as a plain process of ours, spoken to frame by frame."""

import json
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import sandbox_runtime
from sandbox_runtime.guest.bootstrap import COMMAND, GuestConfig, program
from sandbox_runtime.protocol import (
    ACK,
    CREDIT,
    DATA,
    END,
    HELLO,
    MAX_OPEN_BYTES,
    OPEN,
    PING,
    PONG,
    STDERR,
    STDERR_TAIL,
    TAIL,
    WINDOW,
    Decoder,
    frame,
    json_frame,
)

PATIENCE_S = 20.0
NATIVE = Path(sandbox_runtime.__file__).parent / "guest/bin" / f"agent-{platform.machine()}"
KINDS = ["python", *(["native"] if NATIVE.exists() else [])]
"""The agents there are here; `make agent` builds the native one."""
EXEC = {
    "op": "exec",
    "timeout_s": PATIENCE_S,
    "wait_s": None,
    "cwd": None,
    "env": {},
    "stdin": "none",
    "max_bytes": 10_000,
    "max_lines": 1_000,
    "shell_state": "none",
}
Frame = tuple[int, int, bytes]


class AgentProcess:
    """The host's end of an agent's standard input and output."""

    def __init__(self, stream: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._socket = stream
        self._decoder = Decoder(MAX_OPEN_BYTES)
        self._frames: list[Frame] = []

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(b"".join(frames))

    def open(self, stream: int, **request: object) -> None:
        self.send(json_frame(stream, OPEN, request))

    def exec(self, stream: int, id: str, command: str, **more: object) -> None:
        self.open(stream, **{**EXEC, "id": id, "command": command, **more})

    def acknowledge(self, id: str) -> None:
        self.send(frame(0, ACK, id.encode()))

    def receive(self) -> Frame | None:
        """The next frame; None when the agent has ended."""
        while not self._frames:
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def heard(self, stream: int) -> tuple[str, str, dict[str, Any]]:
        """What an operation delivers: its output, its error output, its report."""
        pieces: dict[int, bytes] = {DATA: b"", STDERR: b""}
        while (received := self.receive()) is not None:
            number, kind, payload = received
            if number != stream or kind == WINDOW:
                continue
            if kind == END:
                return pieces[DATA].decode(), pieces[STDERR].decode(), json.loads(payload)
            kind = {TAIL: DATA, STDERR_TAIL: STDERR}.get(kind, kind)
            pieces[kind] += payload
            self.send(frame(stream, WINDOW, CREDIT.pack(len(payload))))
        raise EOFError(f"the agent ended, {self.process.wait(PATIENCE_S)}")

    def open_files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())


@contextmanager
def agent_process(kind: str, directory: Path, **config: Any) -> Iterator[AgentProcess]:
    """An agent that is ready to serve, its working directory in `directory`."""
    work = str(directory / "work")
    told = GuestConfig(
        **{"working_dir": work, "directories": (work,), "egress_port": 0, **config},
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        if kind == "native":
            argv: tuple[str, ...] = (str(NATIVE),)
            text = json.dumps(asdict(told)).encode()
            first = len(text).to_bytes(4, "big") + text
        else:
            argv, first = (sys.executable, *COMMAND[1:]), program(told)
        process = subprocess.Popen(argv, stdin=theirs, stdout=theirs)
        theirs.close()
        agent = AgentProcess(ours, process)
        try:
            agent.send(first)
            hello = agent.receive()
            assert hello is not None
            assert hello[:2] == (0, HELLO)
            agent.send(frame(0, PING))
            assert agent.receive() == (0, PONG, b"")  # it has loaded its modules by now
            yield agent
        finally:
            ours.close()
            process.wait(PATIENCE_S)
