"""Builds what sandboxes start from: images by Docker's command line, root file
systems by mmdebstrap."""

import subprocess
from pathlib import Path
from typing import Literal

Target = Literal["full", "slim"]
"""Of `image/Dockerfile`: with what models compute and draw with, or without."""

BUILD = Path(__file__).parent / "image" / "build"
ROOTFS = Path(__file__).parent / "image" / "rootfs"


def build_image(target: Target, tag: str, *options: str) -> int:
    """Build a target and tag it; returns the exit code of `docker build`.

    `options` are passed on, such as `--build-arg CA_CERTIFICATES=…`. What it has to say goes to
    standard output and standard error as it comes.
    """
    return subprocess.run(["sh", BUILD, target, tag, *options], check=False).returncode


def build_rootfs(tar: Path) -> int:
    """Make a tar of Debian's packages that bubblewrap's sandboxes can start from: Python with
    numpy, scipy and sympy; returns the exit code of `mmdebstrap`."""
    return subprocess.run(["sh", ROOTFS, tar], check=False).returncode
