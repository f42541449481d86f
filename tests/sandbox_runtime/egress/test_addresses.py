"""A name is resolved once, its addresses are checked, and only allowed addresses are dialed."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from anyio import fail_after

from policies.egress import Egress
from sandbox_runtime.egress.dialer import Server, SystemResolver
from sandbox_runtime.egress.gateway import Gateway
from sandbox_runtime.egress.limits import Timeouts
from tests.sandbox_runtime.egress.internet import PUBLIC, Internet, Origin, echo
from tests.sandbox_runtime.egress.programs import (
    GatewayClient,
    allowlist,
    gateway_client,
    serve_programs,
)

OPEN = Egress(mode="open")
NO_ADDRESS = b"has no address that a sandbox may reach"
OTHER = "1.1.1.1"


async def get(sandbox: GatewayClient, host: str) -> bytes:
    with fail_after(5):
        return await sandbox.exchange(
            f"GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        )


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",
        "169.254.169.254",
        "172.17.0.1",
        "192.168.0.1",
        "203.0.113.1",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:93.184.215.14",
        "64:ff9b::7f00:1",
        "2002:7f00:1::1",
        "2001::7f00:1",
        "fe80::1",
        "fe80::1%lo",
        "fd00:ec2::254",
        "ff02::1",
    ],
)
@pytest.mark.parametrize("egress", [OPEN, allowlist("inner.example")], ids=["open", "allowlist"])
async def test_name_without_a_public_address_is_denied(address: str, egress: Egress) -> None:
    internet = Internet({"inner.example": [address]})
    async with gateway_client(egress, internet) as sandbox:
        answer = await get(sandbox, "inner.example")
        decision = await sandbox.only_decision()
    assert NO_ADDRESS in answer
    assert address.encode() not in answer
    assert decision.verdict == "denied"
    assert internet.dialed == []


@pytest.mark.parametrize(
    "literal",
    ["127.0.0.1", "169.254.169.254", "[::1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "0.0.0.0"],
)
async def test_non_public_address_is_denied_in_open_mode(literal: str) -> None:
    internet = Internet()
    async with gateway_client(OPEN, internet) as sandbox:
        assert NO_ADDRESS in await get(sandbox, literal)
    assert internet.dialed == []


@pytest.mark.parametrize(
    "literal",
    ["2130706433", "017700000001", "0x7f.1", "127.1", "127.0.0.01", "[fe80::1%25lo]", "[::1%lo]"],
)
async def test_alternative_spelling_of_an_address_is_refused(literal: str) -> None:
    internet = Internet()
    async with gateway_client(OPEN, internet) as sandbox:
        assert (await get(sandbox, literal)).startswith(b"HTTP/1.1 400 ")
    assert internet.lookups == internet.dialed == []


async def test_public_address_needs_a_rule_outside_open_mode() -> None:
    internet, origin = Internet(), Origin()
    async with internet.server(origin):
        async with gateway_client(allowlist("allowed.example"), internet) as sandbox:
            assert b"is not in this sandbox's allowlist" in await get(sandbox, PUBLIC)
        for egress in (OPEN, allowlist(PUBLIC)):
            async with gateway_client(egress, internet) as sandbox:
                assert (await get(sandbox, PUBLIC)).startswith(b"HTTP/1.1 200 ")
    assert internet.lookups == []


async def test_name_is_resolved_once_and_only_checked_addresses_are_dialed() -> None:
    internet, origin = Internet({"rebinding.example": [PUBLIC]}), Origin()

    async def rebinding(host: str) -> Sequence[str]:
        answer = await internet.resolve(host)
        internet.names[host] = ["127.0.0.1"]
        return answer

    async with (
        internet.server(origin),
        gateway_client(OPEN, internet, resolve=rebinding) as sandbox,
    ):
        assert (await get(sandbox, "rebinding.example")).startswith(b"HTTP/1.1 200 ")
        assert internet.lookups == ["rebinding.example"]
        assert NO_ADDRESS in await get(sandbox, "rebinding.example")
    assert internet.dialed == [(PUBLIC, 80)]


async def test_non_public_addresses_of_a_name_are_skipped() -> None:
    internet, origin = Internet({"mixed.example": ["127.0.0.1", PUBLIC, "::1"]}), Origin()
    async with internet.server(origin), gateway_client(OPEN, internet) as sandbox:
        assert (await get(sandbox, "mixed.example")).startswith(b"HTTP/1.1 200 ")
    assert internet.dialed == [(PUBLIC, 80)]


async def test_next_address_is_tried_after_a_refused_connection() -> None:
    internet, origin = Internet({"two.example": [OTHER, PUBLIC, OTHER]}), Origin()
    async with internet.server(origin), gateway_client(OPEN, internet) as sandbox:
        assert (await get(sandbox, "two.example")).startswith(b"HTTP/1.1 200 ")
    assert internet.dialed == [(OTHER, 80), (PUBLIC, 80)]


async def test_next_address_is_tried_after_a_timeout() -> None:
    internet, origin = Internet({"two.example": [OTHER, PUBLIC]}), Origin()
    dialed: list[str] = []

    async def drops(ip: str, port: int) -> Server:
        dialed.append(ip)
        if ip == OTHER:
            await asyncio.Event().wait()
        return await internet.connect(ip, port)

    timeouts = Timeouts(connect_s=0.05)
    async with (
        internet.server(origin),
        gateway_client(OPEN, internet, connect=drops, timeouts=timeouts) as sandbox,
    ):
        assert (await get(sandbox, "two.example")).startswith(b"HTTP/1.1 200 ")
    assert dialed == [OTHER, PUBLIC]


async def test_unresponsive_address_or_resolver_is_reported_to_the_program() -> None:
    internet, timeouts = Internet({"silent.example": [PUBLIC]}), Timeouts(connect_s=0.05)

    async def silence(*_: object) -> Any:
        await asyncio.Event().wait()

    async with gateway_client(OPEN, internet, connect=silence, timeouts=timeouts) as sandbox:
        assert (await get(sandbox, "silent.example")).startswith(b"HTTP/1.1 504 Gateway Timeout: ")
    async with gateway_client(OPEN, internet, resolve=silence, timeouts=timeouts) as sandbox:
        assert b"cannot resolve silent.example: no answer" in await get(sandbox, "silent.example")


async def test_a_name_without_addresses_cannot_be_resolved() -> None:
    async with gateway_client(OPEN, Internet({"empty.example": []})) as sandbox:
        assert b"cannot resolve empty.example: it has no address" in await get(
            sandbox, "empty.example"
        )


@pytest.mark.parametrize("forbidden", [(PUBLIC, 80), (PUBLIC, None)], ids=["port", "every port"])
@pytest.mark.parametrize("host", ["allowed.example", PUBLIC])
@pytest.mark.parametrize(
    "egress",
    [
        OPEN,
        Egress(mode="open", allowed_cidrs=(f"{PUBLIC}/32",)),
        allowlist("allowed.example", PUBLIC),
    ],
    ids=["open", "named network", "allowlist"],
)
async def test_forbidden_address_is_denied_whatever_the_rules_allow(
    egress: Egress, host: str, forbidden: tuple[str, int | None]
) -> None:
    internet = Internet()
    async with gateway_client(egress, internet, forbidden=[forbidden]) as sandbox:
        assert NO_ADDRESS in await get(sandbox, host)
    assert internet.dialed == []


async def test_rules_decide_on_the_other_ports_of_an_address_forbidden_on_one_port() -> None:
    internet, origin = Internet(), Origin()
    async with (
        internet.server(origin),
        gateway_client(OPEN, internet, forbidden=[(PUBLIC, 8080)]) as sandbox,
    ):
        assert (await get(sandbox, "allowed.example")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
async def test_port_of_a_proxy_that_listens_on_all_addresses_is_denied_on_each_of_them(
    wildcard: str,
) -> None:
    egress = Egress(mode="open", allowed_cidrs=("127.0.0.0/8",))
    statuses: list[bytes] = []
    async with Internet().server(echo) as own_port, Internet().server(echo) as other_port:
        gateway = Gateway(egress, resolve=SystemResolver(), forbidden=[(wildcard, own_port)])
        async with serve_programs(gateway, []) as sandbox:
            for port in (own_port, other_port):
                reader, writer = await sandbox.open()
                writer.write(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
                with fail_after(5):
                    statuses.append((await reader.readline()).split()[1])
                writer.close()
    assert statuses == [b"403", b"200"]


def test_invalid_forbidden_address_raises_value_error() -> None:
    with pytest.raises(ValueError, match="localhost"):
        Gateway(OPEN, resolve=Internet().resolve, forbidden=[("localhost", 80)])


async def test_allowed_network_is_reached_over_real_sockets() -> None:
    resolver = SystemResolver()
    async with Internet().server(echo) as port:
        allow = (f"localhost:{port}", f"127.0.0.1:{port}")
        for cidrs, status in (((), b"403"), (("127.0.0.0/8",), b"200")):
            egress = Egress(mode="allowlist", allowed_hosts=allow, allowed_cidrs=cidrs)
            for authority in allow:
                async with serve_programs(Gateway(egress, resolve=resolver), []) as sandbox:
                    reader, writer = await sandbox.open()
                    writer.write(f"CONNECT {authority} HTTP/1.1\r\n\r\nhello".encode())
                    with fail_after(5):
                        assert (await reader.readline()).split()[1] == status
                        writer.write_eof()
                        assert (await reader.read()).endswith(b"hello") is (status == b"200")


async def test_system_resolver_returns_addresses_and_raises_for_an_unknown_name() -> None:
    resolver = SystemResolver()
    with fail_after(20):
        assert set(await resolver("localhost")) <= {"127.0.0.1", "::1"}
        assert list(await resolver("127.0.0.1")) == ["127.0.0.1"]
        with pytest.raises(socket.gaierror):
            await resolver("name.invalid")
