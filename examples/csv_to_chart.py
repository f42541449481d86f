"""Send a CSV file and save the chart that the model makes of it in the current directory."""

import os
from pathlib import Path

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
# The first model that the backend lists, unless MODEL names another.
model = os.environ.get("MODEL") or client.models.list().data[0].id

CSV = b"""month,revenue
January,120
February,95
March,143
April,170
"""

upload = client.files.create(file=("revenue.csv", CSV), purpose="user_data")
completion = client.chat.completions.create(
    model=model,
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "file", "file": {"file_id": upload.id}},
                {
                    "type": "text",
                    "text": "Draw a bar chart of the revenue by month. Save it as a PNG or SVG file"
                    " in /testbed/output.",
                },
            ],
        }
    ],
)
print(completion.choices[0].message.content)
for file in completion.sandbox["files"]:
    content = client.containers.files.content.retrieve(
        file["id"], container_id=completion.sandbox["container_id"]
    )
    path = Path(file["filename"])
    path.write_bytes(content.read())
    print(f"saved {path} ({file['mime_type']}, {file['bytes']} bytes)")
