"""How a loaded model has its replies decided by a server: which API it speaks, and what was measured of the way."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgeinfer.config import GenerationConfig, LoadConfig
from edgeinfer.options import options_of
from edgeinfer.remote_options import VERIFIED_OPTIONS
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.remote.channel import Channel, Prices
from edgeinfer.runtime.remote.contract import RemoteAccess, RemoteServer
from edgeinfer.runtime.remote.decoding import RemoteDecoding
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.text.contract import TokenizerLike

if TYPE_CHECKING:
    from edgeinfer.runtime.layer_skip.entropy import Entropies


# What speaks with servers.
_CLIENT = "edgeinfer.runtime.remote.http"
# Tokens of a draft at most.
_MOST = 32
# Servers that name themselves as owners of their models, and verify drafts.
_VERIFYING = ("edgeinfer", "sglang", "vllm")


class RemoteDeciding:
    """Makes the strategies of replies that a server decides.

    Args:
        config: as the model was loaded.
        access: which server decides.

    Raises:
        CapabilityError: httpcore is not installed.
    """

    def __init__(self, config: LoadConfig, access: RemoteAccess) -> None:
        importlib.import_module(_CLIENT)  # which raises an error where httpcore is not installed
        self._config, self._access = config, access
        self._channel = Channel(_MOST, Prices(config.remote_draft_price, config.remote_kilobyte_price))
        self._server: RemoteServer | None = None
        self._entropies: Entropies | None = None
        if config.remote_api is not None:
            self._server = _new_server(config.remote_api, access)

    def strategy(self, engine: Engine, sampler: Sampler, config: GenerationConfig) -> RemoteDecoding:
        """The strategy of one reply."""
        server, options = self._answering(), _sent(config)
        server.check(options)
        given = (engine.backend, sampler, server, options | {"seed": sampler.seed}, self._channel)
        others: dict[str, Any] = {
            "chunk": engine.chunk,
            "goes_on": self._config.remote_loss == "local",
            "cancelled": lambda: engine.cancelled,
        }
        if config.compute == "full":
            return RemoteDecoding(*given, **others)
        # As few replies are of two models.
        from edgeinfer.runtime.layer_skip.entropy import Entropies, EntropyPolicy
        from edgeinfer.runtime.remote.routing import RoutedDecoding

        self._entropies = self._entropies or Entropies()
        chosen = (config.compute_share, config.entropy_threshold, config.entropy_stay)
        return RoutedDecoding(*given, **others, policy=EntropyPolicy(self._entropies, *chosen))

    def _answering(self) -> RemoteServer:
        """The server, by the API that it speaks; where it does not answer now, the next reply looks again."""
        if self._server is None:
            api = _find_api(self._access)
            server = _new_server(api or "edgeinfer", self._access)
            if api is None:
                return server
            self._server = server
        return self._server


def remote_deciding(
    config: LoadConfig, tokenizer: TokenizerLike, begin_ids: tuple[int, ...], end_ids: frozenset[int]
) -> RemoteDeciding | None:
    """What has replies decided as a configuration says; None where this model decides. Errors as `RemoteDeciding`."""
    if config.remote is None:
        return None
    url = config.remote.rstrip("/").removesuffix("/v1")
    given = (config.remote_key, config.remote_model, config.remote_digest)
    return RemoteDeciding(config, RemoteAccess(url, *given, tokenizer, begin_ids, end_ids))


def _sent(config: GenerationConfig) -> dict[str, Any]:
    """The options that are not as usual, in the form of /v1/verify."""
    declared = options_of(GenerationConfig)
    given = {name: value for name in VERIFIED_OPTIONS if (value := getattr(config, name)) != declared[name].default}
    if bias := config.logit_bias:
        given["logit_bias"] = {str(token): False if value == -math.inf else value for token, value in bias.items()}
    return given


def _new_server(api: str, access: RemoteAccess) -> RemoteServer:
    """A server by the API that it speaks."""
    # Here, as few programs need an HTTP client.
    from edgeinfer.runtime.remote.edgeinfer_server import EdgeInferServer
    from edgeinfer.runtime.remote.openai_server import OpenAIServer
    from edgeinfer.runtime.remote.sglang import SGLangServer
    from edgeinfer.runtime.remote.vllm import VLLMServer

    servers: dict[str, Callable[[RemoteAccess], RemoteServer]] = {
        "edgeinfer": EdgeInferServer,
        "sglang": SGLangServer,
        "vllm": VLLMServer,
        "openai": OpenAIServer,
    }
    return servers[api](access)


def _find_api(access: RemoteAccess) -> str | None:
    """The API of a server, as its list of models names its owner; None where it does not answer now."""
    from edgeinfer.runtime.remote.http import UNANSWERED, Connection

    connection = Connection(access)
    try:
        owner = str(connection.get("/v1/models")["data"][0]["owned_by"])
    except UNANSWERED:
        return None
    except (ValueError, TypeError, KeyError, IndexError):
        return "openai"
    finally:
        connection.close()
    return owner if owner in _VERIFYING else "openai"
