"""The manual and the README: their examples run, and their commands and settings exist."""

import argparse
import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import yaml

from evaluation.__main__ import _parser as evaluation_parser
from proxy.__main__ import _parser as proxy_parser
from proxy.config import parse
from proxy.models.scripted import read_scripts
from tests.docs.pages import ADDRESS, PAGES, README, ROOT, Fence, fences
from tests.docs.transcripts import PAGE as CLIENTS
from tests.fakes.server import demo_proxy
from training.__main__ import _parser as training_parser

CHECKED = {"python", "yaml", "json", "sh"}
UNCHECKED = {
    *("text", "mermaid", "toml", "promql", "http", "ini", "dockerfile"),
    *("javascript", "typescript"),
}
PARSERS = {
    "sandbox-proxy": proxy_parser,
    "sandbox-eval": evaluation_parser,
    "sandbox-train": training_parser,
}
MODULES = {"proxy": "sandbox-proxy", "evaluation": "sandbox-eval", "training": "sandbox-train"}
RUNNERS = {"docker", "podman", "kubectl", "sudo", "env", "exec", "timeout", "nohup"}
"""Programs whose arguments contain a command."""


FENCES = [fence for path in PAGES for fence in fences(path)]


def written_in(language: str) -> pytest.MarkDecorator:
    """Parametrize a test by the blocks in a language."""
    found = [fence for fence in FENCES if fence.language == language]
    return pytest.mark.parametrize("fence", found, ids=[fence.id for fence in found])


def test_every_code_block_of_the_documentation_has_a_known_language() -> None:
    known = CHECKED | UNCHECKED
    assert not [f"{each.id}: {each.language}" for each in FENCES if each.language not in known]


# Python


@written_in("python")
async def test_python_block_of_the_documentation_runs(fence: Fence, tmp_path: Path) -> None:
    ast.parse(fence.text, fence.id)
    if fence.path == CLIENTS or fence.text.startswith("# sketch"):
        return  # test_transcripts.py runs the programs of the page of clients
    async with demo_proxy("bubblewrap", tmp_path / "state") as url:
        (tmp_path / "program.py").write_text(fence.text.replace(ADDRESS, url), "utf-8")
        with anyio.fail_after(60):
            ended = await anyio.run_process(
                [sys.executable, "program.py"],
                cwd=tmp_path,
                check=False,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
    assert ended.returncode == 0, ended.stderr.decode()


# YAML and JSON


@written_in("yaml")
def test_yaml_block_of_the_documentation_is_a_valid_configuration_or_script(fence: Fence) -> None:
    tree = yaml.safe_load(fence.text)
    if "replies" in tree:
        read_scripts(tree, fence.id)
    elif "title=" not in fence.info:
        parse(tree, fence.id)


@written_in("json")
def test_json_block_of_the_documentation_is_valid(fence: Fence) -> None:
    json.loads(fence.text)


# Shell


@written_in("sh")
def test_commands_in_shell_blocks_of_the_documentation_exist(fence: Fence) -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=fence.text, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    faults = [fault for words in commands(fence.text) for fault in command_faults(words)]
    assert not faults


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_named_in_the_prose_of_the_documentation_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    spans = re.findall(
        r"(?<!`)`((?:make|sandbox-proxy|sandbox-eval|sandbox-train) [^`\n]+)`(?!`)", text
    )
    assert not [fault for span in spans for fault in command_faults(shlex.split(span))]


def commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each command in a script, without variables before it."""
    pending = ""
    for line in script.splitlines():
        pending += line + "\n"
        lexer = shlex.shlex(pending.replace("\\\n", " "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an open quotation, or a backslash at the end
            continue
        if line.endswith("\\"):
            continue
        pending = ""
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= set("();<>|&"):
                yield command
                command = []
            elif command or not re.match(r"\w+=", word):
                command.append(word)


def command_faults(words: list[str]) -> Iterator[str]:
    """Yield what does not exist of a command of this project."""
    if words[:1] == ["kubectl"]:  # a command in a Pod follows --
        words = words[words.index("--") + 1 :] if "--" in words else []
    if not words:
        return
    if words[0] == "make":
        targets = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        yield from (f"make {target}" for target in targets if target not in make_targets())
    for at, word in enumerate(words):
        if Path(word).name in PARSERS and (at == 0 or words[0] in RUNNERS):
            yield from option_faults(Path(word).name, words[at + 1 :])
    if words[1:2] == ["-m"] and words[2] in MODULES:
        yield from option_faults(MODULES[words[2]], words[3:])


def option_faults(program: str, arguments: list[str]) -> Iterator[str]:
    """Yield the subcommand and the options that a program does not have."""
    parser = PARSERS[program]()
    subcommands = subparsers(parser)
    name = next((word for word in arguments if not word.startswith("-")), None)
    if name is not None and name not in subcommands:
        yield f"{program} {name}"
        return
    known = option_strings(parser)
    if name is not None:
        known |= option_strings(subcommands[name])
        for action in subparsers(subcommands[name]).values():
            known |= option_strings(action)
    for word in arguments:
        option = word.partition("=")[0]
        if option.startswith("-") and option not in known:
            yield f"{program} {name} {option}"


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = parser._actions
    found = (each for each in actions if isinstance(each, argparse._SubParsersAction))
    return {name: sub for action in found for name, sub in action.choices.items()}


def option_strings(parser: argparse.ArgumentParser) -> set[str]:
    actions = parser._actions
    return {option for action in actions for option in action.option_strings}


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))


def test_check_of_shell_blocks_reports_unknown_commands_and_options() -> None:
    script = "make nothing && A=1 .venv/bin/sandbox-proxy serve --nothing \\\n  --config 'a\nb'\n"
    script += "sandbox-eval report --data . --nothing\n"
    faults = [fault for words in commands(script) for fault in command_faults(words)]
    assert faults == [
        "make nothing",
        "sandbox-proxy serve --nothing",
        "sandbox-eval report --nothing",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_project_files_that_the_documentation_names_exist(page: Path) -> None:
    folders = "bench|deploy|docs|evaluation|examples|policies|proxy|sandbox_runtime|tests|training"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


# The site


def test_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    assert not [line for line in lines if len(line) > 120]


def test_mkdocs_builds_the_documentation_without_warnings(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
