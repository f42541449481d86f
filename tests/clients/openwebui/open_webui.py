"""Open WebUI as a process, set up as README says and kept from the internet."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from bench.servers import free_port, running

FORWARDED = {"ENABLE_FORWARD_USER_INFO_HEADERS": "True"}
"""One way to have it say which chat it is."""
CONNECTION_HEADERS = {
    "OPENAI_API_CONFIGS": '{"0": {"headers": '
    '{"X-OpenWebUI-Chat-Id": "{{CHAT_ID}}", "X-OpenWebUI-Task": "{{TASK}}"}}}'
}
"""The other, which can be set in its pages as well."""
WHOLE_FILES = {"BYPASS_EMBEDDING_AND_RETRIEVAL": "True"}
"""Has the text of an uploaded file go to the model as it is, not a choice of its pieces."""
NOTHING_BESIDE = {
    "ENABLE_TITLE_GENERATION": "False",
    "ENABLE_TAGS_GENERATION": "False",
    "ENABLE_FOLLOW_UP_GENERATION": "False",
}
"""Has it ask for nothing but answers."""
ALONE = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "ANONYMIZED_TELEMETRY": "False",
    # Else it loads a model for embeddings at start.
    "RAG_EMBEDDING_ENGINE": "openai",
}
"""No account, and nothing fetched."""


@asynccontextmanager
async def open_webui(
    program: Path, data: Path, proxy_url: str, settings: Mapping[str, str]
) -> AsyncIterator[str]:
    """It with that proxy as its only connection; gives its address."""
    connection = {"OPENAI_API_BASE_URL": f"{proxy_url}/v1", "OPENAI_API_KEY": "none"}
    variables = {**ALONE, **connection, **settings, "DATA_DIR": str(data)}
    port = free_port()
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    async with running(command, port, path="/health", env=variables):
        await _without_news(url)
        yield url


async def _without_news(url: str) -> None:
    """Say that the news of this version were read, or they cover the page at some moment."""
    async with httpx.AsyncClient(base_url=f"{url}/api") as client:
        version = (await client.get("/version")).raise_for_status().json()["version"]
        nobody = {"email": "", "password": ""}
        (await client.post("/v1/auths/signin", json=nobody)).raise_for_status()
        read = {"ui": {"version": version}}
        (await client.post("/v1/users/user/settings/update", json=read)).raise_for_status()
