"""Options of loading: memory, where a model runs, its adapters, and other machines that take part."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args
from urllib.parse import urlsplit

from edgeinfer.core.errors import Setting, UsageError, one_of
from edgeinfer.core.options import (
    LARGEST_COUNT,
    LARGEST_SIZE,
    FlatOptions,
    OptionGroup,
    Range,
    check_options,
    checked_size,
    documented,
    flat_options,
    option,
    options_of,
    parse_size,
    require,
    require_few,
    suggestion,
    without_none,
)
from edgeinfer.core.options.decoding import LoadDrafting, Speculation, check_drafters, draft_option, speculation_option
from edgeinfer.core.records import dataclass

# Bits of a quantized weight, of a float, and what a checkpoint is converted to.
# Bits of weights in the kernel's own formats, and with those of GGUF's types.
BITS, WIDTHS, FLOAT_BITS = (2, 3, 4, 8), (2, 3, 4, 5, 6, 8), 32
CONVERTED_BITS = (*WIDTHS, FLOAT_BITS)
# How the KV cache stores numbers; edgeinfer/bundle/geometry.py describes them.
KvType = Literal["float32", "int8", "int4", "float16", "q8_0", "q4_0"]
ONNX_KV_TYPES: tuple[KvType, ...] = ("float32", "float16", "int8", "int4")
KV_TYPES: tuple[str, ...] = get_args(KvType)
# What happens when a conversation outgrows the context (runtime/kv_cache/context_shift). All but "stop" are lossy.
OverflowPolicy = Literal["stop", "window", "cluster", "auto"]
OVERFLOWS: tuple[str, ...] = get_args(OverflowPolicy)
# Where the weights are while a model runs: packed into memory, mapped from a file, mapped but for experts that wait to
# be chosen, or dropped behind each pass.
WeightsMode = Literal["packed", "mapped", "experts", "streamed"]
WEIGHTS_MODES: tuple[str, ...] = get_args(WeightsMode)
# Which pages count against a budget: all that are resident, or those without a file behind them.
CountedPages = Literal["resident", "anonymous"]
COUNTED: tuple[str, ...] = get_args(CountedPages)
# Where models run; runtime/devices has them, a test holds the two equal.
DEVICES = (
    "cpu", "cuda", "directml", "webgpu", "qnn", "coreml", "openvino", "openvino:NPU", "openvino:GPU", "openvino:CPU",
    "xnnpack",
)  # fmt: skip
# llama.cpp's names of graphics processors, such as Vulkan0, and the interfaces alone, which mean their first one.
_GRAPHICS = re.compile(r"(?:cuda|rocm|vulkan|metal|mtl|sycl)\d{0,3}", re.IGNORECASE)
AUTO = "auto"
# Every pass looks at what all adapters change.
_MOST_ADAPTERS = 64
RemoteLoss = Literal["stop", "local"]
RemoteApi = Literal["edgeinfer", "openai"]
# Options of a reply that choose its tokens, as both sides of /v1/verify have them. The device cuts stop strings and
# counts tokens itself; `logit_bias` is written in another form.
VERIFIED_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
    "seed", "stop_token_ids", "ignore_eos", "choices", "json_schema", "json_object", "regex", "grammar",
    "parse_special",
)  # fmt: skip
# As llama.cpp's GGML_RPC_MAX_SERVERS.
_MOST_RPC = 16

# Declare options under the headings of help.
_resources = partial(option, group="resources")
_remote = partial(option, group="remote")
_prefix_cache = partial(
    _resources,
    0,
    "memory for the KV caches of other conversations, such as 50MB (default: none)",
    0,
    LARGEST_SIZE,
    "SIZE",
    size=True,
    given="int | str",
)


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The KV cache."""

    # Floats are float32, of GGUF models float16; where the budget needs it, float16 and int8, or q8_0.
    kv: KvType | None = _resources(
        None,
        "KV cache data type: float32, float16, int8 or int4, for GGUF models float32, float16, q8_0 or q4_0; 8 and 4 "
        "bits are lossy (default: floats, or 8 bits if memory is short)",
        choices=KV_TYPES,
    )
    overflow: OverflowPolicy = _resources(
        "stop",
        "what to do when a conversation outgrows the context: stop; or drop (window) or merge (cluster) older "
        "tokens, which is lossy; auto takes what edgeinfer tune --cache found (default: stop)",
        choices=OVERFLOWS,
    )


@documented
@dataclass(frozen=True, kw_only=True)
class Cache(CacheOptions, OptionGroup):
    """The KV cache: `edgeinfer.load(cache=Cache(kv="int8", overflow="window"))`."""

    prefix_cache: int | str = _prefix_cache()

    def __post_init__(self) -> None:
        if self.prefix_cache != 0:
            object.__setattr__(self, "prefix_cache", parse_size(self.prefix_cache))
        super().__post_init__()


# The options that decide which engine runs a GGUF file.
ENGINE_OPTIONS = ("backend", "native", "device", "gpu_layers", "rpc", "rpc_public")


@documented
@dataclass(frozen=True, kw_only=True)
class LoadOptions(CacheOptions, LoadDrafting, FlatOptions):
    """How a model is loaded."""

    kind: ClassVar[str] = "load option"
    taken_by: ClassVar[str] = "edgeinfer.load()"

    context: int | None = _resources(
        None,
        "context window for prompt and reply together, in tokens (default: 8192, or less if the model or memory is "
        "smaller)",
        2,
        short="-c",
        basic=True,
        brief="context window in tokens (default: 8192)",
    )
    memory: int | None = _resources(
        None,
        "memory budget for the whole process, such as 600MB or 1.5GiB; options that are left out are chosen for the "
        "highest speed within it (default: none)",
        1,
        LARGEST_SIZE,
        "SIZE",
        basic=True,
        brief="memory budget, such as 600MB or 1.5GiB (default: none)",
        size=True,
        given="int | str",
    )
    # The conversion is kept; without this what is there is taken, or as many as keep the model's predictions.
    bits: int | None = _resources(
        None,
        f"bits per weight when a checkpoint is converted on first use, on average: {one_of(CONVERTED_BITS)} (default: "
        "as many as the model needs, or as fit in memory)",
        2,
        32,
    )
    calibration: bool = _resources(
        True,
        "convert a checkpoint in seconds, without running it over a text to see which weights matter; it takes more "
        "space or loses more",
    )
    threads: int | None = _resources(
        None,
        "number of CPU threads (default: as found by edgeinfer tune, else one per fast core it may use)",
        1,
        1024,
        short="-t",
        basic=True,
        brief="CPU threads (default: one per core)",
    )
    exact: bool = _resources(
        True, "skip the padding that keeps the text the same however it is computed; up to 20% faster on some models"
    )
    prefill_chunk: int | None = _resources(
        None,
        "prompt tokens processed per pass (default: as found by edgeinfer tune, else 64, or fewer if memory is short)",
        1,
    )
    backend: str | None = _resources(
        None, "inference backend: onnx, llamacpp or reference (default: the model's own)", metavar="NAME"
    )
    # None is where it works and the bundle stores its layout; True is always, converting the weights if need be.
    native: bool | None = _resources(
        None,
        "run on the native kernel, or with --no-native on ONNX Runtime's own operators, which are slower (default: the "
        "kernel where it works)",
    )
    speculation: str = speculation_option()
    # Without one, the bundle's own drafts where the budget has room for it.
    draft_model: str | None = draft_option(
        None,
        "draft model, a small model with the same tokenizer: bundle directory, .gguf file or hub id; or off (default: "
        "the one in the bundle, if any)",
        metavar="MODEL",
        given="str | Path",
    )
    weights: WeightsMode | None = _resources(
        None,
        "where the weights are kept: packed in memory, mapped from their file, mapped with experts loaded on demand "
        "(experts), or streamed a few layers at a time (default: the fastest that fits)",
        choices=WEIGHTS_MODES,
    )
    # For models with experts in the native layout.
    expert_memory: int | None = _resources(
        None,
        "memory for the experts of a mixture-of-experts model, such as 200MB (default: all of them, or what fits)",
        1,
        LARGEST_SIZE,
        "SIZE",
        size=True,
        given="int | str",
    )
    counted: CountedPages = _resources(
        "resident",
        "pages that count against the memory budget: all resident pages, or only anonymous ones, which have no file "
        "behind them (default: resident)",
        choices=COUNTED,
    )
    prefix_cache: int = _prefix_cache()
    # No command but `serve` unloads; timers take no more seconds everywhere.
    idle_unload: float | None = option(
        None,
        "unload the model after this many seconds without a request (default: never)",
        0,
        4_000_000,
        "SECONDS",
        above=True,
        cli=False,
    )
    profile: str | None = _resources(
        None,
        "tuned settings: a file written by edgeinfer tune --out, or off (default: those kept for this user)",
        metavar="FILE|off",
        given="str | Path",
    )
    # Memory is planned for these; batches and servers say how many replies there are.
    parallel: int = _resources(1, "number of replies side by side to plan memory for (default: 1)", 1, 1024)
    # Without it memory is planned for them when the first comes, and what was loaded before stays as it is.
    structured: bool = _resources(
        False,
        "plan memory for replies by a schema, an expression or a grammar from the start (default: when one comes)",
    )
    # As Sarathi-Serve's bound on the time between tokens; by default a multiple of what passes take here.
    inter_token_latency: float | None = option(
        None,
        "milliseconds between tokens of replies while the prompt of another is evaluated with them (default: twice as "
        "many as without it)",
        0,
        4_000_000,
        "MS",
        above=True,
        cli=False,
    )
    adapters: Mapping[str, str] = option(
        factory=dict,
        help="folders of LoRA adapters in PEFT's layout that replies may be made with, by name",
        flag="--lora",
        metavar="NAME=PATH",
        group="model",
        given="Mapping[str, str | Path]",
    )
    # Where a device fails, the CPU runs the model.
    device: str = _resources(
        AUTO,
        "device to run on: auto, or one listed by `edgeinfer devices`, such as openvino:NPU, or Vulkan0 for GGUF "
        "models (default: auto)",
        metavar="NAME",
    )
    # None is "auto" where the device is a graphics processor, else 0.
    gpu_layers: int | str | None = _resources(
        None,
        "layers of a GGUF model to run on a graphics processor, the last first: a number, or auto for as many as fit "
        "into its memory (default: none, or auto on such a device)",
        metavar="N|auto",
    )
    remote: str | None = _remote(
        None,
        "URL of a server whose model decides the text while the local one drafts; prompts and replies leave this "
        "machine, and the server's API key is read from EDGEINFER_REMOTE_KEY (default: none)",
        metavar="URL",
    )
    remote_api: RemoteApi | None = _remote(
        None,
        "what the server speaks: edgeinfer, which verifies drafts, or openai, which any server with /v1/completions "
        "speaks and which streams alone (default: as its list of models says)",
        choices=get_args(RemoteApi),
    )
    remote_model: str | None = _remote(
        None, "name of the server's model to ask for (default: the first that it lists)", metavar="NAME"
    )
    # Commands read it from EDGEINFER_REMOTE_KEY: other users of the machine see the arguments of a process.
    remote_key: str | None = option(None, "API key of that server", cli=False)
    remote_digest: str | None = _remote(
        None, "sha256 that the server's model must have, as its first answer says (default: any)", metavar="SHA256"
    )
    remote_loss: RemoteLoss = _remote(
        "stop",
        "what to do when the server cannot be reached any more: stop, or let the local model write the rest (local), "
        "which is lossy (default: stop)",
        choices=get_args(RemoteLoss),
    )
    remote_draft_price: float = _remote(
        0.0,
        "milliseconds of waiting that a drafted token must save, for the energy it takes here (default: 0)",
        0.0,
        1_000.0,
        "MS",
    )
    remote_kilobyte_price: float = _remote(
        0.0,
        "milliseconds of waiting that a kilobyte sent or received must save, for the energy it takes (default: 0)",
        0.0,
        100_000.0,
        "MS",
    )
    rpc: str | None = _remote(
        None,
        "RPC servers of llama.cpp that hold layers of a GGUF model, without encryption or keys (default: none)",
        metavar="HOST:PORT,...",
    )
    rpc_public: bool = _remote(
        False,
        "allow RPC servers outside this machine and private networks, where anyone can read and change what is sent "
        "(default: no)",
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Options as callers write them: sizes also as text, the draft model also as a path."""
        options = flat_options(options, LOAD_GROUPS)
        cls.require_known(options)
        for name in ("memory", "expert_memory"):
            if options.get(name) not in (None, 0):
                options[name] = checked_size(name, options[name])
        if options.get("prefix_cache") not in (None, 0):  # of few tokens of a small model it may be small
            options["prefix_cache"] = parse_size(options["prefix_cache"])
        for name in ("draft_model", "profile"):
            if isinstance(options.get(name), os.PathLike):
                options[name] = os.fspath(options[name])
        return cls(**without_none(options))

    def __post_init__(self) -> None:
        check_options(self)
        self._check_adapters()
        check_drafters(self.speculation)
        fits = self.expert_memory is None or self.weights in (None, "experts")
        require(fits, "expert_memory", self.expert_memory, "left out unless weights is 'experts'")
        self._check_device()
        self._check_remote()
        self._check_rpc()

    def on_device(self, device: str) -> Self:
        """These options with another device; on the CPU all layers run there."""
        return dataclasses.replace(self, device=device, gpu_layers=None if device == "cpu" else self.gpu_layers)

    @property
    def wants_graphics(self) -> bool:
        """Whether a graphics processor is asked for: by its name, or for some layers."""
        return self.gpu_layers not in (None, 0) or is_graphics(self.device)

    @property
    def wants_llamacpp(self) -> bool:
        """Whether only llama.cpp can run a GGUF file as these options ask."""
        return self.backend == "llamacpp" or self.native is False or self.wants_graphics or self.rpc is not None

    @property
    def rpc_servers(self) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, (self.rpc or "").split(","))))

    def refuse_adapters(self, engine: str) -> None:
        if self.adapters:
            message = f"{engine} runs this model, and takes no adapters."
            raise UsageError(message, "Load a bundle where the native kernel works, or leave the adapters out.")

    def refuse_division(self, engine: str) -> None:
        """Refuse to divide the model between processors or machines, which the engine cannot do."""
        for name, among, usual in (("gpu_layers", "processors", (None, 0)), ("rpc", "machines", (None,))):
            if getattr(self, name) not in usual:
                message = f"{engine} runs this model, which does not divide it between {among}."
                raise UsageError(message, "Leave " + Setting(name) + " out, or load a GGUF file.")

    def _check_adapters(self) -> None:
        given = self.adapters
        texts = isinstance(given, Mapping) and all(
            isinstance(name, str) and name and isinstance(path, str | Path) for name, path in given.items()
        )
        require(texts, "adapters", given, "a mapping of names to folders")
        require_few("adapters", list(given), _MOST_ADAPTERS)
        object.__setattr__(self, "adapters", {name: str(path) for name, path in given.items()})

    def _check_device(self) -> None:
        if self.device not in (AUTO, *DEVICES) and not is_graphics(self.device):
            hint = f"{suggestion(self.device, DEVICES)}Choose auto or one of {', '.join(DEVICES)}."
            raise UsageError(f"There is no device {self.device!r}.", hint)
        layers = self.gpu_layers
        if isinstance(layers, str) and layers.isascii() and layers.isdigit():
            layers = int(layers[:10])
        counted = Range(0, LARGEST_COUNT, whole=True, optional=True)
        allowed = layers == AUTO or counted.holds(layers)
        require(allowed, "gpu_layers", self.gpu_layers, f"auto or {counted}")
        object.__setattr__(self, "gpu_layers", layers)
        if self.device == "cpu" and layers not in (None, 0):
            message = "No layers can run on a graphics processor with " + Setting("device", "cpu") + "."
            raise UsageError(message, "Leave one of the two options out.")

    def _check_remote(self) -> None:
        if self.remote is None:
            for name, declared in options_of(LoadOptions).items():
                if name.startswith("remote") and getattr(self, name) != declared.default:
                    raise UsageError(Setting(name) + " needs a server.", "Name one with " + Setting("remote") + ".")
            return
        require(self.overflow == "stop", "overflow", self.overflow, "'stop' where a server decides the text")
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

    def _check_rpc(self) -> None:
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


# Groups of options, by the names under which callers give them.
LOAD_GROUPS: dict[str, type[OptionGroup]] = {"speculation": Speculation, "cache": Cache}


def is_graphics(name: str) -> bool:
    """Whether a device is a graphics processor as llama.cpp names them, such as Vulkan0 or cuda."""
    return _GRAPHICS.fullmatch(name) is not None


def _server_address(url: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(url)
        named = parts.netloc.rpartition("@")[2]
        if not named.isascii():
            hint = "Write the host in ASCII: its form that begins with xn--, as browsers show it."
            raise UsageError(f"The host of {url!r} has letters outside ASCII.", hint)
        host, port = (parts.hostname or "").encode("idna").decode("ascii"), parts.port
    except ValueError:  # unbalanced brackets, a port out of range, or a host that no name server takes
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
