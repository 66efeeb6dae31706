"""Options by which other machines take part: one decides the text that the loaded model drafts, or some hold layers."""

from __future__ import annotations

import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from edgeinfer.errors import Setting, UsageError
from edgeinfer.options import option, options_of
from edgeinfer.records import dataclass

RemoteLoss = Literal["stop", "local"]
RemoteApi = Literal["edgeinfer", "sglang", "vllm", "openai"]

# Options of a reply that choose its tokens, as both sides of /v1/verify have them. The device cuts stop strings and
# counts tokens itself; `logit_bias` is written otherwise.
VERIFIED_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "seed", "stop_token_ids", "ignore_eos", "choices", "json_schema", "json_object", "regex", "grammar",
    "parse_special",
)  # fmt: skip

# As llama.cpp's GGML_RPC_MAX_SERVERS.
_MOST_RPC = 16


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Who decides the text."""

    remote: str | None = option(
        None,
        help="URL of a server whose model decides the text while the local one drafts; prompts and replies "
        "leave this machine, and the server's API key is read from EDGEINFER_REMOTE_KEY (default: none)",
        cli="--remote",
        metavar="URL",
        group="remote",
    )
    remote_api: RemoteApi | None = option(
        None,
        help="what the server speaks: edgeinfer, sglang or vllm, which verify drafts, or openai, which any server with "
        "/v1/completions speaks and which streams alone (default: as its list of models says)",
        choices=("edgeinfer", "sglang", "vllm", "openai"),
        cli="--remote-api",
        group="remote",
    )
    remote_model: str | None = option(
        None,
        help="name of the server's model to ask for (default: the first that it lists)",
        cli="--remote-model",
        metavar="NAME",
        group="remote",
    )
    # Commands read it from EDGEINFER_REMOTE_KEY: other users of the machine see the arguments of a process.
    remote_key: str | None = option(None, help="API key of that server")
    remote_digest: str | None = option(
        None,
        help="sha256 that the server's model must have, as its first answer tells it (default: any)",
        cli="--remote-digest",
        metavar="SHA256",
        group="remote",
    )
    remote_loss: RemoteLoss = option(
        "stop",
        help="what to do when the server cannot be reached any more: stop, or let the local model write the rest "
        "(local), which is lossy (default: stop)",
        choices=("stop", "local"),
        cli="--remote-loss",
        group="remote",
    )

    remote_draft_price: float = option(
        0.0,
        help="milliseconds of waiting that a drafted token must save, for the energy it takes here (default: 0)",
        low=0.0,
        high=1_000.0,
        cli="--remote-draft-price",
        metavar="MS",
        group="remote",
    )
    remote_kilobyte_price: float = option(
        0.0,
        help="milliseconds of waiting that a kilobyte sent or received must save, for the energy it takes (default: 0)",
        low=0.0,
        high=100_000.0,
        cli="--remote-kilobyte-price",
        metavar="MS",
        group="remote",
    )

    rpc: str | None = option(
        None,
        help="RPC servers of llama.cpp that hold layers of a GGUF model, without encryption or keys (default: none)",
        cli="--rpc",
        metavar="HOST:PORT,...",
        group="remote",
    )
    rpc_public: bool = option(
        False,
        help="allow RPC servers outside this machine and private networks, where anyone can read and change what is "
        "sent (default: no)",
        cli="--rpc-public",
        group="remote",
    )

    @property
    def rpc_servers(self) -> tuple[str, ...]:
        """The servers of `rpc`, each HOST:PORT."""
        return tuple(filter(None, map(str.strip, (self.rpc or "").split(","))))

    def check_rpc(self) -> None:
        """Refuses RPC servers that are none, and those on networks where strangers are.

        Raises:
            UsageError: one of them is.
        """
        if self.rpc is None and self.rpc_public:
            raise UsageError(Setting("rpc_public") + " needs a server.", "Name one with " + Setting("rpc") + ".")
        if self.rpc is not None and not 0 < len(self.rpc_servers) <= _MOST_RPC:
            raise UsageError(f"{self.rpc!r} are no RPC servers.", f"Name 1 to {_MOST_RPC}, as in 192.168.1.20:50052.")
        for server in self.rpc_servers:
            host, _, port = server.rpartition(":")
            if not host or "/" in host or not port.isdecimal() or not 0 < int(port[:6]) < 65_536:
                raise UsageError(f"{server!r} is no RPC server.", "Write it like 192.168.1.20:50052.")
            if not (self.rpc_public or _is_near(host.strip("[]"))):
                message = f"{host} is not on a private network, and llama.cpp's RPC has no keys and no encryption."
                raise UsageError(message, "Use a tunnel, or allow it with " + Setting("rpc_public", True) + ".")

    def refuse_rpc(self, engine: str) -> None:
        """Refuses RPC servers where what runs the model has no use for them.

        Raises:
            UsageError: some are named.
        """
        if self.rpc is not None:
            message = f"{engine} runs this model, which does not divide it between machines."
            raise UsageError(message, "Leave " + Setting("rpc") + " out, or load a GGUF file.")

    def check_remote(self) -> None:
        """Refuses what is no URL, and one by which strangers could read along.

        Raises:
            UsageError: an option has such a value, or needs a server.
        """
        if self.remote is None:
            for name, declared in options_of(RemoteOptions).items():
                if name.startswith("remote") and getattr(self, name) != declared.default:
                    raise UsageError(Setting(name) + " needs a server.", "Name one with " + Setting("remote") + ".")
            return
        parts = _server_address(self.remote)
        if parts is None:
            hint = "Write it like http://192.168.1.20:8080 or https://example.com."
            raise UsageError(f"{self.remote!r} is not the URL of a server.", hint)
        scheme, host = parts
        if scheme == "http" and not _is_near(host):
            message = f"Everyone on the way to {host} could read what is sent by http."
            raise UsageError(message, "Use https, or an address of your own network.")
        if self.remote_key is not None and not (self.remote_key.isascii() and self.remote_key.isprintable()):
            hint = "Copy it again, without line breaks and typographic dashes."
            raise UsageError(Setting("remote_key") + " has characters that no API key has.", hint)


def _server_address(url: str) -> tuple[str, str] | None:
    """Scheme and host of a server's URL; None where it is none."""
    try:
        parts = urlsplit(url)
        named = parts.netloc.rpartition("@")[2]
        if not named.isascii():
            hint = "Write the host in ASCII: its form that begins with xn--, as browsers show it."
            raise UsageError(f"The host of {url!r} has letters outside ASCII.", hint)
        host, port = (parts.hostname or "").encode("idna").decode("ascii"), parts.port
    except ValueError:  # brackets that do not match, a port beyond all, a host that no name server takes
        return None
    is_server = parts.scheme in ("http", "https") and host and port != 0 and not (parts.query or parts.fragment)
    return (parts.scheme, host) if is_server else None


def _is_near(host: str) -> bool:
    """Whether a host is this machine, or of a private network as far as its name tells."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or "." not in host or host.endswith((".local", ".lan", ".home.arpa", ".internal"))
    return address.is_loopback or address.is_private or address.is_link_local


@dataclass(frozen=True)
class RemoteUse:
    """What a reply took of the model that decided it.

    Attributes:
        url: of its server.
        model: its name.
        digest: sha256 of its weights and decoder, in hexadecimal digits.
        rounds: drafts that it verified.
        drafted, accepted: tokens of these drafts, and those of them that it agreed with.
        streamed: tokens that it made without drafts.
        local: tokens at the end that this machine's model made alone, as the server was lost: not the server's text.
        retries: requests that were sent again.
        link_ms: median milliseconds of a round that the way took.
        server_ms: median milliseconds of a round in the server.
    """

    url: str
    model: str
    digest: str
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    streamed: int = 0
    local: int = 0
    retries: int = 0
    link_ms: float = 0.0
    server_ms: float = 0.0
