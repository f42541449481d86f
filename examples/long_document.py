"""Ask about a text that is too long for the prompt.

The proxy moves the document to a file in the sandbox, and the model searches the file.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

log = "\n".join(
    f"{n:05d} pump {n % 17} pressure {'9.81' if n == 12_345 else '1.02'} bar" for n in range(20_000)
)
question = "Which line has a pressure above 5 bar?"
completion = client.chat.completions.create(
    model=model,
    messages=[
        {
            "role": "user",
            "content": f'<document title="pumps.log">\n{log}\n</document>\n\n{question}',
        }
    ],
)
print(completion.choices[0].message.content)
print(f"characters in the document: {len(log):,}")
usage = completion.usage.sandbox
print("moved to a file:", "yes" if usage["documents_tokens"] > 100_000 else "no")
