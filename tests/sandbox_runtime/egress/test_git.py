"""Unmodified git in a real sandbox reaches an allowed host by TLS."""

from pathlib import Path

import anyio
import pytest

from sandbox_runtime.egress.decision import Decision
from sandbox_runtime.egress.gateway import Gateway
from tests.sandbox_runtime.conformance.backends import KINDS, backend_of, started
from tests.sandbox_runtime.egress.internet import CERTIFICATE, Internet, Reader, Writer
from tests.sandbox_runtime.egress.programs import allowlist
from tests.sandbox_runtime.transfer import PLENTY_S, output

MAKE_REPOSITORY = """
set -e
git init -q work && cd work && echo hello > file && git add file
git -c user.name=me -c user.email=me@allowed.example commit -q -m first
git clone -q --bare . ../project.git && cd ../project.git && git update-server-info
"""


class FileServer:
    """Serves files over HTTP, which is enough for git."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        while not reader.at_eof():
            head = await reader.readuntil(b"\r\n\r\n")
            name = head.split(b" ")[1].decode().partition("?")[0]
            path = self._directory / name.lstrip("/")
            status, body = (b"200 OK", path.read_bytes()) if path.is_file() else (b"404 None", b"")
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
            await writer.drain()


@pytest.mark.parametrize("kind", KINDS[1:])
async def test_git_clones_only_from_the_allowed_host(kind: str, tmp_path: Path) -> None:
    await anyio.run_process(["bash", "-c", MAKE_REPOSITORY], cwd=tmp_path)
    internet = Internet()
    decisions: list[Decision] = []
    gateway = Gateway(
        allowlist("allowed.example"),
        resolve=internet.resolve,
        connect=internet.connect,
        on_decision=decisions.append,
    )
    async with (
        internet.server(FileServer(tmp_path), port=443, tls=True),
        started(backend_of(kind, tmp_path / "state")) as sandbox,
    ):
        sandbox.set_connection_handler(gateway.serve)
        authority = CERTIFICATE.read_text(encoding="ascii")
        trust = f"cat > ca.pem <<'end'\n{authority}end\nexport GIT_SSL_CAINFO=$PWD/ca.pem"
        await output(sandbox, trust)
        clone = "git clone -q https://allowed.example/project.git && cat project/file"
        assert await output(sandbox, clone) == "hello\n"
        refused = await sandbox.exec(
            "git clone -q https://other.example/project.git mine", timeout_s=PLENTY_S
        )
        assert refused.exit_code != 0
        assert "403" in refused.stderr
        await gateway.aclose()
    verdicts = {(each.host, each.port, each.verdict) for each in decisions}
    assert verdicts == {("allowed.example", 443, "allowed"), ("other.example", 443, "denied")}
