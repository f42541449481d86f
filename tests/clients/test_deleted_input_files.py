"""Continued responses whose earlier files were deleted."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from policies.artifacts import ArtifactLimits
from proxy.api.stored_responses import MISSING_FILE_TEXT
from proxy.files import FileStore
from proxy.inputs import InputLoader
from proxy.models.scripted import text_reply
from tests.clients.responses_sdk import MODEL, api_error, client_with_key, sent_messages
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy
from tests.stores import open_store


@pytest.mark.parametrize("by", ["previous_response_id", "conversation", "item_reference"])
async def test_next_response_gets_a_note_in_place_of_a_deleted_input_file(
    by: str, tmp_path: Path
) -> None:
    files = FileStore(open_store(tmp_path), limits=ArtifactLimits())
    inputs = InputLoader(uploads=files.store.uploads)
    with anyio.fail_after(30):
        async with (
            scripted_backend([text_reply("A table.")] * 3) as backend,
            running_proxy(backend, "memory", tmp_path, files=files, inputs=inputs) as url,
            client_with_key(url, "mine") as mine,
        ):
            file = await mine.files.create(file=("a.csv", b"a,b\n"), purpose="user_data")
            part: Any = {"type": "input_file", "file_id": file.id}
            ask = {"type": "input_text", "text": "What is it?"}
            said: Any = [{"id": "msg_x", "role": "user", "content": [part, ask]}]
            begin: dict[str, Any] = {}
            if by == "conversation":
                begin["conversation"] = (await mine.conversations.create()).id
            first = await mine.responses.create(model=MODEL, input=said, **begin)
            await mine.files.delete(file.id)
            more: Any = {"role": "user", "content": "And now?"}
            go_on: dict[str, Any] = {**begin, "input": [more]}
            if by == "previous_response_id":
                go_on["previous_response_id"] = first.id
            elif by == "item_reference":
                go_on["input"] = [{"type": "item_reference", "id": "msg_x"}, more]
            second = await mine.responses.create(model=MODEL, **go_on)
            assert second.output_text == "A table."
            again = await api_error(mine.responses.create(model=MODEL, input=said))
            assert again.param == "input[0].content[0].file_id"
    assert sent_messages(backend, 1)[0] == ("user", f"{MISSING_FILE_TEXT}\nWhat is it?")
