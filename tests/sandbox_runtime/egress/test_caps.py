"""Limits on connections, traffic and time of one sandbox."""

import tracemalloc

import anyio
import pytest
from anyio import fail_after, move_on_after

from policies.egress import Egress
from sandbox_runtime.egress.decision import DeniedError
from sandbox_runtime.egress.limits import Timeouts, TrafficQuota
from tests.fakes.waiting import until
from tests.sandbox_runtime.egress.internet import Internet, Origin, Reader, Writer, echo
from tests.sandbox_runtime.egress.programs import allowlist, gateway_client

MIB = 1 << 20
GET = b"GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n\r\n"
HOST = "allowed.example:7"


async def pour(reader: Reader, writer: Writer) -> None:
    """Sends without end."""
    while True:
        writer.write(bytes(64 << 10))
        await writer.drain()


async def test_connections_beyond_the_cap_are_refused_with_a_reason() -> None:
    internet, origin = Internet(), Origin()
    egress = allowlist("allowed.example", HOST, max_connections=2)
    async with (
        internet.server(echo, port=7),
        internet.server(origin),
        gateway_client(egress, internet) as sandbox,
    ):
        with fail_after(5):
            held = [await sandbox.connect(HOST) for _ in range(2)]
            answer = await sandbox.exchange(GET)
            assert answer.startswith(b"HTTP/1.1 503 Service Unavailable: this sandbox has 2 conn")
            refused = await sandbox.exchange(b"\x05\x01\x00\x05\x01\x00\x03\x01a\x00\x50")
            assert refused == b"\x05\x00\x05\x02\x00\x01" + bytes(6)
            held[0][1].close()
            await until(lambda: len(sandbox.decisions) == 3)
            assert (await sandbox.exchange(GET)).startswith(b"HTTP/1.1 200 ")
    assert [decision.verdict for decision in sandbox.decisions[:3]] == [
        "denied",
        "denied",
        "allowed",
    ]


async def test_bytes_beyond_the_traffic_cap_do_not_pass() -> None:
    internet = Internet()
    async with (
        internet.server(pour, port=7),
        gateway_client(allowlist(HOST), internet) as sandbox,
    ):
        sandbox.gateway.traffic.limit_further_traffic(MIB)
        with fail_after(5):
            reader, _ = await sandbox.connect(HOST)
            assert MIB - (64 << 10) <= len(await reader.read()) <= MIB
            decision = await sandbox.only_decision()
            assert b"the budget for network traffic is used up" in await sandbox.exchange(
                GET.replace(b"allowed.example", HOST.encode())
            )
    assert len(internet.dialed) == 1
    assert decision.verdict == "denied"
    assert decision.reason == "the budget for network traffic is used up"
    assert decision.bytes_down <= MIB


async def test_traffic_in_both_directions_counts_toward_the_traffic_cap() -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=7),
        gateway_client(allowlist(HOST), internet) as sandbox,
    ):
        sandbox.gateway.traffic.limit_further_traffic(MIB)
        with fail_after(5):
            reader, writer = await sandbox.connect(HOST)
            writer.write(bytes(MIB * 2 // 3))
            assert len(await reader.read()) < MIB * 2 // 3
            decision = await sandbox.only_decision()
    assert decision.bytes_up + decision.bytes_down <= MIB


def test_rate_limit_allows_a_burst_of_one_second_and_delays_further_bytes() -> None:
    traffic = TrafficQuota(Egress(max_mib_per_s=1.0))
    assert traffic.reserve(MIB // 2, now=100.0) == 0
    assert traffic.reserve(MIB // 2, now=100.0) == 0
    assert traffic.reserve(MIB // 2, now=100.0) == 0.5
    assert traffic.reserve(MIB // 2, now=100.0) == 1.0
    assert traffic.reserve(MIB, now=103.0) == 0
    assert traffic.reserve(MIB, now=103.0) == 1.0
    assert traffic.reserve(MIB, now=1000.0) == 0
    assert traffic.reserve(MIB, now=1000.0) == 1.0


def test_reservation_beyond_the_traffic_quota_uses_up_the_quota() -> None:
    traffic = TrafficQuota()
    traffic.limit_further_traffic(2 * MIB)
    assert traffic.reserve(MIB, now=0.0) == 0
    with pytest.raises(DeniedError, match="is used up"):
        traffic.reserve(MIB + 1, now=0.0)
    with pytest.raises(DeniedError, match="is used up"):
        traffic.check()


def test_new_traffic_cap_limits_only_later_bytes() -> None:
    traffic = TrafficQuota()
    assert traffic.reserve(MIB, now=0.0) == 0
    traffic.limit_further_traffic(MIB)
    assert traffic.reserve(MIB, now=0.0) == 0
    with pytest.raises(DeniedError, match="the budget for network traffic is used up"):
        traffic.reserve(1, now=0.0)
    traffic.limit_further_traffic(MIB)
    assert (traffic.reserve(MIB, now=0.0), traffic.bytes) == (0, 3 * MIB)


@pytest.mark.parametrize("rate", [0.1, 100.0])
async def test_traffic_above_the_rate_waits(rate: float) -> None:
    internet = Internet()
    async with (
        internet.server(pour, port=7),
        gateway_client(allowlist(HOST, max_mib_per_s=rate), internet) as sandbox,
    ):
        reader, _ = await sandbox.connect(HOST)
        with move_on_after(0.5 if rate < 1 else 5) as scope:
            await reader.readexactly(2 * MIB)
        assert scope.cancelled_caught is (rate < 1)


@pytest.mark.parametrize("sent", [b"", b"G", GET[:-2], GET.replace(b"GET", b"POST")[:-1]], ids=repr)
async def test_connection_without_a_complete_request_times_out(sent: bytes) -> None:
    internet = Internet()
    timeouts = Timeouts(head_s=0.05)
    async with gateway_client(allowlist("allowed.example"), internet, timeouts=timeouts) as sandbox:
        with fail_after(5):
            answer = await sandbox.exchange(sent)
            decision = await sandbox.only_decision()
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout: no complete request within 0.05 s\r\n")
    assert (decision.verdict, decision.host) == ("denied", "")
    assert internet.dialed == []


async def test_slowly_sent_request_head_does_not_extend_its_timeout() -> None:
    timeouts = Timeouts(head_s=0.1)
    async with gateway_client(
        allowlist("allowed.example"), Internet(), timeouts=timeouts
    ) as sandbox:
        reader, writer = await sandbox.open()

        async def dribble() -> None:
            for byte in GET[:-4] + b"\r\nX: " + b"y" * 10_000:
                writer.write(bytes((byte,)))
                await anyio.sleep(0.005)

        with fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(dribble)
                assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
                group.cancel_scope.cancel()


async def test_idle_tunnel_is_closed() -> None:
    internet = Internet()
    async with (
        internet.server(echo, port=7),
        gateway_client(allowlist(HOST), internet, timeouts=Timeouts(idle_s=0.1)) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.connect(HOST)
            writer.write(b"hello")
            assert await reader.read() == b"hello"
            decision = await sandbox.only_decision()
    assert (decision.verdict, decision.reason) == ("allowed", "nothing passed for 0.1 s")


async def test_bytes_in_one_direction_keep_a_tunnel_open() -> None:
    internet = Internet()
    arrived = 0

    async def trickle(_: Reader, writer: Writer) -> None:
        for _ in range(15):
            writer.write(b".")
            await anyio.sleep(0.1)

    async def count(reader: Reader, _: Writer) -> None:
        nonlocal arrived
        while await reader.read(1):
            arrived += 1

    async with (
        internet.server(trickle, port=7),
        internet.server(count, port=9),
        gateway_client(
            allowlist(HOST, "allowed.example:9"), internet, timeouts=Timeouts(idle_s=1.0)
        ) as sandbox,
    ):
        with fail_after(10):
            reader, writer = await sandbox.connect(HOST)
            _, other = await sandbox.connect("allowed.example:9")
            received = b""
            while data := await reader.read(100):
                received += data
                other.write(data)
            writer.close()
            other.close()
            await until(lambda: len(sandbox.decisions) == 2)
    assert (len(received), arrived) == (15, 15)


async def test_tunnel_of_a_program_that_does_not_read_times_out() -> None:
    internet = Internet()
    async with (
        internet.server(pour, port=7),
        gateway_client(allowlist(HOST), internet, timeouts=Timeouts(idle_s=0.1)) as sandbox,
    ):
        with fail_after(5):
            await sandbox.connect(HOST)
            decision = await sandbox.only_decision()
    assert decision.reason == "nothing passed for 0.1 s"
    assert decision.bytes_down < 64 * MIB


async def test_server_that_does_not_answer_times_out() -> None:
    internet = Internet()

    async def mute(reader: Reader, _writer: Writer) -> None:
        await reader.read()

    async with (
        internet.server(mute),
        gateway_client(
            allowlist("allowed.example"), internet, timeouts=Timeouts(idle_s=0.1)
        ) as sandbox,
    ):
        with fail_after(5):
            answer = await sandbox.exchange(GET)
    assert answer.startswith(b"HTTP/1.1 504 Gateway Timeout: nothing passed for 0.1 s\r\n")


async def test_connection_left_open_by_the_program_is_closed_after_the_answer() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(
            allowlist("allowed.example"), internet, timeouts=Timeouts(linger_s=0.05)
        ) as sandbox,
    ):
        with fail_after(5):
            reader, writer = await sandbox.open()
            writer.write(GET)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            decision = await sandbox.only_decision()
    assert (decision.verdict, decision.reason) == ("allowed", "")


@pytest.mark.parametrize("direction", ["down", "up"])
async def test_relayed_traffic_uses_bounded_memory(direction: str) -> None:
    internet, total = Internet(), 64 * MIB

    async def count(reader: Reader, writer: Writer) -> None:
        arrived = 0
        while data := await reader.read(64 << 10):
            arrived += len(data)
        writer.write(str(arrived).encode())

    async with (
        internet.server(pour if direction == "down" else count, port=7),
        gateway_client(allowlist(HOST, max_mib_per_s=10_000), internet) as sandbox,
    ):
        with fail_after(30):
            reader, writer = await sandbox.connect(HOST)
            tracemalloc.start()
            try:
                left = total
                while left:
                    if direction == "down":
                        left -= len(await reader.read(left))
                    else:
                        writer.write(bytes(64 << 10))
                        await writer.drain()
                        left -= 64 << 10
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            if direction == "up":
                writer.write_eof()
                assert int(await reader.read()) == total
    assert peak < 2 * MIB
