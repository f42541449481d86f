"""Open WebUI: installed from its lock file and run as a process without internet access."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from bench.servers import free_port, run_server
from tests.clients.locked_packages import make_virtualenv

LOCK = Path(__file__).parent / "requirements.txt"
INSTALL_TIMEOUT_S = 1800

FORWARDED = {"ENABLE_FORWARD_USER_INFO_HEADERS": "True"}
"""One way to make Open WebUI send the chat id."""
CONNECTION_HEADERS = {
    "OPENAI_API_CONFIGS": '{"0": {"headers": '
    '{"X-OpenWebUI-Chat-Id": "{{CHAT_ID}}", "X-OpenWebUI-Task": "{{TASK}}"}}}'
}
"""The other way, which can also be set in its pages."""
WHOLE_FILES = {"BYPASS_EMBEDDING_AND_RETRIEVAL": "True"}
"""Sends the complete text of an uploaded file instead of retrieved parts."""
NO_TASKS = {
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
}
"""Switches off Open WebUI's own tasks."""
ISOLATED = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",
    # Without this, Open WebUI loads an embedding model at start.
    "RAG_EMBEDDING_ENGINE": "openai",
}
"""No account and no downloads."""


def installed_program() -> Path:
    """Return the program. The first call installs it, which takes minutes. Raise MissingError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "llm-sandbox-proxy" / "openwebui"
    return make_virtualenv(folder, LOCK, timeout_s=INSTALL_TIMEOUT_S).with_name("open-webui")


@asynccontextmanager
async def open_webui(
    program: Path, data: Path, proxy_url: str, settings: Mapping[str, str]
) -> AsyncIterator[str]:
    """Run Open WebUI with the proxy as its only connection and yield its URL."""
    connection = {"OPENAI_API_BASE_URL": f"{proxy_url}/v1", "OPENAI_API_KEY": "none"}
    variables = {**ISOLATED, **connection, **settings, "DATA_DIR": str(data)}
    port = free_port()
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    async with run_server(command, port, path="/health", env=variables):
        await _dismiss_release_notes(url)
        yield url


async def _dismiss_release_notes(url: str) -> None:
    """Mark the release notes of this version as read, or they cover the page."""
    async with httpx.AsyncClient(base_url=f"{url}/api") as client:
        version = (await client.get("/version")).raise_for_status().json()["version"]
        credentials = {"email": "", "password": ""}
        (await client.post("/v1/auths/signin", json=credentials)).raise_for_status()
        read = {"ui": {"version": version}}
        (await client.post("/v1/users/user/settings/update", json=read)).raise_for_status()
