"""The programs of the page of clients run in the real clients, and print their transcripts."""

from pathlib import Path

import pytest

from tests.clients.stacks.stacks import STACKS
from tests.docs.pages import fences
from tests.docs.transcripts import COMMANDS, PAGE, Program, masked, programs, run

PROGRAMS = list(programs())
WITHOUT_PROGRAM = {"python-instructor"}
"""The script of the demo has no answer in JSON, which instructor needs."""


@pytest.mark.parametrize(
    ("program", "environment"),
    [
        pytest.param(program, environment, id=f"{program.fence.line}-{environment}")
        for program in PROGRAMS
        for environment in program.environments
    ],
)
async def test_client_program_prints_its_transcript(
    program: Program, environment: str, tmp_path: Path
) -> None:
    output, _ = await run(program, environment, tmp_path)
    assert output == program.transcript.text, "run `make transcripts`"


async def test_codex_shows_steps_on_standard_error(tmp_path: Path) -> None:
    (codex,) = (each for each in PROGRAMS if each.environments == ("node-codex",))
    _, errors = await run(codex, "node-codex", tmp_path)
    assert "````console\n$ python3 primes.py\n" in errors


def test_every_tested_client_library_has_a_program_on_the_clients_page_or_is_excepted() -> None:
    run_by = {environment for program in PROGRAMS for environment in program.environments}
    assert {str(stack) for stack in STACKS} - run_by == WITHOUT_PROGRAM


def test_every_python_and_javascript_block_of_the_clients_page_has_a_transcript() -> None:
    blocks = [fence for fence in fences(PAGE) if fence.language in COMMANDS.keys() - {"sh"}]
    assert [fence for fence in blocks if fence not in {each.fence for each in PROGRAMS}] == []


def test_masking_a_transcript_replaces_links_durations_and_times() -> None:
    link = "http://127.0.0.1:41527/v1/containers/cntr_1/files/cfile_2/content?exp=17&sig=2e3f"
    assert masked(f"[a]({link}), [b]({link})\n") == (
        "[a](http://…?exp=…&sig=…), [b](http://…?exp=…&sig=…)\n"
    )
    assert masked("[exit 0, 1.3 s, 6 lines]\n") == "[exit 0, 0.1 s, 6 lines]\n"
    assert masked("241 Nov 25 16:57 a\n") == "241 Jan  1 00:00 a\n"
    assert masked("word " * 21 + "\n") == "word " * 19 + "word\nword\n"
