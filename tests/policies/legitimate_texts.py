"""Repetitive texts that users ask models for. The repetition check must not stop any of them."""

import base64
import random
from collections.abc import Iterator


def legitimate_texts() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of more than 200 texts."""
    for make in (_tables, _numbers, _hex, _songs, _logs, _code, _drawings, _data, _prose):
        yield from make()


def _tables() -> Iterator[tuple[str, str]]:
    for rows in (5, 20, 60, 100):
        empty = "|      |      |      |\n" * rows
        yield f"an empty table of {rows} rows", "| a | b | c |\n|---|---|---|\n" + empty
        zeros = "".join(f"| {n} | 0 | 0 | 0 |\n" for n in range(rows))
        yield f"a table of {rows} rows of zeros", "| n | x | y | z |\n|---|---|---|---|\n" + zeros
        todo = "".join(f"| Week {n} | open | open | open | open |\n" for n in range(rows))
        yield f"a schedule of {rows} weeks", todo
        csv = "id,name,active,score\n" + "".join(f"{n},user{n},true,100\n" for n in range(rows))
        yield f"a CSV of {rows} rows", csv
        yield f"a CSV of {rows} equal rows", "open,0,0,0,none\n" * rows


def _numbers() -> Iterator[tuple[str, str]]:
    for size in (4, 8, 16, 32, 64, 80):
        row = " ".join("0" * size) + "\n"
        yield f"a zero matrix of {size} x {size}", row * size
        yield f"a matrix of ones of {size} x {size}", ("[" + "1, " * (size - 1) + "1]\n") * size
        identity = [["1" if x == y else "0" for x in range(size)] for y in range(size)]
        yield f"an identity matrix of {size}", "\n".join(" ".join(row) for row in identity)
    for count in (100, 500, 1000, 4000, 8000):
        yield f"{count} zeros", "0" * count
        yield f"{count} nines", "9" * count
        yield f"0.{count} threes", "0." + "3" * count
        yield f"a list of {count // 4} zeros", "[" + "0, " * (count // 4) + "0]"
        yield f"{count // 4} decimals", "0.0 " * (count // 4)
    for period in ("142857", "09", "012345679", "0588235294117647"):
        yield f"a fraction of period {period}", "0." + period * (3000 // len(period))
    yield "powers of two", "\n".join(f"2^{n} = {2**n}" for n in range(200))
    yield (
        "a multiplication table",
        "\n".join(f"{a} x {b} = {a * b}" for a in range(20) for b in range(20)),
    )


def _hex() -> Iterator[tuple[str, str]]:
    blank = "00 " * 15 + "00"
    for lines in (4, 32, 128, 200):
        dump = "".join(f"{n * 16:08x}  {blank}  |................|\n" for n in range(lines))
        yield f"a hex dump of {lines} empty lines", dump
        bare = (blank + "\n") * lines
        yield f"{lines} bare lines of hex zeros", bare
        ff = ("ff " * 16 + "\n") * lines
        yield f"{lines} lines of erased flash", ff[:15_000]
        data = random.Random(lines).randbytes(16 * lines).hex(" ", 1)
        yield f"{lines} lines of random hex", data
    for size in (100, 1000, 3000):
        yield f"{size} bytes in base64", base64.b64encode(bytes(size)).decode()
        yield f"{size} letters of one kind", "a" * size


def _songs() -> Iterator[tuple[str, str]]:
    refrains = (
        "Row on, row on, the river is wide,\nrow on, row on, to the other side.\n",
        "La la la la, la la la,\nla la la la la.\n",
        "Na, na na, na-na-na-na, na-na-na-na, dear friend\n",
        "We are turning, turning, turning round the sun\n",
        "All around the town, all around the town\n",
        "Hallelujah, hallelujah, hallelujah, hallelujah\n",
    )
    for number, refrain in enumerate(refrains):
        for times in (4, 8, 16, 3500 // len(refrain)):
            yield f"refrain {number} sung {times} times", refrain * times
        verses = "".join(f"Verse {n}: the {n}th morning came.\n{refrain * 2}" for n in range(12))
        yield f"a song with refrain {number}", verses
    bottles = "".join(
        f"{n} bottles of beer on the wall, {n} bottles of beer.\nTake one down and pass it around,"
        f" {n - 1} bottles of beer on the wall.\n"
        for n in range(99, 0, -1)
    )
    yield "ninety-nine bottles", bottles
    yield "a mantra", "Om mani padme hum. " * 108
    yield "lines for a punishment", "I will not talk in class.\n" * 100
    yield "cheers", "Hip hip hooray! " * 100


def _logs() -> Iterator[tuple[str, str]]:
    for lines in (10, 50, 70):
        yield (
            f"{lines} equal log lines",
            "WARN retrying connection to the database (10 s)\n" * lines,
        )
        yield f"{lines} dots of progress", ("." * 60 + " ok\n") * min(lines, 60)
        stamped = "".join(f"2026-01-01T00:{n:02d}:00Z INFO heartbeat ok\n" for n in range(lines))
        yield f"{lines} stamped log lines", stamped * 3
        ping = "".join(f"64 bytes from 192.0.2.1: icmp_seq={n} ttl=64\n" for n in range(lines))
        yield f"{lines} pings", ping
        frames = '  File "a.py", line 3, in walk\n    return walk(node.next)\n' * (lines - 5)
        yield f"a stack of {lines - 5} equal frames", "Traceback:\n" + frames
    tests = "".join(f"test_{n} PASSED [{n:3d}%]\n" for n in range(100))
    yield "a test report", tests


def _code() -> Iterator[tuple[str, str]]:
    for count in (5, 30, 80):
        yield f"{count} equal statements", "    print('hello')\n" * count
        yield f"{count} fields", "".join(f"    field_{n}: int = 0\n" for n in range(count))
        yield f"{count} equal HTML rows", "<tr><td></td><td></td></tr>\n" * count
        yield f"{count} nops", "nop\n" * (count * 8)
        yield f"{count} braces", "}" * count
        yield f"{count} CSS rules", "".join(f".c{n} {{ margin: 0; }}\n" for n in range(count))
    yield "an SVG grid", '<rect width="10" height="10" fill="white"/>\n' * 90


def _drawings() -> Iterator[tuple[str, str]]:
    for width in (8, 40, 120):
        yield f"a ruler of {width}", ("=" * width + "\n") * 3
        yield f"a box of {width}", ("#" * width + "\n") * min(width, 60)
        board = ("# " * (width // 2) + "\n" + " #" * (width // 2) + "\n") * (width // 4)
        yield f"a chess board of {width}", board
        yield f"a banner of {width}", "*-" * width
        yield (
            f"a maze of {width}",
            ("+--" * (width // 3) + "+\n" + "|  " * (width // 3) + "|\n") * 20,
        )
    yield "a skyline", ("_|^|_" * 16 + "\n") * 24


def _data() -> Iterator[tuple[str, str]]:
    for count in (10, 60, 300):
        yield f"{count} nulls", "[" + "null, " * min(count, 300) + "null]"
        empty = ['{"value": null}'] * min(count, 200)
        yield f"{count} empty records", "[" + ", ".join(empty) + "]"
        genes = "".join(random.Random(count).choices("ACGT", k=count * 10))
        yield f"a gene of {count * 10}", genes
        yield f"{count} repeats of CAG", "CAG" * count
        yield f"{count} tabs", "\t" * count
        yield f"{count} empty lines", "\n" * count
    yield "drum machine", "x---x---x---x---\n" * 64
    yield "a guitar tab", "e|-----------------|\nB|-----------------|\n" * 32


def _prose() -> Iterator[tuple[str, str]]:
    steps = "".join(f"{n}. Mix well and let it rest for ten minutes.\n" for n in range(1, 80))
    yield "a recipe of equal steps", steps
    yield "a conjugation", "".join(f"{word} would have been\n" for word in ("I", "you", "we") * 40)
    yield "a counting rhyme", "One, two, three, four, " * 60
    yield "a speech", "I have a plan. " * 12 + "And the plan is good. " * 6
    greek = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu"
    yield "filler text", f"{greek}. " * 50
    yield "an infinite loop explained", "and then the loop begins again, " * 40
    yield "stammering", "I, I, I, I don't know, " * 80
    yield "typing practice", "asdf jkl; " * 300
    yield "a dialogue", '"Yes?" she asked.\n"No," he said.\n' * 60
