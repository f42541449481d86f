"""The agent, built with sanitizers, gets frames that the host sends rarely or never."""

import hashlib
import json
import os
import random
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sandbox_runtime.guest.agent import GuestConfig
from sandbox_runtime.protocol import (
    ACK,
    CREDIT,
    DATA,
    EOF,
    HELLO,
    OPEN,
    PING,
    PONG,
    RESET,
    VERSION,
    WINDOW,
    WINDOW_BYTES,
    frame,
    json_frame,
)
from tests.sandbox_runtime.guest.agent_process import EXEC, PATIENCE_S, AgentProcess
from tests.sandbox_runtime.guest.sanitized import ENV, build_agent

SEED = 20261120
FUZZED_RUNS, FUZZED_FRAMES = 20, 200
LIST = {"op": "list", "max_depth": None, "max_entries": 100, "hash_bytes": 1 << 30, "hash_s": 60}
BROKEN = {
    "a request that is not JSON": frame(1, OPEN, b"{"),
    "a request that is no object": frame(1, OPEN, b"[]"),
    "a request without an operation": frame(1, OPEN, b"{}"),
    "an operation that there is not": frame(1, OPEN, b'{"op": "nothing"}'),
    "a request that lacks something": frame(1, OPEN, b'{"op": "get", "path": "."}'),
    "a number where a text belongs": frame(1, OPEN, b'{"op": "put", "path": 1}'),
    "a stream with an even number": json_frame(2, OPEN, {**LIST, "path": "."}),
    "a stream that is opened twice": json_frame(1, OPEN, {"op": "put", "path": "file"}) * 2,
    "more data than allowed": json_frame(1, OPEN, {"op": "put", "path": "file"})
    + frame(1, DATA, bytes(WINDOW_BYTES + 1)),
    "credit for more than was sent": json_frame(1, OPEN, {"op": "put", "path": "file"})
    + frame(1, WINDOW, CREDIT.pack(WINDOW_BYTES)),
    "credit that is none": json_frame(1, OPEN, {"op": "put", "path": "file"})
    + frame(1, WINDOW, b"123"),
    "a frame that does not belong there": json_frame(1, OPEN, {"op": "put", "path": "file"})
    + frame(1, HELLO),
    "a frame that is too long": (1).to_bytes(4, "big") + bytes([OPEN]) + b"\xff" * 4,
}


class WatchedProcess(AgentProcess):
    """An agent whose exit code and error output can be read."""

    def __init__(self, stream: socket.socket, process: subprocess.Popen[bytes]) -> None:
        super().__init__(stream, process)
        self.stream = stream

    def end(self) -> tuple[int, str]:
        """Close the input of the agent; return its exit code and error output."""
        self.stream.close()
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said.decode()


@contextmanager
def started(binary: Path, config: bytes, *inherited: int) -> Iterator[WatchedProcess]:
    """Start an agent and send its configuration."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        process = subprocess.Popen(
            [binary],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            env={**os.environ, **ENV},
            pass_fds=inherited,
        )
        theirs.close()
        with process:
            agent = WatchedProcess(ours, process)
            agent.send(len(config).to_bytes(4, "big"), config)
            yield agent
            ours.close()


def _config(directory: Path, **config: Any) -> bytes:
    work = str(directory / "work")
    fields = {"working_dir": work, "directories": (work,), "egress_port": 0, **config}
    return json.dumps(asdict(GuestConfig(**fields))).encode()


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_agent(tmp_path_factory.mktemp("agent"))


@pytest.fixture
def agent(binary: Path, tmp_path: Path) -> Iterator[WatchedProcess]:
    with started(binary, _config(tmp_path)) as process:
        hello = process.receive()
        assert hello is not None
        assert (hello[:2], json.loads(hello[2])) == ((0, HELLO), {"version": VERSION, "agent": "c"})
        yield process
        assert process.end() == (0, "")


# The host breaks the protocol


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
def test_invalid_frame_ends_the_agent_with_an_error(
    binary: Path, tmp_path: Path, sent: bytes
) -> None:
    with started(binary, _config(tmp_path)) as agent:
        agent.receive()
        agent.send(sent)
        while agent.receive():
            pass
        code, said = agent.end()
    assert (code, said.startswith("agent: the host broke the protocol: ")) == (1, True), said


def test_random_frames_cause_no_fault_of_the_agent(binary: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    ends = set()
    for _ in range(FUZZED_RUNS):
        with started(binary, _config(tmp_path)) as agent:
            sent = b"".join(_random_frames(chance, FUZZED_FRAMES))
            with suppress(OSError):  # it ends early
                while sent:
                    length = chance.choice([1, 100, 10_000, 100_000])
                    agent.send(sent[:length])
                    sent = sent[length:]
                agent.stream.shutdown(socket.SHUT_WR)
                while agent.receive():
                    pass  # an agent that we hang up on drops what it has not read yet
            code, said = agent.end()
        broken = said.startswith("agent: the host broke the protocol: ")
        assert (code, said) == (0, "") or (code == 1 and broken), said
        ends.add(code)
    assert ends == {0, 1}


def _random_frames(chance: random.Random, count: int) -> Iterator[bytes]:
    """Return random frames of plausible order; the last frame is one that a host must not send."""
    opened = 1
    for _ in range(count):
        if chance.random() < 0.3:
            yield json_frame(opened, OPEN, _random_request(chance))
            opened += 2
        stream = max(1, opened - 2 * chance.randrange(1, 6))
        data = bytes(chance.choice([0, 1, 1000, 20_000]))
        yield chance.choice(
            [
                *(frame(stream, DATA, data), frame(stream, EOF), frame(stream, RESET)),
                *(frame(stream, WINDOW, CREDIT.pack(0)), frame(0, PING), frame(0, ACK, b"a")),
            ]
        )
    if chance.random() < 0.5:
        yield chance.choice(list(BROKEN.values()))


def _random_request(chance: random.Random) -> dict[str, object]:
    command = {**EXEC, "command": "cat; echo out", "wait_s": 0.01, "max_bytes": 10}
    return chance.choice(
        [
            *({**command, "id": chance.choice("abc"), "stdin": "data"} for _ in range(2)),
            *({**command, "id": chance.choice("abc"), "stdin": "terminal"} for _ in range(2)),
            {
                "op": "attach",
                "id": chance.choice("ab"),
                "reading": chance.randrange(3),
                "wait_s": 0,
            },
            {"op": "stop", "id": "a"},
            {"op": "put", "path": "file"},
            {"op": "get", "path": chance.choice(["file", "nothing", "\0"]), "max_bytes": 50_000},
            {**LIST, "path": chance.choice([".", "file", "\ud800"])},
            {"op": "pipe", "argv": chance.choice([["cat"], ["nothing"], []])},
        ]
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b"{", "the configuration is not a JSON object"),
        (b"{}", "no usable env"),
        (
            json.dumps({**asdict(GuestConfig()), "directories": ["/dev/null/x"]}).encode(),
            "/dev/null/x",
        ),
        (json.dumps({**asdict(GuestConfig()), "rlimits": {"RLIMIT_X": 1}}).encode(), "RLIMIT_X"),
    ],
)
def test_invalid_configuration_ends_the_agent_with_an_error(
    binary: Path, config: bytes, said: str
) -> None:
    with started(binary, config) as agent:
        assert agent.receive() is None
        code, words = agent.end()
    assert (code, said in words) == (1, True), words


# What passes the link


def test_agent_reads_frames_that_arrive_byte_by_byte(agent: WatchedProcess) -> None:
    request = {**EXEC, "id": "c", "command": "cat", "stdin": "data"}
    for byte in json_frame(1, OPEN, request) + frame(1, DATA, b"text") + frame(1, EOF):
        agent.send(bytes([byte]))
    assert agent.read_to_end(1)[0] == "text"


def test_terminal_input_is_credited_when_a_program_can_read_it(agent: WatchedProcess) -> None:
    line = b"0123456789abcde\n"
    typed = line * (60_000 // len(line))
    agent.exec(1, "c", "mkfifo gate; read x < gate; wc -c", stdin="terminal")
    agent.send(frame(1, DATA, typed), frame(1, EOF), frame(0, PING))
    credited, pongs = 0, 0
    while pongs == 0:
        received = agent.receive()
        assert received is not None
        pongs += received[1] == PONG
        credited += CREDIT.unpack(received[2])[0] if received[1] == WINDOW else 0
    assert credited < len(typed)
    agent.exec(3, "go", "echo x > gate")
    while (received := agent.receive()) and received[:2] != (1, DATA):
        credited += CREDIT.unpack(received[2])[0] if received[:2] == (1, WINDOW) else 0
    assert received == (1, DATA, b"%d\n" % len(typed))
    assert credited == len(typed)


# What commands get


def test_command_inherits_only_its_standard_descriptors(binary: Path, tmp_path: Path) -> None:
    with (
        (tmp_path / "left open").open("w") as file,
        started(binary, _config(tmp_path), file.fileno()) as agent,
    ):
        agent.receive()
        agent.exec(1, "c", "ls /proc/$$/fd")
        assert agent.read_to_end(1)[0].split() == ["0", "1", "2"]
        assert agent.end() == (0, "")


def test_commands_have_the_configured_limits_and_variables(binary: Path, tmp_path: Path) -> None:
    config = _config(tmp_path, rlimits={"RLIMIT_NOFILE": 123}, env={"HOME": "/h", "NEW": "é"})
    with started(binary, config) as agent:
        agent.receive()
        agent.exec(1, "c", "ulimit -n; echo $HOME $NEW; pwd")
        assert agent.read_to_end(1)[0] == f"123\n/h é\n{tmp_path}/work\n"
        assert agent.end() == (0, "")


def test_an_image_without_bash_runs_its_commands_in_sh(binary: Path, tmp_path: Path) -> None:
    with started(binary, _config(tmp_path, env={"PATH": "/nowhere"})) as agent:
        agent.receive()
        agent.exec(1, "short", "echo $((6 * 7)) ${BASH_VERSION-none}")
        assert agent.read_to_end(1)[0] == "42 none\n"
        agent.exec(3, "long", f"echo $((6 * 7)) # {'x' * 200_000}", shell_state="snapshot")
        assert agent.read_to_end(3)[0] == "42\n"
        assert agent.end() == (0, "")


def test_limit_events_are_counted_from_the_start_of_a_command(binary: Path, tmp_path: Path) -> None:
    oom, pids = tmp_path / "oom", tmp_path / "pids"
    oom.write_text("low 0\noom_kill 2\n")
    pids.write_text("max 7\n")
    pressure = {"oom": [str(tmp_path / "nothing"), str(oom)], "pids": [str(pids)]}
    with started(binary, _config(tmp_path, pressure=pressure)) as agent:
        agent.receive()
        agent.exec(1, "c", f"echo oom_kill 5 > {oom}; echo max 8 > {pids}")
        report = agent.read_to_end(1)[2]
        assert (report["oom_kills"], report["pids_refused"]) == (3, 1)
        assert agent.end() == (0, "")


# Hashes


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 3_000_001])
def test_a_listing_has_the_hashes_of_its_files(
    agent: WatchedProcess, tmp_path: Path, size: int
) -> None:
    data = random.Random(SEED).randbytes(size)
    (tmp_path / "work" / "file").write_bytes(data)
    os.mkfifo(tmp_path / "work" / "fifo")
    agent.open(1, **LIST, path=".")
    lines, _, report = agent.read_to_end(1)
    digest = hashlib.sha256(data).hexdigest()
    expected = [["fifo", "other", 0], ["file", "file", size, digest]]
    assert sorted(json.loads(line) for line in lines.splitlines()) == expected
    assert report == {"truncated": False}


def test_path_that_is_not_utf_8_is_put_and_listed(agent: WatchedProcess, tmp_path: Path) -> None:
    agent.open(1, op="put", path="caf\udce9/\udcff")
    agent.send(frame(1, DATA, b"x"), frame(1, EOF))
    assert agent.read_to_end(1)[2] == {"bytes": 1}
    assert (tmp_path / "work" / os.fsdecode(b"caf\xe9/\xff")).read_bytes() == b"x"
    agent.open(3, **{**LIST, "hash_bytes": None}, path=".")
    lines = agent.read_to_end(3)[0].splitlines()
    assert [json.loads(line)[0] for line in lines] == ["caf\udce9", "caf\udce9/\udcff"]
