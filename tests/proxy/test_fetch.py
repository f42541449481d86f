"""Files on the web: fetched as they are, and never from where the web is not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anyio import create_task_group, fail_after

from proxy.fetch import ByteBudget, Fetched, Fetcher, FetchError
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
NOT_THERE = "has no address that a sandbox may reach"


def answer(*lines: str, body: bytes = b"", status: str = "200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *lines))
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Site:
    """Answers each request with the next of its answers, the last one for ever."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.heads: list[bytes] = []

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._answers.pop(0) if len(self._answers) > 1 else self._answers[0])
        await writer.drain()


@asynccontextmanager
async def web(internet: Internet, **options: Any) -> AsyncIterator[Fetcher]:
    fetcher = Fetcher(**{"resolve": internet.resolve, "connect": internet.connect, **options})
    with fail_after(10):
        yield fetcher


async def got(
    fetcher: Fetcher, url: str = URL, max_bytes: int = 1 << 20, owner: str = "mine"
) -> Fetched:
    return await fetcher.fetch(url, max_bytes=max_bytes, room=ByteBudget(1 << 20, owner))


async def complaint(site: Behaviour, url: str = URL, max_bytes: int = 1 << 20) -> str:
    internet = Internet()
    async with internet.server(site), web(internet) as fetcher:
        with pytest.raises(FetchError) as raised:
            await got(fetcher, url, max_bytes)
    return str(raised.value)


async def test_a_file_comes_with_its_type() -> None:
    site = Site(answer("Content-Type: image/png", body=PNG))
    internet = Internet()
    async with internet.server(site), web(internet) as fetcher:
        assert await got(fetcher) == Fetched(PNG, "image/png")
    (head,) = site.heads
    assert head.startswith(b"GET /a%20dot.png?v=1 HTTP/1.1\r\nHost: allowed.example\r\n")
    assert internet.lookups == ["allowed.example"]
    assert internet.dialed == [(PUBLIC, 80)]


async def test_tls_is_spoken_and_verified() -> None:
    site = Site(answer("Content-Type: image/png", body=PNG))
    internet = Internet()
    async with internet.server(site, port=443, tls=True):
        async with web(internet, tls=client_tls_context()) as fetcher:
            assert (await got(fetcher, "https://allowed.example/")).data == PNG
        async with web(internet) as fetcher:
            with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
                await got(fetcher, "https://allowed.example/")


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
async def test_no_name_and_no_address_leads_to_what_is_not_public(address: str) -> None:
    internet = Internet({"allowed.example": [address]})
    literal = f"[{address}]" if ":" in address else address
    async with web(internet) as fetcher:
        for host in ("allowed.example", literal):
            with pytest.raises(FetchError, match=NOT_THERE):
                await got(fetcher, f"http://{host}/")
    assert internet.dialed == []


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "017700000001", "127.1", "a@127.0.0.1"])
async def test_no_other_spelling_of_an_address_is_understood(host: str) -> None:
    internet = Internet()
    async with web(internet) as fetcher:
        with pytest.raises(FetchError, match="malformed"):
            await got(fetcher, f"http://{host}/")
    assert (internet.lookups, internet.dialed) == ([], [])


async def test_of_a_names_addresses_only_the_public_ones_are_dialed() -> None:
    internet = Internet({"allowed.example": ["10.0.0.1", PUBLIC]})
    async with internet.server(Site(answer(body=PNG))), web(internet) as fetcher:
        assert await got(fetcher) == Fetched(PNG, "")
    assert internet.dialed == [(PUBLIC, 80)]


async def test_the_proxys_own_addresses_are_closed() -> None:
    internet = Internet()
    async with web(internet, forbidden=[(PUBLIC, 80)]) as fetcher:
        with pytest.raises(FetchError, match="the proxy's own"):
            await got(fetcher)
    assert internet.dialed == []


async def test_a_redirect_is_followed_and_checked_like_the_first_url() -> None:
    internet = Internet()
    far = Site(
        answer("Location: //other.example/b.png", status="302 Found"),
        answer("Content-Type: image/png", body=PNG),
        answer("Location: http://169.254.169.254/latest", status="307 Temporary Redirect"),
    )
    async with internet.server(far), web(internet) as fetcher:
        assert await got(fetcher) == Fetched(PNG, "image/png")
        with pytest.raises(FetchError, match=NOT_THERE):
            await got(fetcher)
    assert internet.lookups == ["allowed.example", "other.example", "allowed.example"]
    assert {ip for ip, _ in internet.dialed} == {PUBLIC}


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("/again", "redirected more than 5 times"),
        ("file:///etc/passwd", "only http and https"),
        ("http://[::1", "malformed"),
    ],
)
async def test_redirects_come_to_an_end(location: str, words: str) -> None:
    site = Site(answer(f"Location: {location}", status="301 Moved"))
    assert words in await complaint(site)


async def test_what_is_too_large_is_given_up() -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20)
    assert "larger than 1 MiB" in await complaint(Site(endless + b"."), max_bytes=1 << 20)


async def test_files_are_bounded_together() -> None:
    internet = Internet()
    room = ByteBudget(2 * len(PNG), "mine")
    async with internet.server(Site(answer(body=PNG))), web(internet) as fetcher:
        for _ in range(2):
            await fetcher.fetch(URL, max_bytes=100, room=room)
        with pytest.raises(FetchError, match="too large together"):
            await fetcher.fetch(URL, max_bytes=100, room=room)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (answer(status="404 Not Found"), "answered 404"),
        (answer(status="304 Not Modified"), "answered 304"),
        (answer("Content-Encoding: gzip", body=b"x"), "compressed"),
        (b"SSH-2.0-OpenSSH\r\n", "connection failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx", "connection failed"),
        (b"", "connection failed"),
    ],
)
async def test_what_is_no_answer_is_told(sent: bytes, words: str) -> None:
    assert words in await complaint(Site(sent))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://allowed.example/a", "only http and https"),
        ("http://", "malformed"),
        ("http://allowed.example:0/", "malformed"),
        ("http://no such host/", "malformed"),
        ("http://unknown.example/", "cannot resolve unknown.example"),
        ("http://allowed.example:81/", "Connection refused"),
    ],
)
async def test_what_cannot_be_reached_is_told(url: str, words: str) -> None:
    assert words in await complaint(Site(answer()), url)


async def test_a_server_that_says_nothing_is_left() -> None:
    internet = Internet()
    over = asyncio.Event()

    async def silent(reader: Reader, writer: Writer) -> None:
        await over.wait()

    async with internet.server(silent), web(internet, timeout_s=0.05) as fetcher:
        with pytest.raises(FetchError, match=r"longer than 0\.05 s"):
            await got(fetcher)
        over.set()


async def test_slow_names_of_one_key_do_not_hold_up_anothers() -> None:
    internet = Internet()
    over, begun = asyncio.Event(), asyncio.Queue[str]()

    async def resolve(host: str) -> Sequence[str]:
        if host == "slow.example":
            begun.put_nowait(host)
            await over.wait()
        return await internet.resolve(host)

    async with (
        internet.server(Site(answer(body=PNG))),
        web(internet, resolve=resolve) as fetcher,
        create_task_group() as group,
    ):

        async def wait_in_vain() -> None:
            with pytest.raises(FetchError, match="cannot resolve"):
                await got(fetcher, "http://slow.example/")

        for _ in range(8):
            group.start_soon(wait_in_vain)
        for _ in range(4):
            await begun.get()
        assert await got(fetcher, owner="yours") == Fetched(PNG, "")
        assert begun.empty()
        over.set()
