"""Open WebUI, installed from its lock and kept in the user's cache."""

import os
from pathlib import Path

from tests.clients.locked_packages import make_virtualenv

LOCK = Path(__file__).parent / "requirements.txt"
INSTALL_TIMEOUT_S = 1800


def command() -> Path:
    """The program; the first time it is installed, which takes minutes. Raises MissingError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "llm-sandbox-proxy" / "openwebui"
    return make_virtualenv(folder, LOCK, timeout_s=INSTALL_TIMEOUT_S).with_name("open-webui")
