"""How a loaded model has its replies decided by a server: one way to it, and what was measured of that."""

from __future__ import annotations

import math
from typing import Any

from edgeinfer.config import GenerationConfig, LoadConfig
from edgeinfer.options import options_of
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.remote.channel import Channel
from edgeinfer.runtime.remote.contract import RemoteServer
from edgeinfer.runtime.remote.decoding import RemoteDecoding
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.text import TokenizerLike, vocabulary_digest

__all__ = ["RemoteDeciding", "remote_deciding"]

# Options of a reply by which its tokens are chosen; lengths and stop strings are looked after here.
_SENT = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "stop_token_ids", "ignore_eos", "choices", "json_schema", "json_object", "regex", "grammar",
    "parse_special",
)  # fmt: skip
# Tokens of a draft at most.
_MOST = 32


class RemoteDeciding:
    """Makes the strategies of replies that a server decides.

    Args:
        server: that decides.
        goes_on: the local model writes the rest of a reply whose server is lost.
    """

    def __init__(self, server: RemoteServer, *, goes_on: bool) -> None:
        self._server, self._goes_on = server, goes_on
        self._channel = Channel(_MOST)

    def strategy(self, engine: Engine, sampler: Sampler, config: GenerationConfig) -> RemoteDecoding:
        """The strategy of one reply."""
        return RemoteDecoding(
            engine.backend,
            sampler,
            self._server,
            _sent(config) | {"seed": sampler.seed},
            self._channel,
            chunk=engine.chunk,
            goes_on=self._goes_on,
            cancelled=lambda: engine.cancelled,
        )


def remote_deciding(config: LoadConfig, tokenizer: TokenizerLike) -> RemoteDeciding | None:
    """What has replies decided as a configuration says; None where this model decides.

    Raises:
        CapabilityError: httpx is not installed.
    """
    if config.remote is None:
        return None
    from edgeinfer.runtime.remote.edgeinfer_server import EdgeInferServer  # few programs need an HTTP client

    vocabulary = vocabulary_digest(tokenizer)
    server = EdgeInferServer(config.remote, config.remote_key, config.remote_digest, vocabulary)
    return RemoteDeciding(server, goes_on=config.remote_loss == "local")


def _sent(config: GenerationConfig) -> dict[str, Any]:
    """The options that are not as usual, in the form of /v1/verify."""
    declared = options_of(GenerationConfig)
    given = {name: value for name in _SENT if (value := getattr(config, name)) != declared[name].default}
    if bias := config.logit_bias:
        given["logit_bias"] = {str(token): False if value == -math.inf else value for token, value in bias.items()}
    return given
