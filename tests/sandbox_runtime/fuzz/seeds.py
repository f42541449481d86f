"""Write the seeds of the kept corpus: python -m tests.sandbox_runtime.fuzz.seeds

An input of the session target is a row of events, each a byte and what belongs to it, as in
native/events.c. Most seeds are sessions that go well; what a fuzzer made of them lies beside them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict

from sandbox_runtime.guest.agent import GuestConfig
from sandbox_runtime.packets import PACKET_DATA, PACKET_END, Packet, packet_bytes
from sandbox_runtime.protocol import ACK, DATA, EOF, OPEN, PING, RESET, frame, json_frame
from tests.sandbox_runtime.fuzz.building import CORPUS
from tests.sandbox_runtime.guest.agent_process import EXEC

SEND, SEND_MUCH, SEND_RAW, GRANT, HOST_READS, HOST_READS_ALL = range(6)
PRINT, PRINT_MUCH, PROGRAM_READS, PROGRAM_ENDS = range(6, 10)
CALL, CALLER_SENDS, CALLER_READS, HANG_UP = range(10, 14)
WAIT, MAKE_FILE, FAIL = range(14, 17)
PACKETS_TOKEN = b"defghijklmnopqrs"
"""As in native/target_packets.c."""
_COMMAND = {**EXEC, "id": "a", "command": "true", "shell_state": "snapshot"}
_LIST = {"op": "list", "path": ".", "max_depth": None, "max_entries": 99, "hashes": True}


def main() -> None:
    for target, seeds in _seeds().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in seeds.items():
            (CORPUS / target / f"seed-{name}").write_bytes(data)


def _seeds() -> Mapping[str, Mapping[str, bytes]]:
    frames = json_frame(1, OPEN, _COMMAND) + frame(1, DATA, b"text") + frame(0, PING)
    config = {**asdict(GuestConfig()), "directories": ("/box", "/box/dir/new"), "env": {"A": "é"}}
    return {
        "session": {**_commands(), **_jobs(), **_files(), **_connections(), **_faults()},
        "config": {
            "whole": json.dumps(config).encode(),
            "no-directory": json.dumps({**config, "directories": [""]}).encode(),
        },
        "packets": _packets(),
        "frames": {"three": b"\4" + frames, "too-long": b"\1" + b"\xff" * 9},
        "json": {"request": json.dumps({**_COMMAND, "n": [-1.5e9, True, "\udce9🎉"]}).encode()},
        "report": {"words": 'caf\udce9 \udcff"\\\n數🎉\ud800'.encode("utf-8", "surrogatepass")},
        "capture": {"lines": b"\2\4\1\1" + b"text\n" * 40 + "數🎉".encode() * 9},
    }


def _packets() -> Mapping[str, bytes]:
    one = packet_bytes(PACKETS_TOKEN, Packet(PACKET_DATA, 1, 0, 0, 5, b"x" * 40))
    two = packet_bytes(PACKETS_TOKEN, Packet(PACKET_END, 2, 40, 7, 6))
    raw, repaired = b"\0\6", b"\1\6"
    return {
        "two": raw + one + two,
        "interrupted": raw + one[:60] + two + one[60:] + one,
        "rest": raw + one[20:] + two,
        "made-valid": repaired + PACKETS_TOKEN + bytes(range(90)),
    }


def _commands() -> Mapping[str, bytes]:
    stdin = {**_COMMAND, "stdin": "data", "cwd": "dir", "env": {"A": "'"}}
    kept = {**_COMMAND, "max_bytes": 9, "keep": "/box/kept", "max_kept_bytes": 300}
    large = {**_COMMAND, "max_bytes": 1 << 20, "max_lines": 1 << 20}
    return {
        "command": b"".join(
            (
                *(_open(1, _COMMAND), _print(0, 1, b"out\n"), _print(0, 2, b"error\xff\n")),
                *(_end(0), _host(0, ACK, b"a")),
            )
        ),
        "stdin": _open(1, stdin) + _host(1, DATA, b"in") + _host(1, EOF) + _end(0, 2) + _wait(),
        "kept": _open(1, kept) + _print_much(0, 9, b"\n") + _print(0, 1, b"x" * 200) + _end(0),
        "kept-for-nothing": _open(1, kept) + _print(0, 1, b"x" * 9) + _end(0),
        "kept-in-root": _open(1, {**kept, "keep": "/kept"}) + _print(0, 1, b"x" * 20) + _end(0),
        "flood": b"".join(
            (
                *(_open(1, large), bytes([HOST_READS, 9]), _print_much(0, 255, b"a") * 5),
                *(bytes([HOST_READS_ALL]), _grant(1), _end(0)),
            )
        ),
    }


def _jobs() -> Mapping[str, bytes]:
    terminal = {**_COMMAND, "stdin": "terminal", "wait_s": 5}
    attach = {"op": "attach", "id": "a", "reading": 1, "wait_s": None}
    two = _open(1, _COMMAND) + _open(3, {**_COMMAND, "id": "b"})
    return {
        "terminal": b"".join(
            (
                *(_open(1, terminal), _host(1, DATA, b"typed\n"), _host(1, EOF), _reads(0)),
                *(_print(0, 3, b"on the terminal"), _wait(30), _end(0)),
            )
        ),
        "job": b"".join(
            (
                *(_open(1, {**_COMMAND, "wait_s": 0.5}), _wait(20), _print(0, 1, b"later")),
                *(_open(3, attach), _open(5, {"op": "stop", "id": "a"}), _wait(20)),
                *(_end(0, 255), _wait()),
            )
        ),
        "taken-over": _open(1, _COMMAND) + _open(3, _COMMAND) + _host(1, RESET) + _end(0),
        "timeout": two + _wait(200) + _wait(10),
        "pipe": b"".join(
            (
                *(_open(1, {"op": "pipe", "argv": ["/bin/cat", "\udce9"]}), _host(1, DATA, b"in")),
                *(_host(1, EOF), _reads(0), _print(0, 1, b"out"), _print(0, 2, b"last \xff")),
                _end(0),
            )
        ),
    }


def _files() -> Mapping[str, bytes]:
    put = {"op": "put", "path": "dir/new/file", "new": True}
    get = {"op": "get", "path": "long", "max_bytes": 400_000}
    names = _file(0, b"caf\xe9\n") + _file(2, b"fifo") + _file(3, b"link")
    return {
        "put": _open(1, put) + _host(1, DATA, b"content") + _send_much(1, 200) + _host(1, EOF),
        "get": _open(1, get) + _grant(1),
        "list": names + _open(1, _LIST),
    }


def _connections() -> Mapping[str, bytes]:
    call, read, finish, leave = bytes([CALL]), bytes([CALLER_READS, 0]), bytes([HANG_UP, 0]), 0x80
    answer = _host(2, DATA, b"answer") + read + _host(2, EOF) + finish
    return {
        "egress": b"".join(
            (
                *(call, bytes([CALLER_SENDS, 0, 5]), b"hello", answer, call, call),
                *(bytes([HANG_UP, leave + 2]), _host(4, RESET)),
            )
        ),
        "slow-caller": call + _send_much(2, 255) * 3 + read * 3 + bytes([HANG_UP, leave]),
    }


def _faults() -> Mapping[str, bytes]:
    terminal = {**_COMMAND, "stdin": "terminal"}
    starts = [_open(2 * n + 1, {**terminal, "id": f"{n}"}) for n in range(1, 6)]
    return {
        "failing": b"".join(bytes([FAIL, n]) + start for n, start in enumerate(starts, 1)),
        "raw": bytes([SEND_RAW, 9]) + frame(0, PING) + bytes([SEND_RAW, 3]) + b"\0\0\0",
    }


def _host(stream: int, kind: int, payload: bytes = b"") -> bytes:
    return bytes([SEND, stream, kind, *len(payload).to_bytes(2, "big")]) + payload


def _send_much(stream: int, blocks: int) -> bytes:
    return bytes([SEND_MUCH, stream, blocks])


def _grant(stream: int) -> bytes:
    return bytes([GRANT, stream])


def _open(stream: int, request: Mapping[str, object]) -> bytes:
    return _host(stream, OPEN, json.dumps(request).encode())


def _print(program: int, stdio: int, data: bytes) -> bytes:
    return bytes([PRINT, program, stdio, len(data)]) + data


def _print_much(program: int, blocks: int, byte: bytes) -> bytes:
    return bytes([PRINT_MUCH, program, 1, blocks]) + byte


def _reads(program: int) -> bytes:
    return bytes([PROGRAM_READS, program])


def _end(program: int, status: int = 0) -> bytes:
    return bytes([PROGRAM_ENDS, program, status])


def _wait(ticks: int = 2) -> bytes:
    return bytes([WAIT, ticks])


def _file(kind: int, name: bytes) -> bytes:
    return bytes([MAKE_FILE, kind, len(name)]) + name


if __name__ == "__main__":
    main()
