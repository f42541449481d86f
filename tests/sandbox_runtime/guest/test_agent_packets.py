"""The agent's resumable link, packet by packet: what is lost, late, damaged or sent twice."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_runtime.packets import (
    MAX_PAYLOAD_BYTES,
    PACKET_ADOPT,
    PACKET_DATA,
    PACKET_END,
    Packet,
    first_connection,
    packet_bytes,
)
from sandbox_runtime.protocol import (
    ACK,
    DATA,
    END,
    HEADER,
    OPEN,
    PING,
    PONG,
    VERSION,
    Decoder,
    frame,
    json_frame,
)
from tests.sandbox_runtime.guest.agent_process import (
    EXEC,
    PATIENCE_S,
    TOKEN,
    PacketAgent,
    packet_agent,
)

PING_FRAME, PONG_FRAME = frame(0, PING), frame(0, PONG)
COUNT = json_frame(1, OPEN, {**EXEC, "id": "one", "command": "echo ran >> count"})
SHOW = json_frame(3, OPEN, {**EXEC, "id": "two", "command": "cat count"})


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[PacketAgent]:
    with packet_agent(tmp_path) as started:
        yield started


@pytest.fixture
def ready(agent: PacketAgent) -> PacketAgent:
    """An agent whose HELLO has been received, but not acknowledged."""
    hello = agent.receive()
    assert hello is not None
    assert json.loads(hello.payload[HEADER.size :]) == {"version": VERSION, "agent": "c"}
    assert hello[:4] == (1, 1, 0, 0)
    return agent


def answer(agent: PacketAgent) -> Packet:
    packet = agent.receive()
    assert packet is not None
    return packet


def hello_length(agent: PacketAgent) -> int:
    return len(answer(agent).payload)


def ping(agent: PacketAgent, offset: int, **fields: int) -> Packet:
    """Send a PING at `offset` and return the packet with the answer."""
    agent.send(PING_FRAME, offset, **fields)
    packet = answer(agent)
    assert packet.payload.endswith(PONG_FRAME)
    return packet


def adopt(agent: PacketAgent, generation: int, **fields: int) -> None:
    """Adopt the link and expect the agent's HELLO as the first bytes."""
    number = first_connection(generation)
    agent.send(b"", 0, kind=PACKET_ADOPT, connection=number, **{"clock_ms": 0, **fields})
    while (packet := answer(agent)).connection != number:
        pass
    assert packet[2:4] == (0, 0)
    assert json.loads(packet.payload[HEADER.size :]) == {"version": VERSION, "agent": "c"}


def read_to_end(agent: PacketAgent, stream: int) -> bytes:
    """Return the output of an operation."""
    decoder, output = Decoder(1 << 20), b""
    while (packet := agent.receive()) is not None:
        for number, kind, payload in decoder.feed(packet.payload):
            if (number, kind) == (stream, END):
                return output
            output += payload if number == stream else b""
    raise EOFError(f"the agent ended, {agent.process.wait(PATIENCE_S)}")


def test_packets_that_arrive_twice_have_their_effect_once(ready: PacketAgent) -> None:
    ready.send(COUNT, 0)
    ready.send(COUNT, 0)
    assert read_to_end(ready, 1) == b""
    ready.send(COUNT[5:] + SHOW[:20], 5)
    ready.send(COUNT + SHOW, 0)
    assert read_to_end(ready, 3) == b"ran\n"


def test_bytes_after_a_gap_are_not_used_until_it_is_filled(ready: PacketAgent) -> None:
    ready.send(PING_FRAME, 9)
    first = ping(ready, 0)
    assert (first.payload, first.received) == (PONG_FRAME, 9)
    second = ping(ready, 9)
    assert (second.payload, second.received) == (PONG_FRAME, 18)


def test_unacknowledged_bytes_are_sent_again_on_a_new_connection(agent: PacketAgent) -> None:
    length = hello_length(agent)
    resumed = ping(agent, 0, connection=2, received=5)
    assert (resumed.connection, resumed.offset, resumed.received) == (2, 5, 9)
    assert len(resumed.payload) == length - 5 + len(PONG_FRAME)
    resumed = ping(agent, 9, connection=3, received=length)
    assert (resumed.connection, resumed.offset) == (3, length)
    assert resumed.payload == PONG_FRAME * 2


def test_new_connection_is_answered_even_if_there_is_nothing_to_send(agent: PacketAgent) -> None:
    length = hello_length(agent)
    agent.send(b"", 0, connection=2, received=length)
    packet = answer(agent)
    assert (packet.connection, packet.offset, packet.payload) == (2, length, b"")


def test_late_packet_of_an_earlier_connection_does_not_start_a_new_connection(
    agent: PacketAgent,
) -> None:
    length = hello_length(agent)
    agent.send(b"", 0, connection=3, received=length)
    assert answer(agent).connection == 3
    late = ping(agent, 0, connection=2, received=0)
    assert (late.connection, late.offset, late.payload) == (3, length, PONG_FRAME)


@pytest.mark.parametrize(
    "rubbish", [b"x" * 100_000, TOKEN, TOKEN + b"\xff" * 60, TOKEN[:9] + TOKEN[:3]]
)
def test_bytes_between_packets_are_skipped(ready: PacketAgent, rubbish: bytes) -> None:
    ready.send_bytes(rubbish)
    ready.send(PING_FRAME, 0)
    # Rubbish that ends like the beginning of a packet makes the agent skip the next packet too.
    ready.send(PING_FRAME, 0)
    assert answer(ready).payload == PONG_FRAME


@pytest.mark.parametrize("length", [1, 20, 53, 60, 1000])
def test_packets_of_the_next_connection_are_read_after_an_incomplete_packet(
    agent: PacketAgent, length: int
) -> None:
    sent_again = hello_length(agent) + len(PONG_FRAME)
    agent.send_bytes(agent.packet(PING_FRAME * 200, 0)[:length])
    agent.send(b"", 0, connection=2, received=0)
    agent.send(PING_FRAME, 0, connection=2)
    received = agent.receive_bytes(sent_again)
    assert received.endswith(PONG_FRAME)


def test_packet_interrupted_by_other_bytes_is_discarded_and_its_copy_takes_effect_once(
    ready: PacketAgent,
) -> None:
    whole = ready.packet(COUNT, 0)
    late = ready.packet(SHOW, 0)[30:]
    ready.send_bytes(whole[:90] + late + whole[90:] + whole)
    assert read_to_end(ready, 1) == b""
    ready.send(SHOW, len(COUNT))
    assert read_to_end(ready, 3) == b"ran\n"


def test_packet_that_arrives_byte_by_byte_is_read(ready: PacketAgent) -> None:
    for byte in ready.packet(PING_FRAME, 0):
        ready.send_bytes(bytes([byte]))
    assert answer(ready).payload == PONG_FRAME


def test_large_request_arrives_in_several_packets(ready: PacketAgent) -> None:
    command = f"echo {'x' * 100_000} | wc -c"
    request = json_frame(1, OPEN, {**EXEC, "id": "large", "command": command})
    for start in range(0, len(request), MAX_PAYLOAD_BYTES):
        ready.send(request[start : start + MAX_PAYLOAD_BYTES], start)
    assert read_to_end(ready, 1) == b"100001\n"


def test_end_packet_ends_the_agent(agent: PacketAgent) -> None:
    agent.send(b"", 0, kind=PACKET_END)
    assert agent.process.wait(PATIENCE_S) == 0


def test_acknowledgement_of_more_bytes_than_were_sent_ends_the_agent(agent: PacketAgent) -> None:
    length = hello_length(agent)
    agent.send(b"", 0, received=length + 1)
    assert agent.process.wait(PATIENCE_S) == 1


def test_agent_ends_if_its_host_stops_receiving_its_packets(tmp_path: Path) -> None:
    """Bytes that arrive do not prolong the lease: they may have been on their way for long."""
    with packet_agent(tmp_path, watchdog_s=0.5) as agent:
        stale_ms = answer(agent).clock_ms
        offset = 0
        while agent.receive() is not None:
            agent.send(PING_FRAME, offset, clock_ms=stale_ms)
            offset += len(PING_FRAME)
        assert agent.process.wait(PATIENCE_S) == 0


def test_agent_lives_as_long_as_the_host_receives_its_packets(tmp_path: Path) -> None:
    with packet_agent(tmp_path, watchdog_s=0.5) as agent:
        begin_ms = answer(agent).clock_ms
        offset = 0
        while agent.clock_ms - begin_ms < 2000:
            assert ping(agent, offset).received == offset + len(PING_FRAME)
            offset += len(PING_FRAME)


SECOND = first_connection(1)


def begin_command(agent: PacketAgent, directory: Path, command: str) -> None:
    """Start a command, and wait until it runs."""
    started = directory / "work" / "started"
    os.mkfifo(started)
    request = {**EXEC, "id": "one", "command": f"echo > started; {command}"}
    agent.send(json_frame(1, OPEN, request), 0)
    started.read_bytes()


def test_running_command_goes_on_for_the_host_that_adopts_it(
    ready: PacketAgent, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "work" / "gate")
    begin_command(ready, tmp_path, "echo ran >> count; cat gate; cat count")
    adopt(ready, 1)
    again = json_frame(1, OPEN, {**EXEC, "id": "one", "command": "echo not this one"})
    ready.send(again, 0, connection=SECOND)
    (tmp_path / "work" / "gate").write_text("opened\n")
    assert read_to_end(ready, 1) == b"opened\nran\n"


def test_result_is_kept_for_the_next_host_until_it_is_acknowledged(ready: PacketAgent) -> None:
    run = {**EXEC, "id": "one", "command": "echo ran >> count; cat count"}
    ready.send(json_frame(1, OPEN, run), 0)
    assert read_to_end(ready, 1) == b"ran\n"
    adopt(ready, 1)
    sent = json_frame(1, OPEN, run) + frame(0, ACK, b"one")
    ready.send(sent, 0, connection=SECOND)
    assert read_to_end(ready, 1) == b"ran\n"
    ready.send(json_frame(3, OPEN, run), len(sent), connection=SECOND)
    assert read_to_end(ready, 3) == b"ran\nran\n"


def test_packets_of_the_earlier_host_have_no_effect_after_an_adoption(
    ready: PacketAgent, tmp_path: Path
) -> None:
    adopt(ready, 1)
    ready.send(COUNT, 0)
    ready.send(COUNT, 0, connection=2)
    ready.send(b"", 0, kind=PACKET_END)
    ready.send(b"", 0, received=1 << 40)
    assert ping(ready, 0, connection=SECOND).received == len(PING_FRAME)
    assert not (tmp_path / "work" / "count").exists()


def test_adoption_by_an_earlier_generation_than_the_current_one_has_no_effect(
    ready: PacketAgent,
) -> None:
    adopt(ready, 1)
    adopt(ready, 5)
    ready.send(b"", 0, kind=PACKET_ADOPT, connection=SECOND + 7)
    ready.send(PING_FRAME, 0, connection=SECOND + 7)
    assert ping(ready, 0, connection=first_connection(5)).received == len(PING_FRAME)


def test_adoption_that_arrives_twice_has_its_effect_once(ready: PacketAgent) -> None:
    adopt(ready, 1)
    ping(ready, 0, connection=SECOND)
    ready.send(b"", 9, kind=PACKET_ADOPT, connection=SECOND + 1, received=0)
    packet = answer(ready)
    assert (packet.connection, packet.received) == (SECOND + 1, len(PING_FRAME))
    assert packet.payload.endswith(PONG_FRAME)


def test_packets_of_a_host_before_its_adoption_have_no_effect(ready: PacketAgent) -> None:
    ready.send(COUNT, 0, connection=SECOND)
    assert ping(ready, 0)[1] == 1
    adopt(ready, 1)
    ping(ready, 0, connection=SECOND)


def test_adoption_with_another_token_has_no_effect(ready: PacketAgent) -> None:
    forged = Packet(PACKET_ADOPT, SECOND, 0, 0, 0, b"")
    ready.send_bytes(packet_bytes(TOKEN[::-1], forged))
    assert ping(ready, 0).connection == 1


def test_unfinished_request_of_the_earlier_host_is_dropped_by_an_adoption(
    ready: PacketAgent,
) -> None:
    ready.send(COUNT[:20], 0)
    adopt(ready, 1)
    request = {**EXEC, "id": "two", "command": "echo none; ls -A"}
    ready.send(json_frame(3, OPEN, request), 0, connection=SECOND)
    assert read_to_end(ready, 3) == b"none\n"


def test_unfinished_transfers_of_the_previous_host_have_no_effect_after_an_adoption(
    ready: PacketAgent, tmp_path: Path
) -> None:
    put = json_frame(1, OPEN, {"op": "put", "path": "half", "new": False})
    pipe = json_frame(3, OPEN, {"op": "pipe", "argv": ["cat"]})
    stdin = json_frame(5, OPEN, {**EXEC, "id": "input", "command": "cat", "stdin": "data"})
    ready.send(put + frame(1, DATA, b"half a file") + pipe + stdin + PING_FRAME, 0)
    assert answer(ready).payload.endswith(PONG_FRAME)
    adopt(ready, 1)
    ready.send(json_frame(1, OPEN, {**EXEC, "id": "ls", "command": "ls -A"}), 0, connection=SECOND)
    assert read_to_end(ready, 1) == b""


def test_agent_that_receives_adoptions_ends_if_none_of_its_answers_arrives(
    tmp_path: Path,
) -> None:
    """An adoption that arrives may be old, so it does not prove that its host is still there."""
    with packet_agent(tmp_path, watchdog_s=0.5) as agent:
        begin_ms, adopted_ms, generation = answer(agent).clock_ms, 0, 0
        while agent.clock_ms - begin_ms < 2000:
            kind, number = PACKET_DATA, first_connection(generation)
            if agent.clock_ms >= adopted_ms + 10:
                generation, adopted_ms = generation + 1, agent.clock_ms
                kind, number = PACKET_ADOPT, first_connection(generation)
            agent.send(PING_FRAME, 0, kind=kind, connection=number, clock_ms=begin_ms)
            if agent.receive() is None:
                break
        assert agent.clock_ms - begin_ms < 2000
        assert agent.process.wait(PATIENCE_S) == 0


def test_agent_keeps_running_after_its_answer_to_an_adoption_has_arrived(tmp_path: Path) -> None:
    with packet_agent(tmp_path, watchdog_s=0.5) as agent:
        begin_ms, offset = answer(agent).clock_ms, 0
        adopt(agent, 1)
        while agent.clock_ms - begin_ms < 2000:
            ping(agent, offset, connection=SECOND)
            offset += len(PING_FRAME)
        assert agent.process.poll() is None
