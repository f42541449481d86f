"""What the front door says holds."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import anyio
import pytest

from proxy.demo import SCRIPT
from proxy.models.scripted import ScriptedModel
from proxy.wire.chat_request import RESERVED_TOOLS
from proxy.wire.parameters import PARAMETERS
from tests.fakes.server import join, open_sandboxes, serve

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


async def test_the_client_in_the_readme_gets_its_answer_and_files(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    async with open_sandboxes("bubblewrap", tmp_path) as sandboxes:
        services = join(ScriptedModel.from_yaml(SCRIPT), sandboxes, tmp_path)
        async with serve(services) as url:
            here = program.replace("http://127.0.0.1:8080", url) + "\nclient.close()\n"
            printed = StringIO()
            with redirect_stdout(printed), anyio.fail_after(30):
                await anyio.to_thread.run_sync(exec, here, {})
    assert "78,498 primes" in printed.getvalue()
    assert "primes.csv 176 http" in printed.getvalue()


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ("every model call", "every call"),
        ("visible answer only", "visible answer"),
        ("loop-owned", "loop"),
        ("the proxy's own", "proxy"),
        ("straight to the backend", "straight"),
    ],
)
def test_every_parameter_stands_in_the_row_of_its_class(row: str, place: str) -> None:
    line = next(line for line in README.splitlines() if line.startswith(f"| {row} |"))
    known = {name for name, parameter in PARAMETERS.items() if parameter.place == place}
    assert set(re.findall(r"`(\w+)`", line)) == known


def test_the_reserved_tools_are_named() -> None:
    assert all(f"`{name}`" in README for name in RESERVED_TOOLS)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", README))))
def test_every_file_that_is_named_is_there(path: str) -> None:
    assert path.startswith(("demo-output/", "v1/")) or (ROOT / path).exists()


def test_every_target_that_is_named_is_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make (\w+)`", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
