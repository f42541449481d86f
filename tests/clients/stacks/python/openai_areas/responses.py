"""Responses: unstreamed, as events, by the stream helper, parsed, with hosted and client tools."""

import base64
from typing import Any

import openai
import pytest
from model import EMPTY_OBSERVATION, NAME, Script, bash, calls, says, stdout_observation, submits
from pydantic import BaseModel
from sdk_fixtures import MAJOR

SHELL: Any = {"type": "shell", "environment": {"type": "container_auto"}}
INTERPRETER: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
WARMTH: Any = {
    "type": "function",
    "name": "warmth",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
BYTES = base64.b64encode(b"n\n7\n").decode()
PIXEL = "data:image/gif;base64,R0lGODlhOw=="


class Place(BaseModel):
    city: str
    degrees: int


def kinds(response: Any) -> list[str]:
    return [item.type for item in response.output]


def test_response_contains_the_result_of_the_sandbox(client: Any) -> None:
    script = Script(bash("echo $((6 * 7))"), submits("It is 42."))
    made = client.responses.create(
        model=NAME, input=script.prompt, instructions="Be brief.", metadata={"topic": "products"}
    )
    assert (made.status, made.output_text, made.error) == ("completed", "It is 42.", None)
    assert (made.instructions, made.metadata) == ("Be brief.", {"topic": "products"})
    assert script.observations() == [stdout_observation("42")]
    assert "Be brief." in script.requests()[0]["messages"][0]["content"]


def test_stream_events_add_up_to_the_response(client: Any) -> None:
    script = Script(bash("echo made"), says("It is made."))
    events = list(client.responses.create(model=NAME, input=script.prompt, stream=True))
    for event in events:
        type(event).model_validate(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == "It is made."
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items == events[-1].response.output


def test_stream_helper_assembles_the_response(client: Any) -> None:
    script = Script(bash("echo made"), says("It is made."))
    with client.responses.stream(model=NAME, input=script.prompt) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "It is made."
    assert client.responses.retrieve(final.id).output_text == "It is made."


@pytest.mark.parametrize("streamed", [False, True])
def test_structured_answer_is_parsed(client: Any, streamed: bool) -> None:
    script = Script(
        bash("echo 21"), submits("Warm."), says("In Bonn."), says('{"city": "Bonn", "degrees": 21}')
    )
    asked: Any = {"model": NAME, "input": script.prompt, "text_format": Place}
    if streamed:
        with client.responses.stream(**asked) as stream:
            made = stream.get_final_response()
    else:
        made = client.responses.parse(**asked)
    assert made.output_parsed == Place(city="Bonn", degrees=21)
    formed = ["response_format" in body for body in script.requests()]
    assert formed == [False, False, True, True]
    form = script.requests()[-1]["response_format"]["json_schema"]
    assert (form["name"], form["strict"]) == ("Place", True)


@pytest.mark.parametrize("by_id", [False, True])
def test_function_is_called_beside_the_sandbox(client: Any, by_id: bool) -> None:
    both = calls(("execute_bash", {"command": "echo one > f"}), ("warmth", {"city": "Bonn"}))
    script = Script(both, bash("cat f"), submits("21 degrees."))
    asked: Any = {"model": NAME, "tools": [WARMTH]}
    first = client.responses.create(input=script.prompt, **asked)
    (called,) = [item for item in first.output if item.type == "function_call"]
    assert (called.name, called.arguments) == ("warmth", '{"city": "Bonn"}')
    result: Any = {"type": "function_call_output", "call_id": called.call_id, "output": "21"}
    if by_id:
        second = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    else:
        before = [{"role": "user", "content": script.prompt}, *first.output]
        second = client.responses.create(input=[*before, result], **asked)
    assert second.output_text == "21 degrees."
    assert script.observations() == [EMPTY_OBSERVATION, "21", stdout_observation("one")]


def test_function_arguments_are_parsed(client: Any) -> None:
    class Warmth(BaseModel):
        city: str

    script = Script(calls(("Warmth", {"city": "Bonn"})))
    tools: Any = [openai.pydantic_function_tool(Warmth)]
    made = client.responses.parse(model=NAME, input=script.prompt, tools=tools)
    (called,) = [item for item in made.output if item.type == "function_call"]
    assert called.parsed_arguments == Warmth(city="Bonn")


def test_custom_tool_is_called_with_free_text(client: Any) -> None:
    script = Script(calls(("sql", {"input": "select 1"})), submits("One."))
    asked: Any = {"model": NAME, "tools": [{"type": "custom", "name": "sql"}]}
    first = client.responses.create(input=script.prompt, **asked)
    called = first.output[-1]
    assert (called.type, called.input) == ("custom_tool_call", "select 1")
    result: Any = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "1"}
    second = client.responses.create(input=[result], previous_response_id=first.id, **asked)
    assert (second.output_text, script.observations()) == ("One.", ["1"])


def test_shell_items_contain_command_and_output(client: Any) -> None:
    script = Script(bash("echo out; echo err >&2; exit 3"), submits("It failed."))
    made = client.responses.create(model=NAME, input=script.prompt, tools=[SHELL])
    assert kinds(made) == ["shell_call", "shell_call_output", "message"]
    called, output, _ = made.output
    assert called.action.commands == ["echo out; echo err >&2; exit 3"]
    assert output.call_id == called.call_id
    (shown,) = output.output
    assert (shown.stdout, shown.stderr, shown.outcome.exit_code) == ("out\n", "err\n", 3)


def test_shell_events_stream_command_and_output(client: Any) -> None:
    script = Script(bash("echo out"), submits("Seen."))
    asked: Any = {"model": NAME, "input": script.prompt, "tools": [SHELL]}
    events = list(client.responses.create(**asked, stream=True))
    shell_events = [e.to_dict(warnings=False) for e in events if "shell_call" in e.type]
    kinds = [event["type"].removeprefix("response.shell_call_") for event in shell_events]
    command, output = ["command.added", "command.delta", "command.done"], "output_content"
    assert kinds == [*command, f"{output}.delta", f"{output}.done"]
    assert [shell_events[1]["delta"], shell_events[3]["delta"]] == ["echo out", {"stdout": "out\n"}]
    if MAJOR > 2:  # SDK versions before 3 have no classes for these events
        for event in events:
            type(event).model_validate(event.to_dict())


def test_code_interpreter_items_contain_included_outputs(
    client: Any,
) -> None:
    script = Script(bash("echo 42"), submits("42."))
    made = client.responses.create(
        model=NAME,
        input=script.prompt,
        tools=[INTERPRETER],
        include=["code_interpreter_call.outputs"],
    )
    assert kinds(made) == ["code_interpreter_call", "message"]
    called = made.output[0]
    (logs,) = called.outputs
    assert (called.code, logs.type, logs.logs.strip()) == ("echo 42", "logs", "42")


def test_produced_file_is_cited_and_read_from_its_container(client: Any) -> None:
    script = Script(bash("echo 1 > output/t.csv"), submits("Here: [t.csv](/testbed/output/t.csv)."))
    made = client.responses.create(model=NAME, input=script.prompt, tools=[SHELL])
    (note,) = made.output[-1].content[0].annotations
    assert (note.type, note.filename) == ("container_file_citation", "t.csv")
    content = client.containers.files.content.retrieve(note.file_id, container_id=note.container_id)
    assert content.read() == b"1\n"


def test_input_files_and_images_are_written_to_the_sandbox(client: Any) -> None:
    upload = client.files.create(file=("up.txt", b"uploaded"), purpose="user_data")
    script = Script(bash("cd documents; cat up.txt in.csv; wc -c < image-1.gif"), submits("Read."))
    content: Any = [
        {"type": "input_text", "text": script.prompt},
        {"type": "input_file", "file_id": upload.id},
        {
            "type": "input_file",
            "filename": "in.csv",
            "file_data": f"data:text/csv;base64,{BYTES}",
        },
        {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
    ]
    client.responses.create(model=NAME, input=[{"role": "user", "content": content}])
    assert script.observations() == [stdout_observation("uploadedn\n7\n7")]
    user = script.requests()[0]["messages"][-1]["content"]
    assert [part["image_url"]["url"] for part in user if part["type"] == "image_url"] == [PIXEL]


def test_referenced_container_is_used(client: Any) -> None:
    box = client.containers.create(name="box")
    client.containers.files.create(box.id, file=("a.txt", b"put in"))
    script = Script(bash("cat documents/a.txt"), submits("Read."))
    shell: Any = {
        "type": "shell",
        "environment": {"type": "container_reference", "container_id": box.id},
    }
    made = client.responses.create(model=NAME, input=script.prompt, tools=[shell])
    assert script.observations() == [stdout_observation("put in")]
    assert made.output[0].environment.container_id == box.id


def test_openai_only_fields_do_not_reach_the_backend(client: Any) -> None:
    """The newest such fields; SDK versions before 3 do not know them."""
    script = Script(says("Hello."))
    openai_only: Any = {
        "background_options": {"completion_window": "soonest"},
        "access_programs": {},
        "image": {"context_compression": "auto"},
    }
    if MAJOR > 2:
        made = client.responses.create(model=NAME, input=script.prompt, **openai_only)
    else:
        made = client.responses.create(model=NAME, input=script.prompt, extra_body=openai_only)
    assert made.output_text == "Hello."
    asked = {"model", "messages", "tools", "stream", "stream_options"}
    assert set(script.requests()[0]) == asked


def test_truncated_answer_is_incomplete(client: Any) -> None:
    script = Script(*[says("It is", finish_reason="length")] * 3)
    made = client.responses.create(model=NAME, input=script.prompt, max_output_tokens=20)
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"tools": [{"type": "image_generation"}]}, openai.BadRequestError, "tools[0].type"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"previous_response_id": "resp_no"}, openai.BadRequestError, "previous_response_id"),
        ({"conversation": "conv_no"}, openai.NotFoundError, "conversation_id"),
    ],
)
def test_unsupported_field_is_refused_by_name(
    client: Any, asked: Any, kind: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(kind) as caught:
        client.responses.create(model=NAME, input="Hello.", **asked)
    assert caught.value.param == param


def test_failure_ends_a_stream_with_an_sdk_error(client: Any) -> None:
    script = Script({"error": {"message": "no such grammar", "status": 400}})
    with pytest.raises(openai.APIError, match="no such grammar"):
        list(client.responses.create(model=NAME, input=script.prompt, stream=True))
