"""Get the answer as an object of a given JSON Schema, here that of a pydantic model."""

import os

from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id


class Statistics(BaseModel):
    mean: float
    median: float
    largest: int


completion = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Describe the numbers 3, 1, 4, 1, 5, 9, 2, 6."}],
    response_format=Statistics,
)
statistics = completion.choices[0].message.parsed
print(f"mean {statistics.mean}, median {statistics.median}, largest {statistics.largest}")
