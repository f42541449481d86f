"""Keep files between requests: both requests name the same session.

Without a session each request starts with an empty sandbox.
"""

import os
import uuid

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

session = f"example-{uuid.uuid4()}"
messages = [{"role": "user", "content": "Write the first 20 square numbers to squares.txt."}]
first = client.chat.completions.create(
    model=model, messages=messages, extra_body={"sandbox": {"session": session}}
)
print(first.choices[0].message.content)

messages += [
    {"role": "assistant", "content": first.choices[0].message.content},
    {"role": "user", "content": "Add up the numbers in squares.txt."},
]
second = client.chat.completions.create(
    model=model, messages=messages, extra_body={"sandbox": {"session": session}}
)
print(second.choices[0].message.content)
print("same container:", first.sandbox["container_id"] == second.sandbox["container_id"])

# The files are deleted after sessions.retention_hours, or with their container.
client.containers.delete(second.sandbox["container_id"])
