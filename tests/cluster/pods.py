"""Create a Pod, wait for its state, and run commands in it."""

from collections.abc import Callable
from typing import Any

from kubernetes_asyncio import client, watch
from kubernetes_asyncio.stream import WsApiClient

WAIT_TIMEOUT_S = 60


def pod(name: str, image: str, *command: str, node: str | None = None) -> dict[str, Any]:
    """Return a Pod with one container, for a node or for any."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": list(command) or None,
        "stdin": True,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [container],
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
        },
    }


async def wait_for_pod(
    core: client.CoreV1Api, name: str, condition: Callable[[client.V1Pod], bool]
) -> client.V1Pod:
    """Return a Pod as soon as the condition holds for it, or fail."""
    async with watch.Watch() as events:
        async for event in events.stream(
            core.list_namespaced_pod,
            "default",
            field_selector=f"metadata.name={name}",
            timeout_seconds=WAIT_TIMEOUT_S,
        ):
            if condition(event["object"]):
                return event["object"]
    raise AssertionError(f"Pod {name} did not get there in {WAIT_TIMEOUT_S} s")


def is_running(observed: client.V1Pod) -> bool:
    return bool(observed.status.phase == "Running")


async def execute(core: client.CoreV1Api, name: str, *command: str) -> tuple[str, int]:
    """Return the standard output and the exit code of a command in a Pod."""
    async with WsApiClient(core.api_client.configuration) as api:
        opened = await client.CoreV1Api(api).connect_get_namespaced_pod_exec(
            name,
            "default",
            command=list(command),
            stdout=True,
            stderr=False,
            stdin=False,
            tty=False,
            _preload_content=False,
        )
        output, status = b"", ""
        async with opened as websocket:
            async for message in websocket:
                channel, content = message.data[0], message.data[1:]
                if channel == 1:
                    output += content
                elif channel == 3:
                    status = content.decode()
    return output.decode(), WsApiClient.parse_error_data(status)
