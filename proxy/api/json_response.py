"""JSON for any client, whatever a model or a backend put into it."""

import json
from typing import Any

from starlette.responses import JSONResponse


class JSON(JSONResponse):
    """Plain ASCII, so that half a surrogate pair is no reason to fail."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()
