"""From the bytes of a body to a request: strict JSON, with the path of what is wrong.

Knows no route: each names the Struct it wants.
"""

import logging
import re

import msgspec
from msgspec import Struct

from megallm.http.errors import RequestError

log = logging.getLogger(__name__)

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")

SILENT = frozenset(
    {
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
        "web_search_options",
    }
)
"""Fields of the protocol that change nothing here; clients send them unasked."""


class UnknownFields:
    """Logs each unknown field once. A front end has one."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, names: set[str], route: str) -> None:
        """Logs those names that were not seen before; keeps a bounded number of them."""
        for name in sorted(names - self._seen - SILENT):
            if len(self._seen) >= MAX_SEEN:
                return
            self._seen.add(name)
            log.warning("%s: field %r is unknown and ignored", route, name[:MAX_SHOWN])


MAX_SEEN = 1000
"""A client that makes names up fills no memory."""
MAX_SHOWN = 100


def decode[T: Struct](body: bytes, kind: type[T], unknown: UnknownFields, route: str) -> T:
    """Gives the request that a body holds. Unknown fields are ignored and logged once.

    Raises: RequestError naming the path.
    """
    try:
        request = msgspec.json.decode(body, type=kind)
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the body is no JSON: {error}" if body else "the body is empty; send a JSON object"
        ) from None
    except RecursionError:
        raise RequestError("the body is nested too deep") from None
    except (OverflowError, ValueError):  # a number that no float holds
        raise RequestError("the body holds a number that is out of range") from None
    unknown.note(names - set(kind.__struct_encode_fields__), route)
    return request


def _invalid(message: str) -> RequestError:
    """Gives the error for a body of the wrong shape: msgspec's message, and the path it names."""
    path = _PATH.search(message)
    param = path[1] if path is not None else None
    missing = _MISSING.search(message)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
    text = message[: path.start()] if path is not None else message
    return RequestError(f"{param}: {text}" if param else text, param=param or None)
