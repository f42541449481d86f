"""The packages of trainers, installed from their lock file without their dependencies, to check
exports with.

If they cannot be installed, a test is skipped, or fails if REQUIRE_TRAINERS is set.
"""

from pathlib import Path

from tests.clients.locked_packages import MissingError, make_import_folder
from tests.clients.stacks.environments import KEPT, absent

LOCK = Path(__file__).parent / "trainers" / "packages.txt"


def trainer_packages() -> Path:
    """Return a folder with the packages."""
    try:
        return make_import_folder(KEPT / "python-trainers", LOCK)
    except MissingError as error:
        absent(f"the packages of the trainers are missing: {error}", "REQUIRE_TRAINERS")
