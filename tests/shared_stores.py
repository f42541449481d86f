"""`python -m tests.shared_stores COMMAND`: run a command, such as pytest, with the stores of the
tests in PostgreSQL and S3, on servers that are started for it.

The servers and their data are gone afterwards. If a server cannot be had, the command is not run,
and the exit code is 1.
"""

import os
import subprocess
import sys

from tests.clients.locked_packages import MissingError
from tests.postgresql import find_programs, running_server
from tests.s3.server import BUCKET, running_s3_server


def main() -> int:
    """Run the command of the arguments. Return its exit code."""
    programs = find_programs()
    if programs is None:
        raise SystemExit("Debian's package postgresql is missing")
    try:
        with running_server(programs) as database, running_s3_server() as s3:
            environment = {
                **os.environ,
                **s3.environment,
                "TEST_POSTGRESQL_URL": database.url,
                "TEST_S3_BUCKET": BUCKET,
            }
            return subprocess.run(sys.argv[1:], env=environment, check=False).returncode
    except MissingError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    raise SystemExit(main())
