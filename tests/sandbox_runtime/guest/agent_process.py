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

from sandbox_runtime.guest.agent import GuestConfig, agent_program, config_message
from sandbox_runtime.packets import (
    PACKET_DATA,
    Packet,
    PacketDecoder,
    packet_bytes,
)
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
TOKEN = bytes(range(100, 116))


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


class PacketAgent:
    """The host's end of a resumable link, on which each packet is sent by hand."""

    def __init__(self, stream: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.clock_ms = 0
        """The newest that was received."""
        self._socket = stream
        self._packets = PacketDecoder(TOKEN, may_begin_inside=False)
        self._received: list[Packet] = []

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send(self, payload: bytes, offset: int, **fields: int) -> None:
        """Send a packet of the first connection that acknowledges nothing, but for `fields`."""
        self.send_bytes(self.packet(payload, offset, **fields))

    def packet(self, payload: bytes, offset: int, **fields: int) -> bytes:
        packet = Packet(PACKET_DATA, 1, offset, 0, self.clock_ms, payload)
        return packet_bytes(TOKEN, packet._replace(**fields))

    def receive(self) -> Packet | None:
        """Return the next packet, or None when the agent has ended."""
        while not self._received:
            data = self._socket.recv(1 << 16)
            if not data:
                return None
            self._received += self._packets.feed(data)
        packet = self._received.pop(0)
        self.clock_ms = packet.clock_ms
        return packet

    def receive_bytes(self, length: int) -> bytes:
        """Return the payloads of the next packets, which must have so many bytes together."""
        received = b""
        while len(received) < length:
            packet = self.receive()
            assert packet is not None
            received += packet.payload
        assert len(received) == length
        return received


@contextmanager
def packet_agent(directory: Path, **config: Any) -> Iterator[PacketAgent]:
    """Start an agent with a resumable link. Its first packet, with HELLO, has not been read."""
    settings = {"link_token": TOKEN.hex(), **config}
    with _started(directory, settings) as (stream, process):
        yield PacketAgent(stream, process)


@contextmanager
def agent_process(directory: Path, **config: Any) -> Iterator[AgentProcess]:
    """Start an agent with its working directory in `directory` and wait until it is ready."""
    with _started(directory, config) as (stream, process):
        agent = AgentProcess(stream, process)
        hello = agent.receive()
        assert hello is not None
        assert hello[:2] == (0, HELLO)
        yield agent


@contextmanager
def _started(
    directory: Path, config: dict[str, Any]
) -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    """Start an agent and send it its configuration."""
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
        try:
            ours.sendall(config_message(guest_config))
            yield ours, process
        finally:
            ours.close()
            if config.get("link_token"):  # it outlives its connections
                process.kill()
            process.wait(PATIENCE_S)
