"""Downloads by URL: contents, redirects, limits, and the refusal of private addresses."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio import create_task_group, fail_after

from proxy.body_memory import BodyMemory, BodyReservation
from proxy.fetch import ByteBudget, FetchedFile, Fetcher, FetchError
from tests.fakes.threads import no_threads
from tests.fakes.waiting import until
from tests.sandbox_runtime.egress.internet import (
    PUBLIC,
    Behaviour,
    Internet,
    Reader,
    Writer,
    client_tls_context,
)

PNG = b"\x89PNG..."
URL = "http://allowed.example/a%20dot.png?v=1"
NOT_REACHABLE = "has no address that a sandbox may reach"


def answer(*lines: str, body: bytes = b"", status: str = "200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *lines))
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Site:
    """A site that sends one response after another, and then repeats the last one."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.heads: list[bytes] = []

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])
        await writer.drain()


@asynccontextmanager
async def fetcher_for(internet: Internet, **options: Any) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(**{"resolve": internet.resolve, "connect": internet.connect, **options})
    with fail_after(10):
        yield fetcher


async def fetch(
    fetcher: Fetcher, url: str = URL, max_bytes: int = 1 << 20, owner: str = "mine"
) -> FetchedFile:
    return await fetcher.fetch(url, max_bytes=max_bytes, budget=ByteBudget(1 << 20, owner))


async def fetch_error(site: Behaviour, url: str = URL, max_bytes: int = 1 << 20) -> str:
    internet = Internet()
    async with internet.server(site), fetcher_for(internet) as fetcher:
        with pytest.raises(FetchError) as raised:
            await fetch(fetcher, url, max_bytes)
    return str(raised.value)


async def test_download_returns_the_data_and_the_content_type() -> None:
    site = Site(answer("Content-Type: image/png", body=PNG))
    internet = Internet()
    async with internet.server(site), fetcher_for(internet) as fetcher:
        assert await fetch(fetcher) == FetchedFile(PNG, "image/png")
    (head,) = site.heads
    assert head.startswith(b"GET /a%20dot.png?v=1 HTTP/1.1\r\nHost: allowed.example\r\n")
    assert internet.lookups == ["allowed.example"]
    assert internet.dialed == [(PUBLIC, 80)]


async def test_tls_certificate_is_verified() -> None:
    site = Site(answer("Content-Type: image/png", body=PNG))
    internet = Internet()
    async with internet.server(site, port=443, tls=True):
        async with fetcher_for(internet, tls=client_tls_context()) as fetcher:
            assert (await fetch(fetcher, "https://allowed.example/")).data == PNG
        async with fetcher_for(internet) as fetcher:
            with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
                await fetch(fetcher, "https://allowed.example/")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "100.100.100.200",
        "0.0.0.0",
        "::1",
        "::ffff:10.1.2.3",
        "fe80::1",
        "fd00:ec2::254",
    ],
)
async def test_url_with_a_private_address_or_a_name_that_resolves_to_one_is_refused(
    address: str,
) -> None:
    internet = Internet({"allowed.example": [address]})
    literal = f"[{address}]" if ":" in address else address
    async with fetcher_for(internet) as fetcher:
        for host in ("allowed.example", literal):
            with pytest.raises(FetchError, match=NOT_REACHABLE):
                await fetch(fetcher, f"http://{host}/")
    assert internet.dialed == []


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "017700000001", "127.1", "a@127.0.0.1"])
async def test_url_with_an_unusual_spelling_of_an_address_is_refused_as_malformed(
    host: str,
) -> None:
    internet = Internet()
    async with fetcher_for(internet) as fetcher:
        with pytest.raises(FetchError, match="malformed"):
            await fetch(fetcher, f"http://{host}/")
    assert (internet.lookups, internet.dialed) == ([], [])


async def test_only_the_public_addresses_of_a_name_are_dialed() -> None:
    internet = Internet({"allowed.example": ["10.0.0.1", PUBLIC]})
    async with internet.server(Site(answer(body=PNG))), fetcher_for(internet) as fetcher:
        assert await fetch(fetcher) == FetchedFile(PNG, "")
    assert internet.dialed == [(PUBLIC, 80)]


async def test_url_with_an_address_of_the_proxy_itself_is_refused() -> None:
    internet = Internet()
    async with fetcher_for(internet, forbidden_addresses=[(PUBLIC, 80)]) as fetcher:
        with pytest.raises(FetchError, match="the proxy's own"):
            await fetch(fetcher)
    assert internet.dialed == []


async def test_redirect_is_followed_and_checked_like_the_first_url() -> None:
    internet = Internet()
    far = Site(
        answer("Location: //other.example/b.png", status="302 Found"),
        answer("Content-Type: image/png", body=PNG),
        answer("Location: http://169.254.169.254/latest", status="307 Temporary Redirect"),
    )
    async with internet.server(far), fetcher_for(internet) as fetcher:
        assert await fetch(fetcher) == FetchedFile(PNG, "image/png")
        with pytest.raises(FetchError, match=NOT_REACHABLE):
            await fetch(fetcher)
    assert internet.lookups == ["allowed.example", "other.example", "allowed.example"]
    assert {ip for ip, _ in internet.dialed} == {PUBLIC}


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/again", "redirected more than 5 times"),
        ("file:///etc/passwd", "only http and https"),
        ("http://[::1", "malformed"),
    ],
)
async def test_redirect_in_a_loop_or_to_an_invalid_url_is_refused(
    location: str, message: str
) -> None:
    site = Site(answer(f"Location: {location}", status="301 Moved"))
    assert message in await fetch_error(site)


async def test_file_above_the_size_limit_is_refused() -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20)
    assert "larger than 1 MiB" in await fetch_error(Site(endless + b"."), max_bytes=1 << 20)


async def test_byte_budget_limits_all_files_of_a_request() -> None:
    internet = Internet()
    budget = ByteBudget(2 * len(PNG), "mine")
    async with internet.server(Site(answer(body=PNG))), fetcher_for(internet) as fetcher:
        for _ in range(2):
            await fetcher.fetch(URL, max_bytes=100, budget=budget)
        with pytest.raises(FetchError, match="too large together"):
            await fetcher.fetch(URL, max_bytes=100, budget=budget)


async def test_stalled_download_does_not_use_up_the_byte_budget_of_an_earlier_download() -> None:
    """The later download has declared a size, and its first byte has arrived, when the earlier one
    gets its response."""
    internet, memory = Internet(), BodyMemory()
    budget = ByteBudget(len(PNG) + 1, "mine", BodyReservation(memory, "mine"))
    later_declared, finish_later = asyncio.Event(), asyncio.Event()

    async def site(reader: Reader, writer: Writer) -> None:
        is_later = b"/later" in await reader.readuntil(b"\r\n\r\n")
        response = answer(body=PNG)
        if is_later:
            writer.write(response[: 1 - len(PNG)])
            await finish_later.wait()
            writer.write(response[1 - len(PNG) :])
        else:
            await later_declared.wait()
            writer.write(response)
        await writer.drain()

    async with internet.server(site), fetcher_for(internet) as fetcher:
        earlier, later = (
            asyncio.create_task(
                fetcher.fetch(f"http://allowed.example/{name}", max_bytes=100, budget=budget)
            )
            for name in ("earlier", "later")
        )
        await until(lambda: memory.held_bytes == 1)
        later_declared.set()
        assert await earlier == FetchedFile(PNG, "")
        finish_later.set()
        with pytest.raises(FetchError, match="too large together"):
            await later
    assert memory.held_bytes == len(PNG) + 1


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (answer(status="404 Not Found"), "answered 404"),
        (answer(status="304 Not Modified"), "answered 304"),
        (answer("Content-Encoding: gzip", body=b"x"), "compressed"),
        (b"SSH-2.0-OpenSSH\r\n", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", "connection failed"),
        (b"", "connection failed"),
    ],
)
async def test_unusable_response_is_reported_as_an_error(sent: bytes, message: str) -> None:
    assert message in await fetch_error(Site(sent))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://allowed.example/a", "only http and https"),
        ("http://", "malformed"),
        ("http://allowed.example:0/", "malformed"),
        ("http://no such host/", "malformed"),
        ("http://unknown.example/", "cannot resolve unknown.example"),
        ("http://allowed.example:81/", "Connection refused"),
    ],
)
async def test_invalid_or_unreachable_url_is_reported_as_an_error(url: str, message: str) -> None:
    assert message in await fetch_error(Site(answer()), url)


async def test_download_from_a_silent_server_times_out() -> None:
    internet = Internet()
    finished = asyncio.Event()

    async def silent(reader: Reader, writer: Writer) -> None:
        await finished.wait()

    async with internet.server(silent), fetcher_for(internet, timeout_s=0.05) as fetcher:
        with pytest.raises(FetchError, match=r"longer than 0\.05 s"):
            await fetch(fetcher)
        finished.set()


async def test_host_names_are_resolved_without_threads_by_default() -> None:
    fetcher = Fetcher()
    with fail_after(5):
        with pytest.raises(FetchError, match=NOT_REACHABLE):
            await fetch(fetcher, "http://localhost/")  # reads the resolver's files in a thread
        with no_threads(), pytest.raises(FetchError, match=NOT_REACHABLE):
            await fetch(fetcher, "http://localhost/")


async def test_slow_dns_lookups_of_one_owner_do_not_delay_another() -> None:
    internet = Internet()
    released, begun = asyncio.Event(), asyncio.Queue[str]()

    async def resolve(host: str) -> Sequence[str]:
        if host == "slow.example":
            begun.put_nowait(host)
            await released.wait()
        return await internet.resolve(host)

    async with (
        internet.server(Site(answer(body=PNG))),
        fetcher_for(internet, resolve=resolve) as fetcher,
        create_task_group() as group,
    ):

        async def fetch_slow_name() -> None:
            with pytest.raises(FetchError, match="cannot resolve"):
                await fetch(fetcher, "http://slow.example/")

        for _ in range(8):
            group.start_soon(fetch_slow_name)
        for _ in range(4):
            await begun.get()
        assert await fetch(fetcher, owner="yours") == FetchedFile(PNG, "")
        assert begun.empty()
        released.set()
