"""The transcripts of the page of clients: the output of each of its programs.

A program is a block in Python, JavaScript or sh, and its transcript is the next block of text in
the same section, so programs without a block of text between them have one transcript. A block with
a title is a file in the home of the programs after it. `make transcripts` runs every program and
writes the transcripts into the page.
"""

import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from tests.clients.stacks.environments import locked_node, packages_of, python_of, variables
from tests.docs.pages import ADDRESS, ROOT, Fence, fences
from tests.fakes.server import demo_proxy

PAGE = ROOT / "docs" / "guides" / "clients.md"
COMMANDS = {
    "python": ("python", "program.py"),
    "javascript": ("node", "program.mjs"),
    "sh": ("bash", "program.sh"),
}
ENVIRONMENTS: Mapping[str, Sequence[str]] = {
    "from openai import": ("python-openai-2", "python-openai-3"),
    "from anthropic import": ("python-anthropic",),
    "from langchain_": ("python-langchain",),
    "import litellm": ("python-litellm",),
    "from llama_index.": ("python-llama-index",),
    "from pydantic_ai": ("python-pydantic-ai",),
    "from smolagents import": ("python-smolagents",),
    'from "openai"': ("node-openai-6", "node-openai-7"),
    'from "@anthropic-ai/sdk"': ("node-anthropic",),
    'from "@langchain/openai"': ("node-langchain",),
    'from "ai"': ("node-ai-6", "node-ai-7"),
    "llm -m": ("python-llm",),
    "codex exec": ("node-codex",),
    "claude -p": ("node-claude-code",),
}
"""The locked environments that run a program, by a text in it."""
MASKS = (
    (re.compile(r"http://127\.0\.0\.1:\d+/\S+?/content\?exp=\d+&sig=\w+"), "http://…?exp=…&sig=…"),
    (re.compile(r"\b\d+\.\d s\b"), "0.1 s"),
    (re.compile(r"\b[A-Z][a-z]{2} [ \d]\d \d\d:\d\d\b"), "Jan  1 00:00"),
)
"""The parts of an output that differ from run to run, and their replacements."""
COLUMNS = 100
TIMEOUT_S = 120


@dataclass(frozen=True)
class Program:
    """A program of the page."""

    fence: Fence
    files: tuple[Fence, ...]
    transcript: Fence

    @property
    def environments(self) -> Sequence[str]:
        """The locked environments that run the program."""
        for text, names in ENVIRONMENTS.items():
            if text in self.fence.text:
                return names
        raise ValueError(f"{self.fence.id}: ENVIRONMENTS has no text of this program")


def programs() -> Iterator[Program]:
    """Yield the programs of the page, in order."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    section = ""
    files: list[Fence] = []
    pending: list[Fence] = []
    for fence in fences(PAGE):
        headings = [line for line in lines[: fence.line] if line.startswith("## ")]
        if headings and headings[-1] != section:
            section, files, pending = headings[-1], [], []
        if "title=" in fence.info:
            files.append(fence)
        elif fence.language in COMMANDS:
            pending.append(fence)
        elif fence.language == "text":
            yield from (Program(each, tuple(files), fence) for each in pending)
            pending = []


async def run(program: Program, environment: str, folder: Path) -> tuple[str, str]:
    """Run a program against the demo. Return the masked standard output and standard error."""
    path, home = _search_path(environment), folder / "home"
    home.mkdir()
    if environment.startswith("node-"):
        packages = packages_of(environment.removeprefix("node-"))
        (home / "node_modules").symlink_to(packages / "node_modules")
    command = COMMANDS[program.fence.language]
    async with demo_proxy("bubblewrap", folder / "state") as url:
        for fence in program.files:
            (title,) = re.findall(r'title="~/([^"]+)"', fence.info)
            _write(home / title, fence.text.replace(ADDRESS, url))
        _write(home / command[1], program.fence.text.replace(ADDRESS, url))
        environ = variables(home)
        environ["PATH"] = ":".join([*map(str, path), environ["PATH"]])
        environ["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
        with anyio.fail_after(TIMEOUT_S):
            ended = await anyio.run_process(command, check=False, cwd=home, env=environ)
    assert ended.returncode == 0, ended.stderr.decode()
    return masked(ended.stdout.decode()), masked(ended.stderr.decode())


def _search_path(environment: str) -> list[Path]:
    """Return the folders of an environment that have its commands."""
    language, _, name = environment.partition("-")
    if language == "python":
        return [python_of(name).parent]
    modules = packages_of(name) / "node_modules"
    # Claude Code's package puts its program into .bin when npm runs scripts, which is off here.
    native = modules.glob("@anthropic-ai/claude-code-linux-*")
    return [locked_node().parent, *native, modules / ".bin"]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def masked(output: str) -> str:
    """Replace what differs from run to run, and wrap long lines as a terminal does."""
    for pattern, replacement in MASKS:
        output = pattern.sub(replacement, output)
    lines = output.rstrip().splitlines()
    return "".join(f"{part}\n" for line in lines for part in _wrapped(line))


def _wrapped(line: str) -> list[str]:
    if len(line) <= COLUMNS:
        return [line.rstrip()]
    return textwrap.wrap(line, COLUMNS, break_long_words=False, break_on_hyphens=False)


def main() -> int:
    """Write the transcripts into the page. Return the exit code."""
    outputs: dict[Fence, str] = {}
    for program in programs():
        for environment in program.environments:
            try:
                with tempfile.TemporaryDirectory(prefix="transcript-") as folder:
                    output, _ = anyio.run(run, program, environment, Path(folder))
            except pytest.skip.Exception as skipped:
                sys.stderr.write(f"{program.fence.id}: not run by {environment}: {skipped}\n")
                continue
            if outputs.setdefault(program.transcript, output) != output:
                sys.stderr.write(f"{program.fence.id}: {environment} prints:\n{output}")
                return 1
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for fence in sorted(outputs, key=lambda fence: fence.line, reverse=True):
        end = fence.line + len(fence.text.splitlines())
        lines[fence.line : end] = outputs[fence].splitlines()
    PAGE.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
