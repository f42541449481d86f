"""The packages of the reference's graders, AA-LCR and IFBench, installed from their lock file.

If they cannot be installed, a test is skipped, or fails if REQUIRE_STACKS is set.
"""

import sys
from pathlib import Path

import uv

from tests.clients.locked_packages import MissingError, make_folder
from tests.clients.stacks.environments import KEPT, absent

LOCK = Path(__file__).parent / "graders" / "packages.txt"


def grader_packages() -> Path:
    """Return a folder to import the packages from. Their own dependencies are left out, except
    those that the graders import."""
    folder = KEPT / "python-graders"
    files = {LOCK.name: LOCK.read_bytes(), "made-by": sys.version.encode()}
    install = [
        *(uv.find_uv_bin(), "pip", "install", "--quiet", "--system-certs", "--no-deps"),
        *("--python", sys.executable, "--target", str(folder), "--require-hashes"),
        *("--requirements", str(LOCK)),
    ]
    try:
        make_folder(folder, files, install)
    except MissingError as error:
        absent(f"the packages of the graders and data sets are missing: {error}", "REQUIRE_STACKS")
    return folder
