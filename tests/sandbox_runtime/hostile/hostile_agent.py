#!/usr/bin/python3 -ISu
"""An agent that has gone over to the enemy: it answers each request as the request itself says.

It runs inside, where an agent of ours should: standard library only, Python 3.8.
"""

import json
import os
import struct
import time

HEADER = struct.Struct(">IBI")
HELLO, OPEN, DATA, STDERR, END, PING, PONG = 1, 2, 3, 4, 9, 11, 12
BLOCK = 1 << 16


def main():
    read(int.from_bytes(read(4), "big"))  # what an agent is told first
    hello = os.environ.get("HOSTILE_HELLO") or '{"version": 2}'
    send(0, HELLO, hello.encode())
    while True:
        stream, kind, length = HEADER.unpack(read(HEADER.size))
        payload = read(length)
        if kind == PING:
            send(0, PONG)
        if kind == OPEN:
            request = json.loads(payload)
            attack = request.get("command") or request["path"].strip("/")
            ATTACKS[attack](stream)


def read(length):
    data = b""
    while len(data) < length:
        piece = os.read(0, length - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def write(data):
    while data:
        data = data[os.write(1, data) :]


def send(stream, kind, payload=b""):
    write(HEADER.pack(stream, kind, len(payload)) + payload)


def report(stream, **changes):
    send(stream, END, json.dumps({"exit_code": 0, **changes}).encode())


def sleep():
    while True:
        time.sleep(1000)


def garbage(stream):
    while True:
        write(os.urandom(BLOCK))


def more_than_its_credit(stream):
    while True:
        send(stream, DATA, bytes(BLOCK))


def frames_of_one_byte(stream):
    while True:
        send(stream, STDERR, b"x")


def frame_of_four_gigabytes(stream):
    write(HEADER.pack(stream, DATA, 0xFFFFFFFF))
    while True:
        write(bytes(BLOCK))


def half_a_frame(stream):
    write(HEADER.pack(stream, DATA, 100))
    sleep()


def closed_output(stream):
    os.close(1)
    sleep()


def deep_report(stream):
    send(stream, END, b"[" * 60_000)


def number_that_is_none(stream):
    report(stream, exit_code="0")


def number_beyond_bounds(stream):
    report(stream, cpu_s=10**400)


def end_within_a_frame(stream):
    write(HEADER.pack(stream, DATA, 100) + b"x")
    os._exit(0)


def children_that_write(stream):
    for _ in range(8):
        if os.fork() == 0:
            garbage(stream)
    sleep()


def errors_without_end(stream):
    while True:
        os.write(2, bytes(BLOCK))


def silence(stream):
    sleep()


def paths_that_climb(stream):
    send(stream, DATA, b'["../../etc/passwd", "file", 1]\n')
    send(stream, END, b'{"truncated": false}')


def more_of_a_file(stream):
    send(stream, DATA, bytes(BLOCK))
    send(stream, END, b'{"bytes": 65536}')


ATTACKS = {
    attack.__name__: attack
    for attack in (
        *(garbage, more_than_its_credit, frames_of_one_byte, frame_of_four_gigabytes, half_a_frame),
        *(
            closed_output,
            deep_report,
            number_that_is_none,
            number_beyond_bounds,
            end_within_a_frame,
        ),
        *(children_that_write, errors_without_end, silence, paths_that_climb, more_of_a_file),
    )
}

if __name__ == "__main__":
    main()
