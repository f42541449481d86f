#!/usr/bin/python3 -ISu
"""An agent that has gone over to the enemy: it answers each request as the request itself says.

It runs inside, where an agent of ours should: standard library only, Python 3.8.
"""

import itertools
import json
import os
import select
import struct
import time

HEADER = struct.Struct(">IBI")
HELLO, OPEN, DATA, STDERR = 1, 2, 3, 4
EOF, WINDOW, END, RESET, PING, PONG = 7, 8, 9, 10, 11, 12
BLOCK = 1 << 16
FIRST_WINDOW = 1 << 14
GREETING = '{"version": 4}'


def main():
    read(int.from_bytes(read(4), "big"))  # what an agent is told first
    send(0, HELLO, GREETING.encode())
    while True:
        stream, kind, payload = receive()
        if kind == PING:
            send(0, PONG)
        if kind == OPEN:
            request = json.loads(payload)
            attack = request.get("command") or request["path"].strip("/")
            ATTACKS[attack](stream)


def receive():
    stream, kind, length = HEADER.unpack(read(HEADER.size))
    return stream, kind, read(length)


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


def send_on_credit(stream, pieces, write_frame=write):
    """Send data only as the host gives credit for it, until it gives the stream up."""
    credit = FIRST_WINDOW
    for count, piece in enumerate(pieces):
        while credit < len(piece) or (count % 256 == 0 and select.select([0], [], [], 0)[0]):
            number, kind, payload = receive()
            if kind == PING:
                send(0, PONG)
            elif (number, kind) == (stream, RESET):
                return
            elif (number, kind) == (stream, WINDOW):
                credit += int.from_bytes(payload, "big")
        credit -= len(piece)
        write_frame(HEADER.pack(stream, DATA, len(piece)) + piece)


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


def data_of_one_byte(stream):
    send_on_credit(stream, itertools.repeat(b"x"))


def frames_byte_by_byte(stream):
    def drip(data):
        for place in range(len(data)):
            write(data[place : place + 1])

    send_on_credit(stream, itertools.repeat(b"x"), drip)


def sound(stream):
    names = "duration_s cpu_s peak_memory_bytes oom_kills pids_refused reading"
    counts = "bytes omitted_lines kept_bytes"
    outputs = [output + "_" + count for output in ("stdout", "stderr") for count in counts.split()]
    report(stream, **dict.fromkeys(names.split() + outputs, 0))


def header_that_never_ends(stream):
    for byte in HEADER.pack(stream, DATA, 1)[:-1]:
        write(bytes([byte]))
        time.sleep(0.05)
    sleep()


def connections_reset(stream):
    for number in itertools.count(2, 2):
        send(number, OPEN, b"{}")
        send(number, RESET)


def connections_finished(stream):
    for number in itertools.count(2, 2):
        send(number, OPEN, b"{}")
        send(number, EOF)


def connections_full(stream):
    for number in itertools.count(2, 2):
        send(number, OPEN, b"{}")
        send(number, DATA, bytes(FIRST_WINDOW))
        send(number, EOF)


def connections_with_more_than_their_credit(stream):
    for number in itertools.count(2, 2):
        send(number, OPEN, b"{}")
        for _ in range(4):
            send(number, DATA, bytes(BLOCK))


def credit_for_nothing(stream):
    while True:
        send(stream, WINDOW, bytes(4))


def end_of_no_connection(stream):
    while True:
        send(2, RESET)


def end_of_no_operation(stream):
    while True:
        send(stream + 100, END, b"{}")


def report_before_its_command(stream):
    sound(stream + 2)
    sound(stream)


def nothing_answered(stream):
    while True:
        receive()


def entries_without_end(stream):
    send_on_credit(stream, (b'["%d", "file", 1]\n' % n for n in itertools.count()))


def entry_without_end(stream):
    send_on_credit(stream, itertools.repeat(b"x" * 4096))


def entry_byte_by_byte(stream):
    send_on_credit(stream, itertools.repeat(b"x"))


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
        *(data_of_one_byte, frames_byte_by_byte, sound, header_that_never_ends),
        *(connections_reset, connections_finished, connections_full, credit_for_nothing),
        connections_with_more_than_their_credit,
        *(end_of_no_connection, end_of_no_operation, report_before_its_command, nothing_answered),
        *(entries_without_end, entry_without_end, entry_byte_by_byte),
    )
}

if __name__ == "__main__":
    main()
