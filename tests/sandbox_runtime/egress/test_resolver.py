"""Names are resolved by the host's files; silent name servers do not delay other lookups."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from anyio import fail_after

from policies.egress import Egress
from sandbox_runtime.egress.decision import Decision
from sandbox_runtime.egress.gateway import EgressGateways
from tests.fakes.threads import no_threads
from tests.fakes.waiting import until
from tests.sandbox_runtime.egress.internet import Internet
from tests.sandbox_runtime.egress.name_server import name_server
from tests.sandbox_runtime.egress.programs import GatewayClient, gateway_client, serve_programs

HERE, THERE = "93.184.216.34", "2606:2800:220:1::1"
RECORDS = {"a.example": [HERE], "both.example": [HERE, THERE], "none.example": []}
OPEN = Egress(mode="open", max_connections=200)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_ipv4_and_ipv6_addresses_of_a_name_are_found(tmp_path: Path) -> None:
    async with name_server(tmp_path, RECORDS) as (resolver, server):
        assert sorted(await resolver("both.example")) == [THERE, HERE]
        assert await resolver("a.example") == [HERE]
    assert set(server.queries[:2]) == {("both.example.", "A"), ("both.example.", "AAAA")}


@pytest.mark.parametrize("name", ["missing.example", "none.example", "x" * 63 + ".example"])
async def test_lookup_of_a_name_without_addresses_raises_an_error(
    name: str, tmp_path: Path
) -> None:
    async with name_server(tmp_path, RECORDS) as (resolver, _):
        with pytest.raises(socket.gaierror, match="not known"):
            await resolver(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("printer", ["192.168.1.5"]),
        ("PRINTER.lan", ["192.168.1.5", "fd00::5"]),
        ("a.example", ["10.0.0.1"]),
        ("localhost", ["127.0.0.1"]),
    ],
)
async def test_hosts_file_takes_precedence_over_name_servers(
    name: str, found: Sequence[str], tmp_path: Path
) -> None:
    hosts = """127.0.0.1 localhost # printer
192.168.1.5\tPrinter.lan   printer
fd00::5 printer.lan
nonsense printer
10.0.0.1 a.example."""
    async with name_server(tmp_path, RECORDS, hosts=hosts) as (resolver, server):
        assert await resolver(name) == found
    assert server.queries == []


@pytest.mark.parametrize("name", ["localhost", "web.localhost"])
async def test_localhost_resolves_without_a_name_server(name: str, tmp_path: Path) -> None:
    async with name_server(tmp_path, RECORDS) as (resolver, server):
        assert await resolver(name) == ("127.0.0.1", "::1")
    assert server.queries == []


async def test_search_domains_complete_a_short_name(tmp_path: Path) -> None:
    options = "search nowhere.example example\noptions ndots:1"
    async with name_server(tmp_path, RECORDS, options=options) as (resolver, server):
        assert await resolver("a") == [HERE]
        assert ("a.nowhere.example.", "A") in server.queries
        server.queries.clear()
        assert await resolver("a.example") == [HERE]
        assert {name for name, _ in server.queries} == {"a.example."}


async def test_changed_resolver_files_are_read_again(tmp_path: Path) -> None:
    async with name_server(tmp_path, RECORDS) as (resolver, _):
        with pytest.raises(socket.gaierror):
            await resolver("new.example")
        (tmp_path / "hosts").write_text("10.1.1.1 new.example\n")
        assert await resolver("new.example") == ["10.1.1.1"]


async def test_host_without_resolver_files_queries_localhost(tmp_path: Path) -> None:
    async with name_server(tmp_path, RECORDS) as (resolver, _):
        (tmp_path / "hosts").unlink()
        (tmp_path / "resolv.conf").write_text("nameserver nonsense\n")
        assert await resolver("a.example") == [HERE]
        (tmp_path / "resolv.conf").unlink()
        assert await resolver("a.example") == [HERE]


async def test_addresses_of_one_ip_version_are_returned_without_waiting_for_the_other(
    tmp_path: Path,
) -> None:
    async with name_server(tmp_path, RECORDS, silent_kinds=["AAAA"]) as (resolver, _):
        with fail_after(5):
            assert await resolver("both.example") == [HERE]


@pytest.mark.parametrize(("denied", "found"), [("AAAA", HERE), ("A", THERE)])
async def test_name_denied_for_one_ip_version_resolves_with_the_other(
    denied: str, found: str, tmp_path: Path
) -> None:
    """RFC 4074, section 4.2: some name servers deny that a name exists if asked for AAAA."""
    async with name_server(tmp_path, RECORDS, denied_kinds=[denied]) as (resolver, _):
        assert await resolver("both.example") == [found]


async def test_lookup_denied_for_one_ip_version_does_not_wait_long_for_the_other(
    tmp_path: Path,
) -> None:
    bad = {"silent_kinds": ["A"], "denied_kinds": ["AAAA"]}
    async with name_server(tmp_path, RECORDS, **bad) as (resolver, _):
        with fail_after(5), pytest.raises(socket.gaierror, match="not known"):
            await resolver("both.example")


async def test_cancelled_lookup_closes_its_sockets(tmp_path: Path) -> None:
    async with name_server(tmp_path, RECORDS) as (resolver, server):
        await resolver("a.example")
        before, threads = open_files(), threading.active_count()
        names = [f"n{n}.silent.example" for n in range(50)]
        lookups = [asyncio.ensure_future(resolver(name)) for name in names]
        await until(lambda: len(server.queries) == 2 + 100)
        for lookup in lookups:
            lookup.cancel()
        await asyncio.wait(lookups)
        await asyncio.sleep(0)  # a closed socket is given back in the loop's next round
        assert (open_files(), threading.active_count()) == (before, threads)
        assert all(lookup.cancelled() for lookup in lookups)


async def test_gateways_resolve_names_without_threads_by_default() -> None:
    decisions: list[Decision] = []
    gateway = EgressGateways().create(OPEN, decisions.append)
    request = b"CONNECT localhost:443 HTTP/1.1\r\n\r\n"
    async with serve_programs(gateway, decisions) as sandbox:
        with fail_after(5):
            await sandbox.exchange(request)  # the first lookup reads the files in a thread
            with no_threads():
                await sandbox.exchange(request)
    assert [decision.reason for decision in decisions] == 2 * [
        "host localhost has no address that a sandbox may reach (it is private, reserved or the"
        " proxy's own)"
    ]


async def test_unanswered_lookups_do_not_delay_other_sandboxes(tmp_path: Path) -> None:
    async def wish(sandbox: GatewayClient, host: str) -> None:
        _, writer = await sandbox.open()
        writer.write(f"CONNECT {host}:443 HTTP/1.1\r\n\r\n".encode())

    internet = Internet()
    async with (
        name_server(tmp_path, RECORDS) as (resolver, server),
        gateway_client(OPEN, internet, resolve=resolver) as first,
        gateway_client(OPEN, internet, resolve=resolver) as second,
        gateway_client(OPEN, internet, resolve=resolver) as other,
    ):
        for n in range(50):
            for sandbox in (first, second):
                await wish(sandbox, f"n{n}.silent.example")
        await until(lambda: len(server.queries) >= 2 * 2 * 4)
        with fail_after(3):  # less than a lookup may take
            await wish(other, "missing.example")
            assert "not known" in (await other.only_decision()).reason
        assert first.decisions == second.decisions == []
        names = {name for name, _ in server.queries} - {"missing.example."}
        assert names == {f"n{n}.silent.example." for n in range(4)}  # at one time of a sandbox
