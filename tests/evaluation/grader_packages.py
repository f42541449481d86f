"""The packages of the reference's graders, AA-LCR and IFBench, installed from their lock file.

If they cannot be installed, a test is skipped, or fails if REQUIRE_STACKS is set.
"""

from pathlib import Path

from tests.clients.locked_packages import MissingError, make_import_folder
from tests.clients.stacks.environments import KEPT, absent

LOCK = Path(__file__).parent / "graders" / "packages.txt"


def grader_packages() -> Path:
    """Return a folder to import the packages from. Their own dependencies are left out, except
    those that the graders import."""
    try:
        return make_import_folder(KEPT / "python-graders", LOCK)
    except MissingError as error:
        absent(f"the packages of the graders and data sets are missing: {error}", "REQUIRE_STACKS")
