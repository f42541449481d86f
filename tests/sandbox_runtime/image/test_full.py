"""The features of the full image, in a sandbox without network access."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_runtime.images import image_checks
from sandbox_runtime.sandbox import Sandbox
from tests.sandbox_runtime.image.containers import container, full_image
from tests.sandbox_runtime.transfer import PLENTY_S, output

pytestmark = pytest.mark.docker


@pytest.fixture
async def sandbox(client: Any, tmp_path: Path) -> AsyncIterator[Sandbox]:
    async with container(full_image(client), tmp_path) as opened:
        yield opened


async def python(sandbox: Sandbox, program: str) -> str:
    """Return the output of a Python program that must succeed without a warning."""
    result = await sandbox.exec("python3 -W error -", timeout_s=PLENTY_S, stdin=program.encode())
    assert (result.exit_code, result.stderr) == (0, ""), result
    return result.stdout


async def test_full_image_passes_every_check(sandbox: Sandbox) -> None:
    assert [check for check in await image_checks(sandbox) if not check.ok] == []


async def test_apt_finds_no_broken_packages(sandbox: Sandbox) -> None:
    assert await output(sandbox, "apt-get check --quiet=2 2>&1 && dpkg --audit") == ""


async def test_full_image_runs_numeric_libraries(sandbox: Sandbox) -> None:
    program = """
import mpmath, numpy, pandas, scipy.optimize, sympy
import numpy.testing, pandas.testing
x = sympy.Symbol("x")
mpmath.mp.dps = 30
print(numpy.linalg.det(numpy.eye(3)), round(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2), 6))
print(sympy.integrate(x**2, x), mpmath.nstr(mpmath.zeta(2), 20))
pandas.DataFrame({"a": [1, 2]}).to_excel("/tmp/table.xlsx")
print(pandas.read_excel("/tmp/table.xlsx")["a"].sum())
"""
    assert await python(sandbox, program) == ("1.0 1.414214\nx**3/3 1.6449340668482264365\n3\n")


async def test_default_font_of_figures_covers_many_scripts(
    sandbox: Sandbox,
) -> None:
    # A character that no font has is a warning, and a warning is an error here.
    program = """
import matplotlib, matplotlib.pyplot as plt
plt.plot([1, 4, 9])
plt.title("素数 ひらがな 한국어 Ελληνικά Русский العربية עברית हिन्दी ไทย \\u2212")
for name in ("/tmp/figure.png", "/tmp/figure.pdf", "/tmp/figure.svg"):
    plt.savefig(name)
print(matplotlib.get_backend())
"""
    assert await python(sandbox, program) == "agg\n"
    seen = await output(
        sandbox, "cd /tmp; file --brief --mime-type figure.png figure.pdf figure.svg"
    )
    assert seen.split() == ["image/png", "application/pdf", "image/svg+xml"]


async def test_first_matplotlib_figure_in_the_full_image_does_not_rebuild_the_font_cache(
    sandbox: Sandbox,
) -> None:
    cache = "stat --format=%Y /root/.cache/matplotlib/*"
    before = await output(sandbox, cache)
    await python(sandbox, "import matplotlib.pyplot as plt\nplt.figure().savefig('/tmp/empty.png')")
    assert await output(sandbox, cache) == before


async def test_full_image_creates_and_converts_pictures(sandbox: Sandbox) -> None:
    program = """
from PIL import Image, ImageDraw
picture = Image.new("RGB", (64, 32), "navy")
ImageDraw.Draw(picture).text((2, 2), "text", fill="white")
for kind in ("jpg", "png", "webp", "gif"):
    picture.save(f"/tmp/picture.{kind}")
    with Image.open(f"/tmp/picture.{kind}") as again:
        print(again.size)
"""
    assert await python(sandbox, program) == "(64, 32)\n" * 4
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="7"/>'
    seen = await output(sandbox, f"echo '{drawing}' | rsvg-convert | file --brief -")
    assert seen.startswith("PNG image data, 9 x 7")


async def test_full_image_creates_video(sandbox: Sandbox) -> None:
    await output(
        sandbox,
        "ffmpeg -v error -f lavfi -i testsrc=duration=1:size=64x64:rate=10 -f lavfi -i"
        " sine=duration=1 -c:v libx264 -pix_fmt yuv420p -c:a aac /tmp/clip.mp4",
    )
    probe = "ffprobe -v error -show_entries stream=codec_name:format=duration -of csv=p=0"
    assert (await output(sandbox, f"{probe} /tmp/clip.mp4")).split() == ["h264", "aac", "1.000000"]


async def test_full_image_renders_midi_to_an_audible_wave_file(sandbox: Sandbox) -> None:
    program = """
import mido, subprocess, wave
song = mido.MidiFile()
track = song.add_track()
track.append(mido.Message("note_on", note=60, velocity=90))
track.append(mido.Message("note_off", note=60, time=480))
song.save("/tmp/song.mid")
subprocess.run(["fluidsynth", "-qni", "-F", "/tmp/song.wav", "/tmp/song.mid"], check=True)
with wave.open("/tmp/song.wav") as sound:
    print(sound.getframerate(), any(sound.readframes(sound.getnframes())))
"""
    assert await python(sandbox, program) == "44100 True\n"


async def test_full_image_converts_documents_and_reads_the_pdf(
    sandbox: Sandbox,
) -> None:
    await output(sandbox, "cd /tmp; printf -- '---\\ntitle: 素数\\n---\\nEine Größe\\n' > text.md")
    await output(sandbox, "cd /tmp; pandoc text.md -o text.docx; pandoc -s text.md -o text.html")
    await output(sandbox, "cd /tmp; pandoc --pdf-engine=weasyprint text.md -o text.pdf")
    assert (await output(sandbox, "pdftotext /tmp/text.pdf -")).split() == ["素数", "Eine", "Größe"]
    assert (await output(sandbox, "pandoc -t plain /tmp/text.docx")).split()[-1] == "Größe"
    await output(sandbox, "pdftoppm -png -r 50 /tmp/text.pdf /tmp/page && test -s /tmp/page-1.png")


async def test_full_image_compiles_c_with_python_headers_and_c_plus_plus(sandbox: Sandbox) -> None:
    source = "#include <Python.h>\\n#include <stdio.h>\\nint main(void) { puts(PY_VERSION); }\\n"
    await output(sandbox, f"cd /tmp; printf '{source}' > version.c")
    rule = "version: version.c\\n\\tcc $$(python3-config --includes) -o $@ $<\\n"
    await output(sandbox, f"cd /tmp; printf '{rule}' > Makefile; make --silent version")
    assert await output(sandbox, "/tmp/version") == await output(
        sandbox, "python3 -c 'import platform; print(platform.python_version())'"
    )
    program = "#include <iostream>\\nint main() { std::cout << 42; }\\n"
    assert await output(sandbox, f"cd /tmp; printf '{program}' > a.cc; c++ -o a a.cc; ./a") == "42"


async def test_full_image_has_the_shell_tools(sandbox: Sandbox) -> None:
    assert await output(sandbox, "git init --quiet /tmp/r && git -C /tmp/r status --short") == ""
    assert await output(sandbox, "echo '[1, 2]' | jq add; echo text | rg --count e") == "3\n1\n"
    assert (await output(sandbox, "wget --version; curl --version")).startswith("GNU Wget")


async def test_python_python3_and_ipython_run(sandbox: Sandbox) -> None:
    assert await output(sandbox, "python --version") == await output(sandbox, "python3 --version")
    assert await output(sandbox, "ipython -c 'print(6 * 7)'") == "42\n"
    guess = "import chardet; print(chardet.detect('größer als'.encode())['encoding'])"
    assert await output(sandbox, f'python -c "{guess}"') == "utf-8\n"


async def test_uv_makes_environments_and_fails_fast_without_network(sandbox: Sandbox) -> None:
    make = "uv venv --quiet /tmp/venv && /tmp/venv/bin/python -c 'print(6 * 7)'"
    assert await output(sandbox, make) == "42\n"
    refused = await sandbox.exec("uv pip install --system six", timeout_s=PLENTY_S)
    assert "after 1 retry" in refused.stderr
