"""The servers that can decide replies, by the API that they speak, and which of them one speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgeinfer.runtime.remote.contract import RemoteAccess, RemoteServer
from edgeinfer.runtime.remote.edgeinfer_server import EdgeInferServer
from edgeinfer.runtime.remote.http import UNANSWERED, Connection
from edgeinfer.runtime.remote.openai_server import OpenAIServer
from edgeinfer.runtime.remote.sglang import SGLangServer
from edgeinfer.runtime.remote.vllm import VLLMServer

__all__ = ["API_SERVERS", "find_api"]

API_SERVERS: Mapping[str, Callable[[RemoteAccess], RemoteServer]] = {
    "edgeinfer": EdgeInferServer,
    "sglang": SGLangServer,
    "vllm": VLLMServer,
    "openai": OpenAIServer,
}


def find_api(access: RemoteAccess) -> str | None:
    """The API of a server, as its list of models names its owner; None where it does not answer now."""
    connection = Connection(access)
    try:
        owner = str(connection.get("/v1/models")["data"][0]["owned_by"])
    except UNANSWERED:
        return None
    except (ValueError, TypeError, KeyError, IndexError):
        return "openai"
    finally:
        connection.close()
    return owner if owner in API_SERVERS else "openai"
