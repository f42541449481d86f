"""The reference implementation in environments installed from lock files.

If an environment cannot be installed, the test is skipped, or fails if REQUIRE_STACKS is set.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from evaluation.ifbench_grader import NLTK_DATA_PATH
from tests.clients.locked_packages import MissingError, make_virtualenv
from tests.clients.stacks.environments import (
    KEPT,
    absent,
    require_folder_or_permission,
    variables,
)
from tests.sandbox_runtime.conformance.backends import DOCKER_IMAGE

HERE = Path(__file__).parent
RUN_TIMEOUT_S = 300
BENCHMARK_IMAGE = "llm-sandbox-proxy/reference-benchmark:latest"
"""An image of its own: an interrupted benchmark command stops all containers of its image."""


def python() -> Path:
    """Return the interpreter of the reference's environment."""
    return _virtualenv(KEPT / "python-reference", HERE / "reference.txt")


def benchmark_python() -> Path:
    """Return the interpreter of the environment of the reference's benchmark command, 570 MB."""
    folder = KEPT / "python-reference-benchmark"
    require_folder_or_permission(folder)
    return _virtualenv(folder, HERE / "benchmark.txt")


def _virtualenv(folder: Path, lock: Path) -> Path:
    try:
        return make_virtualenv(folder, lock)
    except MissingError as error:
        absent(str(error), "REQUIRE_STACKS")


def run_reference(python: Path, job: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Run the reference on a job and return its constant prompt and tools."""
    done = _run([python, HERE / "run_reference.py"], home, input=json.dumps(job).encode())
    output: dict[str, Any] = json.loads(done.splitlines()[-1])
    return output


@contextmanager
def benchmark_image() -> Iterator[None]:
    """Build BENCHMARK_IMAGE, and remove it afterwards. Its containers stop at once; the benchmark
    command has no option for an init process, without which each takes 10 s."""
    file = f"FROM {DOCKER_IMAGE}\nSTOPSIGNAL SIGKILL\n".encode()
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", BENCHMARK_IMAGE, "-"],
        input=file,
        capture_output=True,
        timeout=RUN_TIMEOUT_S,
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run(
            ["docker", "rmi", BENCHMARK_IMAGE], capture_output=True, timeout=60, check=True
        )


def run_benchmark(
    python: Path,
    task: str,
    rows: Path,
    base_url: str,
    mode: str,
    home: Path,
    *,
    ifbench_packages: Path,
) -> Mapping[str, Any]:
    """Run the reference's benchmark command on the rows of a JSON file, with one worker. Return its
    trajectory.json: an object with `reward` and `agent_answer` for each problem, by its id.

    The command reads its tasks inside the package, so it runs from a copy of the package whose
    task has the file as its data set. The task `instruct_follow` needs IFBench, which is in the
    folder `ifbench_packages` with its dependencies.
    """
    copy, output = home / f"copy-{task}-{mode}", home / f"output-{task}-{mode}"
    (package,) = python.parents[1].glob("lib/python*/site-packages/llm_in_sandbox")
    shutil.copytree(package, copy / package.name)
    config = copy / package.name / "benchmark" / task / "config.yaml"
    settings = yaml.safe_load(config.read_text("utf-8"))
    settings |= {"dataset": "json", "data_files": str(rows)}
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    arguments = {
        "task": task,
        "llm_name": "openai/m",
        "llm_base_url": base_url,
        "docker_image": BENCHMARK_IMAGE,
        "output_dir": str(output),
        "num_workers": "1",
        "mode": mode,
    }
    options = [word for name, value in arguments.items() for word in (f"--{name}", value)]
    more: dict[str, str] = {}
    folders = [copy]
    if task == "instruct_follow":
        folders += [ifbench_packages, _empty_spacy(home)]
        more["IFBENCH_PATH"] = str(ifbench_packages / "ifbench")
        more["NLTK_DATA"] = str(ifbench_packages / NLTK_DATA_PATH)
    _run(
        [python, "-m", "llm_in_sandbox.cli", "benchmark", *options],
        home,
        PYTHONPATH=os.pathsep.join(map(str, folders)),
        HF_HUB_OFFLINE="1",
        **more,
    )
    (trajectory,) = output.glob("*/trajectory.json")
    result: Mapping[str, Any] = json.loads(trajectory.read_text("utf-8"))
    return result


def _empty_spacy(home: Path) -> Path:
    """Return a folder with a package `spacy` that can do nothing. IFBench imports spaCy only to
    download a model that no checker uses."""
    package = home / "empty-spacy" / "spacy"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text("def download(name): pass\n")
    return package.parent


def run_judge(
    python: Path, task: str, trajectory: Mapping[str, Any], base_url: str, home: Path
) -> Any:
    """Run the reference's judge of a task with one vote. Return its results by the problem's id,
    each with `score`."""
    source, target = home / "trajectory.json", home / "judged.json"
    source.write_text(json.dumps(trajectory), encoding="utf-8")
    module = f"llm_in_sandbox.benchmark.{task}.judge"
    _run(
        [
            *(python, "-m", module, "--input", source, "--output", target),
            *("--judge_model", "judge", "--judge_base_url", base_url),
            *("--num_workers", "1", "--num_repeats", "1"),
        ],
        home,
    )
    return json.loads(target.read_text("utf-8"))["results"]


def _run(command: Sequence[str | Path], home: Path, *, input: bytes = b"", **more: str) -> bytes:
    """Return the standard output of a program of the reference."""
    engine = {name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ}
    done = subprocess.run(
        command,
        input=input,
        capture_output=True,
        timeout=RUN_TIMEOUT_S,
        cwd=home,
        env={**variables(home), **engine, "OPENAI_API_KEY": "none", **more},
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout
