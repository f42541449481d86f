"""A web server on the Docker bridge network that stands in for the internet.

The reference's container reaches it directly, and the sandbox through the egress proxy.
"""

import base64
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from tests.clients.stacks.environments import absent
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

WHEEL = "stand_in-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n"
TAGS = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
SERVER = """
import base64, functools, http.server, json, os, pathlib, socket, sys, threading
for path, data in json.loads(sys.stdin.readline()).items():
    file = pathlib.Path("/srv/site", path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(base64.b64decode(data))
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="/srv/site")
server = http.server.ThreadingHTTPServer(("", 80), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(socket.gethostbyname(socket.gethostname()), flush=True)
sys.stdin.read()  # it ends with the test
"""


def wheel() -> bytes:
    """Return a wheel of the package `stand_in`, which has a VALUE."""
    info = "stand_in-1.0.dist-info"
    files = {
        "stand_in.py": "VALUE = 42\n",
        f"{info}/METADATA": METADATA,
        f"{info}/WHEEL": TAGS,
        f"{info}/RECORD": f"stand_in.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return packed.getvalue()


SITE = {
    "facts.txt": b"Water boils at 373.15 K.\n",
    "simple/stand-in/index.html": f'<a href="{WHEEL}">{WHEEL}</a>'.encode(),
    f"simple/stand-in/{WHEEL}": wheel(),
}


@asynccontextmanager
async def internet() -> AsyncIterator[str]:
    """Yield the server's address; skip the test if the engine has no bridge network."""
    run = ["docker", "run", "--rm", "-i", "--network", "bridge", DOCKER_IMAGE]
    site = {path: base64.b64encode(data).decode() for path, data in SITE.items()}
    async with await anyio.open_process([*run, "python3", "-c", SERVER]) as server:
        assert server.stdin
        assert server.stdout
        assert server.stderr
        try:
            await server.stdin.send(json.dumps(site).encode() + b"\n")
            address = await server.stdout.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            why = (await server.stderr.receive()).decode()
            absent(f"the engine has no bridge network: {why}", "REQUIRE_DOCKER")
        yield address.decode().strip()
