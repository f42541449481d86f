"""Which tool calls may be requested again after the server that ran them has died."""

from collections.abc import Mapping

UNKNOWN_OUTCOME = (
    "The server that ran this call has ended. It is not known whether the call had its effect:"
    " check that, and repeat the call if it had none."
)
"""The observation for a call that may not be requested again."""


def may_be_repeated(tool_name: str, arguments: object) -> bool:
    """Return True if a call has its effect once even if it is requested twice: commands have ids,
    and a call that only reads has no effect. An edit, or text that is typed into a job, would be
    made twice."""
    fields = arguments if isinstance(arguments, Mapping) else {}
    match tool_name:
        case "execute_bash":
            return fields.get("job_id") is None or not fields.get("command")
        case "submit":
            return True
        case _:
            return fields.get("command") == "view"
