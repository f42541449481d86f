"""An agent as a child process, driven frame by frame."""

import json
import platform
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from sandbox_runtime.guest.agent import GuestConfig, agent_program, first_message
from sandbox_runtime.protocol import (
    ACK,
    CREDIT,
    DATA,
    END,
    HELLO,
    MAX_OPEN_BYTES,
    OPEN,
    STDERR,
    STDERR_TAIL,
    TAIL,
    WINDOW,
    Decoder,
    frame,
    json_frame,
)

PATIENCE_S = 20.0
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
        self._streams = count(1, 2)

    def new_stream(self) -> int:
        """Return the number of a stream that was not opened yet."""
        return next(self._streams)

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(b"".join(frames))

    def open(self, stream: int, **request: object) -> None:
        self.send(json_frame(stream, OPEN, request))

    def exec(self, stream: int, id: str, command: str, **more: object) -> None:
        self.open(stream, **{**EXEC, "id": id, "command": command, **more})

    def acknowledge(self, id: str) -> None:
        self.send(frame(0, ACK, id.encode()))

    def receive(self) -> Frame | None:
        """Return the next frame, or None when the agent has ended."""
        while not self._frames:
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def read_to_end(self, stream: int) -> tuple[str, str, dict[str, Any]]:
        """Return the output, error output and report of an operation."""
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
def agent_process(directory: Path, **config: Any) -> Iterator[AgentProcess]:
    """Start an agent with its working directory in `directory` and wait until it is ready."""
    work = str(directory / "work")
    guest_config = GuestConfig(
        **{"working_dir": work, "directories": (work,), "egress_port": 0, **config},
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        program = agent_program(platform.machine())
        process = subprocess.Popen([program], stdin=theirs, stdout=theirs)
        theirs.close()
        agent = AgentProcess(ours, process)
        try:
            agent.send(first_message(guest_config))
            hello = agent.receive()
            assert hello is not None
            assert hello[:2] == (0, HELLO)
            yield agent
        finally:
            ours.close()
            process.wait(PATIENCE_S)
