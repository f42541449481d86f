"""Builds the images that sandboxes start from, by Docker's command line."""

import subprocess
from pathlib import Path
from typing import Literal

Target = Literal["full", "slim"]
"""Of `image/Dockerfile`: with what models compute and draw with, or without."""

BUILD = Path(__file__).parent / "image" / "build"


def build_image(target: Target, tag: str, *options: str) -> int:
    """Build a target and tag it; returns the exit code of `docker build`.

    `options` are passed on, such as `--build-arg CA_CERTIFICATES=…`. What it has to say goes to
    standard output and standard error as it comes.
    """
    return subprocess.run(["sh", BUILD, target, tag, *options], check=False).returncode
