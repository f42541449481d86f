"""Use the Responses API: the server stores each response, and the next one continues from it."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

first = client.responses.create(
    model=model,
    input="Write the first 20 square numbers to squares.txt.",
)
print(first.output_text)

# The server has the earlier turns and files of the conversation.
second = client.responses.create(
    model=model,
    input="Add up the numbers in squares.txt.",
    previous_response_id=first.id,
)
print(second.output_text)
print("stored:", client.responses.retrieve(second.id).status)
