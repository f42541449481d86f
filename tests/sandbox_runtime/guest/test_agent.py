"""The agent at the level of frames: kept reports, repeated readings, and its end without a host."""

import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox_runtime.errors import SandboxStartError
from sandbox_runtime.guest.agent import agent_program
from sandbox_runtime.protocol import (
    CREDIT,
    DATA,
    EOF,
    FIRST_WINDOW_BYTES,
    OPEN,
    PING,
    PONG,
    RESET,
    WINDOW,
    WINDOW_BYTES,
    frame,
    json_frame,
)
from sandbox_runtime.reports import ListingReader
from tests.sandbox_runtime.guest.agent_process import EXEC, AgentProcess, agent_process

PATH_MAX = 4096
"""Maximum length of a path for Linux, in bytes, with the final NUL."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with agent_process(tmp_path) as process:
        yield process


def test_agent_program_of_an_unbuilt_architecture_raises_an_error() -> None:
    with pytest.raises(
        SandboxStartError, match=r"no guest agent for the machine 'pdp11'.*make install"
    ):
        agent_program("pdp11")


def test_an_agent_answers_a_ping(agent: AgentProcess) -> None:
    agent.send(frame(0, PING))
    assert agent.receive() == (0, PONG, b"")


def test_fifos_at_paths_of_the_agent_do_not_block_it(agent: AgentProcess) -> None:
    """The first command finds the agent's directory in its own arguments, and names its FIFOs after
    the numbers of the next commands.
    """
    place = r"tr '\0 ' '\n\n' < /proc/$$/cmdline | grep -om1 '.*/\.shell-[0-9a-f]*'"
    agent.exec(1, "one", f"cd $({place}) && mkfifo 2 3.command", shell_state="snapshot")
    assert agent.read_to_end(1)[2]["exit_code"] == 0
    agent.exec(3, "two", "echo two", shell_state="snapshot")
    assert agent.read_to_end(3)[0] == "two\n"
    agent.exec(5, "three", f"echo three # {'x' * 200_000}")
    assert agent.read_to_end(5)[0] == "three\n"


# At most once, and told until it has arrived


def test_report_of_a_command_is_repeated_until_acknowledged(agent: AgentProcess) -> None:
    agent.exec(1, "one", "echo ran; echo ran >> count")
    first = agent.read_to_end(1)
    agent.exec(3, "one", "echo ran; echo ran >> count")
    assert agent.read_to_end(3) == first
    agent.exec(5, "two", "cat count")
    assert agent.read_to_end(5)[0] == "ran\n"
    agent.acknowledge("one")
    agent.open(7, op="attach", id="one", reading=0, wait_s=1)
    assert agent.read_to_end(7)[2]["error"] == "unknown"


def test_output_segment_of_a_job_can_be_read_again_until_the_next_one_is_requested(
    agent: AgentProcess,
) -> None:
    agent.exec(1, "job", "mkfifo gate; echo before; read x < gate; echo after", wait_s=0.3)
    first = agent.read_to_end(1)
    assert (first[0], first[2]["running"], first[2]["reading"]) == ("before\n", True, 0)
    agent.open(3, op="attach", id="job", reading=0, wait_s=1)
    assert agent.read_to_end(3) == first
    agent.exec(5, "go", "echo x > gate")
    agent.read_to_end(5)
    agent.open(7, op="attach", id="job", reading=1, wait_s=20)
    output, _, report = agent.read_to_end(7)
    assert (output, report["running"], report["reading"]) == ("after\n", False, 1)
    agent.open(9, op="attach", id="job", reading=0, wait_s=1)
    assert agent.read_to_end(9)[2]["error"] == "unknown"


def test_second_attach_to_a_job_detaches_the_first_and_gets_the_complete_output(
    agent: AgentProcess,
) -> None:
    agent.exec(1, "job", "mkfifo gate; echo before; read x < gate; echo after")
    while (received := agent.receive()) and received[:2] != (1, DATA):
        pass
    agent.open(3, op="attach", id="job", reading=0, wait_s=20)
    assert agent.read_to_end(1)[2]["error"] == "detached"
    agent.exec(5, "go", "echo x > gate")
    assert agent.read_to_end(3)[0] == "before\nafter\n"


def test_agent_keeps_only_the_newest_command_reports(agent: AgentProcess) -> None:
    for number in range(70):
        agent.exec(2 * number + 1, f"c{number}", "true")
        agent.read_to_end(2 * number + 1)
    agent.open(201, op="attach", id="c0", reading=0, wait_s=1)
    assert agent.read_to_end(201)[2]["error"] == "unknown"
    agent.open(203, op="attach", id="c69", reading=0, wait_s=1)
    assert agent.read_to_end(203)[2]["exit_code"] == 0


# Its end


def test_agent_ends_after_a_silence_of_its_host(tmp_path: Path) -> None:
    with agent_process(tmp_path, watchdog_s=0.2) as agent:
        assert agent.receive() is None


def test_agent_keeps_running_while_its_host_sends_data(tmp_path: Path) -> None:
    with agent_process(tmp_path, watchdog_s=2.0) as agent:
        for stream in (1, 3, 5):
            agent.exec(stream, f"c{stream}", "sleep 1")
            agent.read_to_end(stream)
        agent.send(frame(0, PING))
        assert agent.receive() == (0, PONG, b"")


def test_an_agent_ends_when_its_lifetime_is_over(tmp_path: Path) -> None:
    with agent_process(tmp_path, lifetime_s=0.2) as agent:
        assert agent.receive() is None


def test_an_interrupt_does_not_end_an_agent(agent: AgentProcess) -> None:
    os.kill(agent.process.pid, signal.SIGINT)
    agent.exec(1, "c", "echo well")
    assert agent.read_to_end(1)[0] == "well\n"


# Nothing is left open


def test_commands_of_every_kind_leave_no_file_open(agent: AgentProcess) -> None:
    def everything(first: int) -> None:
        agent.exec(first, f"a{first}", "cat", stdin="data")
        agent.send(frame(first, DATA, b"x" * 1000), frame(first, EOF))
        agent.read_to_end(first)
        agent.exec(first + 2, f"b{first}", "echo", stdin="data")
        agent.send(frame(first + 2, DATA, b"x" * 1000), frame(first + 2, RESET))
        agent.exec(first + 4, f"c{first}", "cat", stdin="terminal")
        agent.send(frame(first + 4, DATA, b"line\n"), frame(first + 4, EOF))
        agent.read_to_end(first + 4)
        agent.exec(first + 6, f"d{first}", "true", env={"X\0": "1"})
        agent.read_to_end(first + 6)
        agent.open(first + 8, op="pipe", argv=["tar", "-c", "-f", "-", "."])
        agent.send(frame(first + 8, EOF))
        agent.read_to_end(first + 8)
        agent.open(first + 10, op="pipe", argv=["cat"])
        agent.send(frame(first + 10, RESET))
        agent.open(first + 12, op="put", path="file")
        agent.send(frame(first + 12, DATA, b"x"), frame(first + 12, RESET))
        agent.exec(first + 14, f"e{first}", "sleep 60")
        agent.send(frame(first + 14, RESET))
        agent.exec(first + 16, f"f{first}", "true")
        agent.read_to_end(first + 16)

    everything(1)
    before = agent.open_files()
    for first in range(101, 1101, 100):
        everything(first)
    assert agent.open_files() <= before + 3  # what was reset last may still be ending


def test_command_that_gets_no_terminal_leaves_no_file_open(agent: AgentProcess) -> None:
    before = agent.open_files()
    _, most = resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (before + 2, most))
    for stream in range(1, 9, 2):
        agent.exec(stream, f"t{stream}", "true", stdin="terminal")
        agent.read_to_end(stream)
    resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, (most, most))
    assert agent.open_files() == before


# Credit


def _sent(agent: AgentProcess, stream: int, most: int) -> int:
    """Read at least `most` bytes of output and check by a PING that no more follow; return how
    many there were."""
    received = 0
    while received < most:
        frame_received = agent.receive()
        assert frame_received is not None
        assert frame_received[:2] == (stream, DATA)
        received += len(frame_received[2])
    agent.send(frame(0, PING))
    assert agent.receive() == (0, PONG, b"")
    return received


def test_agent_sends_no_more_output_than_the_credit_of_its_host(agent: AgentProcess) -> None:
    agent.exec(1, "c", "head -c 1000000 /dev/zero", max_bytes=4_000_000)
    first = _sent(agent, 1, FIRST_WINDOW_BYTES)
    agent.send(frame(1, WINDOW, CREDIT.pack(WINDOW_BYTES)))
    second = _sent(agent, 1, WINDOW_BYTES)
    agent.send(frame(1, WINDOW, CREDIT.pack(second)))
    rest, _, report = agent.read_to_end(1)
    assert (first, second) == (FIRST_WINDOW_BYTES, WINDOW_BYTES)
    assert (len(rest), report["stdout_bytes"]) == (1_000_000 - first - second, 1_000_000)


def test_credit_sent_with_a_request_applies_to_its_output(agent: AgentProcess) -> None:
    request = {**EXEC, "id": "c", "command": "head -c 1000000 /dev/zero", "max_bytes": 4_000_000}
    more = WINDOW_BYTES - FIRST_WINDOW_BYTES
    agent.send(json_frame(1, OPEN, request) + frame(1, WINDOW, CREDIT.pack(more)))
    assert _sent(agent, 1, WINDOW_BYTES) == WINDOW_BYTES


# The way out


def test_agent_opens_a_stream_for_each_connection_to_its_port(tmp_path: Path) -> None:
    port = _free_port()
    with agent_process(tmp_path, egress_port=port) as agent:
        agent.send(frame(0, PING))  # once it is answered, the port is there
        assert agent.receive() == (0, PONG, b"")
        with socket.create_connection(("127.0.0.1", port), 20) as program:
            assert agent.receive() == (2, OPEN, b"{}")
            program.sendall(b"question")
            assert agent.receive() == (2, DATA, b"question")
            agent.send(frame(2, DATA, b"answer"))
            assert program.recv(100) == b"answer"
            assert agent.receive() == (2, WINDOW, CREDIT.pack(6))
            program.shutdown(socket.SHUT_WR)
            assert agent.receive() == (2, EOF, b"")
            agent.send(frame(2, DATA, b"more"), frame(2, EOF))
            assert program.recv(100) + program.recv(100) == b"more"


def test_data_of_a_connection_is_limited_by_the_credit(tmp_path: Path) -> None:
    port = _free_port()
    with agent_process(tmp_path, egress_port=port) as agent:
        agent.send(frame(0, PING))
        assert agent.receive() == (0, PONG, b"")
        with socket.create_connection(("127.0.0.1", port), 20) as program:
            assert agent.receive() == (2, OPEN, b"{}")
            program.sendall(bytes(2 * FIRST_WINDOW_BYTES))
            assert _sent(agent, 2, FIRST_WINDOW_BYTES) == FIRST_WINDOW_BYTES
            agent.send(frame(2, WINDOW, CREDIT.pack(1)))
            assert agent.receive() == (2, DATA, b"\0")


def test_a_connection_that_the_host_refuses_is_closed(tmp_path: Path) -> None:
    port = _free_port()
    with agent_process(tmp_path, egress_port=port) as agent:
        agent.send(frame(0, PING))
        assert agent.receive() == (0, PONG, b"")
        with socket.create_connection(("127.0.0.1", port), 20) as program:
            assert agent.receive() == (2, OPEN, b"{}")
            agent.send(frame(2, RESET))
            assert program.recv(100) == b""


def test_host_is_notified_when_a_program_resets_its_connection(tmp_path: Path) -> None:
    port = _free_port()
    with agent_process(tmp_path, egress_port=port) as agent:
        agent.send(frame(0, PING))
        assert agent.receive() == (0, PONG, b"")
        program = socket.create_connection(("127.0.0.1", port), 20)
        assert agent.receive() == (2, OPEN, b"{}")
        program.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        program.close()  # with a reset
        assert agent.receive() == (2, RESET, b"")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# Files without end

VAST = 1 << 40


@pytest.fixture
def vast(agent: AgentProcess, tmp_path: Path) -> Path:
    """Return a directory of sparse files, which take hours to read and no disk space."""
    directory = tmp_path / "work" / "vast"
    directory.mkdir()
    for name in ("a", "b", "c"):
        with (directory / name).open("wb") as file:
            file.truncate(VAST)
    return directory


def test_hashing_stops_in_the_middle_of_a_file_when_its_time_is_up(
    agent: AgentProcess, vast: Path
) -> None:
    limits = {"max_entries": 100, "max_depth": None, "hash_bytes": VAST, "hash_s": 0.1}
    agent.open(1, op="list", path=str(vast), **limits)
    lines, _, report = agent.read_to_end(1)
    listed = sorted(line.rstrip().removesuffix(', ""]').rstrip("]") for line in lines.splitlines())
    assert listed == [f'["{name}", "file", {VAST}' for name in ("a", "b", "c")]
    assert report == {"truncated": False}


def test_cancelled_listing_leaves_no_file_open(agent: AgentProcess, vast: Path) -> None:
    open_files = agent.open_files()
    limits = {"max_entries": 100, "max_depth": None, "hash_bytes": VAST, "hash_s": 3600}
    agent.open(1, op="list", path=str(vast), **limits)
    agent.send(frame(0, PING))
    assert agent.receive() == (0, PONG, b"")
    while agent.open_files() == open_files:  # until the first file is being hashed
        pass
    agent.send(frame(1, RESET), frame(0, PING))
    assert agent.receive() == (0, PONG, b"")
    assert agent.open_files() == open_files


@contextmanager
def deep_directory(top: Path, path_bytes: int) -> Iterator[int]:
    """Make a directory below `top` whose path has `path_bytes` bytes; yield its descriptor."""
    fd = os.open(top, os.O_RDONLY)
    left = path_bytes - len(os.fsencode(top))
    try:
        while left:
            name = "d" * (min(left, 201) - 1 if left != 202 else 100)
            os.mkdir(name, dir_fd=fd)
            inner = os.open(name, os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd, left = inner, left - len(name) - 1
        yield fd
    finally:
        os.close(fd)


async def test_listing_omits_entries_beyond_the_maximum_path_length(
    agent: AgentProcess, tmp_path: Path
) -> None:
    with deep_directory(tmp_path, PATH_MAX - 10) as fd:
        for name in ("f" * 8, "g" * 9, "h" * 255):
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    limits = {"max_entries": 100, "max_depth": None, "hash_bytes": None, "hash_s": None}
    agent.open(1, op="list", path=str(tmp_path), **limits)
    lines, _, report = agent.read_to_end(1)
    listing = ListingReader(max_entries=100)
    await listing.feed(lines.encode())
    longest = max((entry.path for entry in listing.finish()), key=len)
    assert longest.endswith("/ffffffff")
    assert len(os.fsencode(tmp_path / longest)) == PATH_MAX - 1
    assert report == {"truncated": False}
