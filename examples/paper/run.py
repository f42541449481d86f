"""Ask a proxy to do tasks of this directory, and save the produced files in paper-output.

With --scripted, each task gets a proxy of its own, in which the task's script plays the model.
"""

import argparse
import base64
import os
from pathlib import Path

import yaml
from openai import OpenAI
from scripted_proxy import scripted_proxy

HERE = Path(__file__).parent
URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")


def ask(task, url):
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    # The first model that the backend lists, unless MODEL names another.
    model = os.environ.get("MODEL") or client.models.list().data[0].id
    parts = [{"type": "text", "text": task["prompt"]}]
    for path in sorted(path for glob in task.get("documents", []) for path in HERE.glob(glob)):
        data = f"data:text/plain;base64,{base64.b64encode(path.read_bytes()).decode()}"
        parts.append({"type": "file", "file": {"filename": path.name, "file_data": data}})
    messages = [{"role": "user", "content": parts}]
    completion = client.chat.completions.create(model=model, messages=messages)
    print(f"== {task['name']}\n{completion.choices[0].message.content}")
    container = completion.sandbox["container_id"]
    for file in completion.sandbox["files"]:
        content = client.containers.files.content.retrieve(file["id"], container_id=container)
        path = Path("paper-output", task["name"], file["filename"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.read())
        print(f"saved {path} ({file['mime_type']}, {file['bytes']} bytes)")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("names", nargs="*", help="the tasks; default: all")
parser.add_argument("--scripted", action="store_true")
options = parser.parse_args()
for name in options.names or sorted(path.stem for path in HERE.glob("*.yaml")):
    task = yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    if options.scripted:
        with scripted_proxy(task["replies"]) as url:
            ask(task, url)
    else:
        ask(task, URL)
