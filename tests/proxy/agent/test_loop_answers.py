"""Where the answer is found, and which files go back beside it."""

import hashlib

import pytest

from policies.artifacts import ArtifactLimits, SkippedFile
from policies.limits import Limits, StopReason
from policies.profile import Profile
from proxy.agent.events import AnswerDelta, Event, FileProduced
from proxy.agent.result import Artifact
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.proxy.agent.runs import SUBMIT, Events, Run, answered, bash
from tests.sandbox_runtime.transfer import PLENTY_S

HAND_IN = tool_reply(call("submit"))
IN_OUTPUT = "echo from output > /testbed/output/answer.txt"
IN_TESTBED = "echo from testbed > /testbed/answer.txt"


async def test_a_submitted_answer_goes_before_any_file() -> None:
    assert (await answered([tool_reply(bash(f"{IN_OUTPUT}; {IN_TESTBED}")), SUBMIT])).answer == "42"


async def test_then_comes_the_answer_file_in_the_output_directory() -> None:
    steps = tool_reply(bash(f"{IN_OUTPUT}; {IN_TESTBED}"), content="It is done.")
    assert (await answered([steps, HAND_IN])).answer == "from output"


async def test_then_the_one_in_the_working_directory() -> None:
    steps = tool_reply(bash(IN_TESTBED), content="It is done.")
    assert (await answered([steps, HAND_IN])).answer == "from testbed"


async def test_then_the_last_prose() -> None:
    steps = tool_reply(bash("ls"), content="There are 41.")
    last = tool_reply(call("submit"), content="There are 42.")
    assert (await answered([steps, last])).answer == "There are 42."


async def test_then_one_that_is_asked_for() -> None:
    result = await answered([tool_reply(bash("ls")), HAND_IN, text_reply("42")])
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)


async def test_prose_that_only_announces_is_no_answer_to_a_submit_without_one() -> None:
    steps = tool_reply(bash("ls"), content="Let me look at the files:")
    assert (await answered([steps, HAND_IN, text_reply("42")])).answer == "42"


async def test_an_answer_file_goes_before_closing_prose() -> None:
    result = await answered([tool_reply(bash(IN_OUTPUT)), text_reply("I have saved it.")])
    assert (result.answer, result.stop_reason) == ("from output", StopReason.ANSWERED)


@pytest.mark.parametrize(
    "making",
    [
        "ln -s /root/secret output/answer.txt",
        "ln -s answer.txt output/answer.txt",
        "mkfifo output/answer.txt",
        "mkdir output/answer.txt",
        "touch output/answer.txt",
        "printf ' \\n\\n' > output/answer.txt",
        "head -c 1048577 /dev/zero > output/answer.txt",
    ],
)
async def test_only_a_regular_file_of_sane_size_with_text_is_an_answer(making: str) -> None:
    steps = tool_reply(bash(f"echo secret > /root/secret; {making}"))
    result = await answered([steps, HAND_IN, text_reply("asked for")])
    assert (result.answer, list(result.artifacts)) == ("asked for", [])


async def test_an_unusable_answer_file_does_not_hide_the_other() -> None:
    steps = tool_reply(bash(f"mkfifo output/answer.txt; {IN_TESTBED}"))
    assert (await answered([steps, HAND_IN])).answer == "from testbed"


async def test_an_answer_file_keeps_its_inner_lines_and_indentation() -> None:
    steps = tool_reply(bash("printf '\\n  a\\n\\n  b\\n\\n' > output/answer.txt"))
    assert (await answered([steps, HAND_IN])).answer == "  a\n\n  b"


async def test_an_answer_file_that_is_not_utf_8_is_shown_as_far_as_it_goes() -> None:
    steps = tool_reply(bash("printf 'caf\\351' > output/answer.txt"))
    assert (await answered([steps, HAND_IN])).answer == "caf\N{REPLACEMENT CHARACTER}"


# Files


async def test_files_in_the_output_directory_go_back() -> None:
    steps = tool_reply(bash("mkdir output/sub; echo 1 > output/a.csv; printf xy > output/sub/b"))
    run = Run(ScriptedModel([steps, SUBMIT]))
    result = await run.go()

    def artifact(number: int, path: str, data: bytes) -> Artifact:
        return Artifact(
            file_id=f"cfile_{number}",
            container_id="cntr_test",
            path=path,
            bytes=len(data),
            mime_type="text/plain",
            sha256=hashlib.sha256(data).hexdigest(),
            url=f"https://files.test/{path.rpartition('/')[2]}",
            data_url=None,
            filename=path.rpartition("/")[2],
        )

    assert result.artifacts == [
        artifact(1, "/testbed/output/a.csv", b"1\n"),
        artifact(2, "/testbed/output/sub/b", b"xy"),
    ]
    assert run.artifact_store.saved == {
        "/testbed/output/a.csv": b"1\n",
        "/testbed/output/sub/b": b"xy",
    }


async def test_links_fifos_and_the_answer_file_never_go_back() -> None:
    steps = tool_reply(
        bash(
            "echo secret > /root/secret; ln -s /root/secret output/link; ln -s /root output/dir;"
            " mkfifo output/fifo; echo 42 > output/answer.txt; echo ok > output/ok"
        )
    )
    run = Run(ScriptedModel([steps, HAND_IN]))
    result = await run.go()
    assert (result.answer, run.artifact_store.saved) == ("42", {"/testbed/output/ok": b"ok\n"})


async def test_an_output_directory_that_is_gone_is_no_hindrance() -> None:
    result = await answered([tool_reply(bash("rm -r output")), SUBMIT])
    assert (result.answer, list(result.artifacts)) == ("42", [])


async def test_files_over_the_limits_are_named_and_not_linked() -> None:
    steps = tool_reply(bash("cd output; echo 1 > a; echo 2 > b; echo 3 > c"))
    words = tool_reply(call("submit", answer="/testbed/output/a and /testbed/output/c !"))
    run = Run(ScriptedModel([steps, words]), profile=Profile(artifacts=ArtifactLimits(max_files=2)))
    result = await run.go()
    assert [artifact.path for artifact in result.artifacts] == [
        "/testbed/output/a",
        "/testbed/output/b",
    ]
    assert list(result.skipped_files) == [SkippedFile("/testbed/output/c", 2, "too_many")]
    assert result.answer == "[a](https://files.test/a) and /testbed/output/c !"


async def test_the_answer_file_is_not_linked_for_it_does_not_go_back() -> None:
    words = "It is in /testbed/output/answer.txt."
    result = await answered([tool_reply(bash(IN_OUTPUT)), tool_reply(call("submit", answer=words))])
    assert result.answer == words


async def test_paths_in_every_kind_of_answer_become_links() -> None:
    steps = tool_reply(bash("echo 1 > output/a.csv; echo '(sandbox:/mnt/data/a.csv)' > answer.txt"))
    link = "([a.csv](https://files.test/a.csv))"
    assert (await answered([steps, HAND_IN])).answer == link
    prose = text_reply("([a.csv](/testbed/output/a.csv))")
    steps = tool_reply(bash("echo 1 > output/a.csv"))
    assert (await answered([steps, prose])).answer == link
    run = Run(ScriptedModel([steps, prose]), limits=Limits(max_turns=1))
    assert (await run.go()).answer == link


async def test_an_answer_of_a_given_form_is_not_touched() -> None:
    steps = tool_reply(bash("echo 1 > output/a.csv"))
    json = '{"file": "/testbed/output/a.csv"}'
    submit = tool_reply(call("submit", answer=json))
    assert (await answered([steps, submit], rewrite_links=False)).answer == json


async def test_names_that_are_not_utf_8_go_back_too() -> None:
    steps = tool_reply(bash("touch output/$(printf 'caf\\351').csv"))
    run = Run(ScriptedModel([steps, SUBMIT]))
    await run.go()
    assert list(run.artifact_store.saved) == ["/testbed/output/caf\udce9.csv"]


async def test_half_a_surrogate_pair_in_the_answer_is_no_text() -> None:
    result = await answered([text_reply("It is \ud83d.")])
    assert result.answer == "It is ?."


@pytest.mark.parametrize(
    ("kind", "skipped_files"),
    [(AnswerDelta, []), (FileProduced, [("/testbed/output/b", "changed")])],
)
async def test_a_file_that_changed_under_our_hands_is_left_out(
    kind: type[Event], skipped_files: list[tuple[str, str]]
) -> None:
    sandboxes = MemorySandboxes()

    async def swap(event: Event) -> None:
        if isinstance(event, kind):
            await sandboxes.leased[0].exec("rm output/b; mkfifo output/b", timeout_s=PLENTY_S)

    steps = tool_reply(bash("echo 1 > output/a; echo 2 > output/b"))
    run = Run(ScriptedModel([steps, SUBMIT]), sandboxes, events=Events(swap))
    result = await run.go()
    assert list(run.artifact_store.saved) == ["/testbed/output/a"]
    assert [(file.path, file.why) for file in result.skipped_files] == skipped_files
