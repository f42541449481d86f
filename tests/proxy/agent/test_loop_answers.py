"""Sources of the answer, and the artifacts beside it."""

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

EMPTY_SUBMIT = tool_reply(call("submit"))
IN_OUTPUT = "echo from output > /testbed/output/answer.txt"
IN_TESTBED = "echo from testbed > /testbed/answer.txt"


async def test_submitted_answer_takes_precedence_over_answer_files() -> None:
    assert (await answered([tool_reply(bash(f"{IN_OUTPUT}; {IN_TESTBED}")), SUBMIT])).answer == "42"


async def test_answer_file_in_the_output_directory_is_used_after_an_empty_submit() -> None:
    steps = tool_reply(bash(f"{IN_OUTPUT}; {IN_TESTBED}"), content="It is done.")
    assert (await answered([steps, EMPTY_SUBMIT])).answer == "from output"


async def test_answer_file_in_the_working_directory_is_used_if_the_output_directory_has_none() -> (
    None
):
    steps = tool_reply(bash(IN_TESTBED), content="It is done.")
    assert (await answered([steps, EMPTY_SUBMIT])).answer == "from testbed"


async def test_last_prose_is_the_answer_if_there_is_no_answer_file() -> None:
    steps = tool_reply(bash("ls"), content="There are 41.")
    last = tool_reply(call("submit"), content="There are 42.")
    assert (await answered([steps, last])).answer == "There are 42."


async def test_final_answer_call_is_made_if_there_is_no_other_answer() -> None:
    result = await answered([tool_reply(bash("ls")), EMPTY_SUBMIT, text_reply("42")])
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)


async def test_announcement_of_a_call_is_no_answer_after_an_empty_submit() -> None:
    steps = tool_reply(bash("ls"), content="Let me look at the files:")
    assert (await answered([steps, EMPTY_SUBMIT, text_reply("42")])).answer == "42"


async def test_answer_file_takes_precedence_over_closing_prose() -> None:
    result = await answered([tool_reply(bash(IN_OUTPUT)), text_reply("I have saved it.")])
    assert (result.answer, result.stop_reason) == ("from output", StopReason.ANSWERED)


@pytest.mark.parametrize(
    "command",
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
async def test_only_a_regular_file_of_limited_size_with_text_is_an_answer(command: str) -> None:
    steps = tool_reply(bash(f"echo secret > /root/secret; {command}"))
    result = await answered([steps, EMPTY_SUBMIT, text_reply("asked for")])
    assert (result.answer, list(result.artifacts)) == ("asked for", [])


async def test_unusable_answer_file_does_not_hide_a_valid_answer_file() -> None:
    steps = tool_reply(bash(f"mkfifo output/answer.txt; {IN_TESTBED}"))
    assert (await answered([steps, EMPTY_SUBMIT])).answer == "from testbed"


async def test_answer_file_keeps_its_inner_lines_and_indentation() -> None:
    steps = tool_reply(bash("printf '\\n  a\\n\\n  b\\n\\n' > output/answer.txt"))
    assert (await answered([steps, EMPTY_SUBMIT])).answer == "  a\n\n  b"


async def test_invalid_utf_8_in_the_answer_file_is_replaced() -> None:
    steps = tool_reply(bash("printf 'caf\\351' > output/answer.txt"))
    assert (await answered([steps, EMPTY_SUBMIT])).answer == "caf\N{REPLACEMENT CHARACTER}"


# Files


async def test_files_in_the_output_directory_become_artifacts() -> None:
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


async def test_symlinks_fifos_and_the_answer_file_never_become_artifacts() -> None:
    steps = tool_reply(
        bash(
            "echo secret > /root/secret; ln -s /root/secret output/link; ln -s /root output/dir;"
            " mkfifo output/fifo; echo 42 > output/answer.txt; echo ok > output/ok"
        )
    )
    run = Run(ScriptedModel([steps, EMPTY_SUBMIT]))
    result = await run.go()
    assert (result.answer, run.artifact_store.saved) == ("42", {"/testbed/output/ok": b"ok\n"})


async def test_missing_output_directory_is_no_error() -> None:
    result = await answered([tool_reply(bash("rm -r output")), SUBMIT])
    assert (result.answer, list(result.artifacts)) == ("42", [])


async def test_files_over_the_limits_are_skipped_and_not_linked() -> None:
    steps = tool_reply(bash("cd output; echo 1 > a; echo 2 > b; echo 3 > c"))
    submit = tool_reply(call("submit", answer="/testbed/output/a and /testbed/output/c !"))
    run = Run(
        ScriptedModel([steps, submit]), profile=Profile(artifacts=ArtifactLimits(max_files=2))
    )
    result = await run.go()
    assert [artifact.path for artifact in result.artifacts] == [
        "/testbed/output/a",
        "/testbed/output/b",
    ]
    assert list(result.skipped_files) == [SkippedFile("/testbed/output/c", 2, "too_many")]
    assert result.answer == "[a](https://files.test/a) and /testbed/output/c !"


async def test_path_of_the_answer_file_is_not_rewritten_to_a_link() -> None:
    answer = "It is in /testbed/output/answer.txt."
    result = await answered(
        [tool_reply(bash(IN_OUTPUT)), tool_reply(call("submit", answer=answer))]
    )
    assert result.answer == answer


async def test_paths_become_links_in_answer_files_and_prose_and_final_answers() -> None:
    steps = tool_reply(bash("echo 1 > output/a.csv; echo '(sandbox:/mnt/data/a.csv)' > answer.txt"))
    link = "([a.csv](https://files.test/a.csv))"
    assert (await answered([steps, EMPTY_SUBMIT])).answer == link
    prose = text_reply("([a.csv](/testbed/output/a.csv))")
    steps = tool_reply(bash("echo 1 > output/a.csv"))
    assert (await answered([steps, prose])).answer == link
    run = Run(ScriptedModel([steps, prose]), limits=Limits(max_turns=1))
    assert (await run.go()).answer == link


async def test_paths_are_not_rewritten_to_links_if_the_request_excludes_links() -> None:
    steps = tool_reply(bash("echo 1 > output/a.csv"))
    json_answer = '{"file": "/testbed/output/a.csv"}'
    submit = tool_reply(call("submit", answer=json_answer))
    assert (await answered([steps, submit], rewrite_links=False)).answer == json_answer


async def test_files_with_names_that_are_not_utf_8_become_artifacts() -> None:
    steps = tool_reply(bash("touch output/$(printf 'caf\\351').csv"))
    run = Run(ScriptedModel([steps, SUBMIT]))
    await run.go()
    assert list(run.artifact_store.saved) == ["/testbed/output/caf\udce9.csv"]


async def test_lone_surrogate_in_the_answer_is_replaced() -> None:
    result = await answered([text_reply("It is \ud83d.")])
    assert result.answer == "It is ?."


@pytest.mark.parametrize(
    ("kind", "skipped_files"),
    [(AnswerDelta, []), (FileProduced, [("/testbed/output/b", "changed")])],
)
async def test_file_that_changes_during_collection_is_skipped(
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
