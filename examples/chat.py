"""Ask one question. The model may run commands in its sandbox before it answers."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

completion = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "How many primes are there below a million?"}],
)
print(completion.choices[0].message.content)
print("steps:", completion.sandbox["steps"])
print("stop reason:", completion.sandbox["stop_reason"])
