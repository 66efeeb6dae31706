"""Models to choose from: the catalog, the hub's search, and the memory that a model of given sizes needs."""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from edgeinfer.core.errors import UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.hub.cache import Kind
from edgeinfer.hub.client import hub_errors, library
from edgeinfer.hub.ids import AUTO, Bits, HubName, parse_name
from edgeinfer.runtime.system.machine import machine_memory

# Python, its libraries and the activations of a pass, as `edgeinfer plan` counts them for models of 0.1 to 8 billion
# parameters.
_PROCESS_BYTES = 200_000_000
# The smallest context that is planned for, and bytes of a cached float: loading plans a longer context if it can.
_CONTEXT, _KV_BYTES = 2048, 4
_GGUF_KV_BYTES = 2
# Bits of scale and zero point for each weight where all linear layers have the same 8, in groups of 128.
_EXTRA_BITS = 0.25
# Bits a weight of models that were converted to as many as they need, by parameters: small ones need more. SmolLM2-135M
# has 5.5 to 5.9; the others are guesses on the safe side.
_NEEDED_BITS = ((2e8, 5.9), (4e8, 5.8), (1e9, 5.2), (2e9, 4.9), (math.inf, 4.7))
# The share of a machine's memory that other programs and the system leave.
_SHARE = 0.75


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder by which its memory is estimated, by the names of Hugging Face's config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    experts: int = 0  # of each layer; 0 without a mixture
    shared: int = 0  # width of the MLP that every token uses next to the experts
    cached_layers: int = 0  # that have keys and values of their own; 0 is all, others are recurrent or share them
    total: int = 0  # parameters, where layers differ; 0 where the other sizes give them

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DecoderSizes:
        """The sizes in a config.json whose architecture is supported."""

        def number(*names: str, default: int | None = None) -> int:
            value = next((config[name] for name in names if config.get(name) is not None), default)
            if value is None:
                raise KeyError(names[0])
            return int(value)

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        experts = number("num_local_experts", "num_experts", default=0)
        return cls(
            hidden_size=hidden,
            intermediate_size=number(*(("moe_intermediate_size",) if experts else ()), "intermediate_size"),
            num_hidden_layers=number("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=number("num_key_value_heads", default=heads),
            head_dim=number("head_dim", default=hidden // heads),
            vocab_size=number("vocab_size"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            shared=number("shared_expert_intermediate_size", default=0),
        )

    @property
    def parameters(self) -> int:
        """Parameters of all matrices; norms and biases are left out."""
        if self.total:
            return self.total
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        mlp = 3 * self.hidden_size * (self.intermediate_size * max(self.experts, 1) + self.shared)
        router = self.hidden_size * self.experts
        layer = self.hidden_size * self.head_dim * heads + mlp + router
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return layer * self.num_hidden_layers + vocabulary

    def weight_bytes(self, bits: Bits = AUTO) -> int:
        """Bytes of the converted weights; fewer bits than 8 are an average that has everything in it."""
        if bits == AUTO:
            stored = next(needed for most, needed in _NEEDED_BITS if self.parameters <= most)
        else:
            stored = bits + (_EXTRA_BITS if bits == 8 else 0)
        return round(self.parameters * stored / 8)

    def kv_bytes(self, context: int = _CONTEXT) -> int:
        layers = self.cached_layers or self.num_hidden_layers
        return 2 * layers * self.num_key_value_heads * self.head_dim * _KV_BYTES * context

    def memory(self, bits: Bits = AUTO) -> int:
        """Bytes that running the converted model takes: weights, a cache for 2048 tokens, and the process."""
        return self.weight_bytes(bits) + self.kv_bytes() + _PROCESS_BYTES


def gguf_memory(file_bytes: int, sizes: DecoderSizes | None = None) -> int:
    """Bytes that running a GGUF file takes: it, a cache for 2048 tokens (a tenth without `sizes`), and the process."""
    kv = file_bytes // 10 if sizes is None else sizes.kv_bytes() * _GGUF_KV_BYTES // _KV_BYTES
    return file_bytes + kv + _PROCESS_BYTES


def room(memory: int | None = None) -> int:
    """Bytes that a model may take: the budget, or three quarters of what this machine has."""
    return round(machine_memory() * _SHARE) if memory is None else memory


@dataclass(frozen=True)
class Package:
    """A wheel of the package index that holds a GGUF file."""

    requirement: str  # with its version, NAME==VERSION
    file: str  # path of the GGUF file within the wheel
    sha256: str  # of the file
    bytes: int  # of the file


@dataclass(frozen=True)
class CatalogModel:
    """A model that edgeinfer recommends.

    Attributes:
        name: short; loads it wherever a model is asked for.
        repo: on the hub, ORG/NAME, of a GGUF file ORG/NAME:TYPE.
        purpose: what it is good for, in a line.
        licence: by its SPDX name where it has one.
        languages: that its makers name, by ISO 639 where they have a code.
        context: tokens it was made for at most.
        sizes: of its decoder.
        kind: "text" for one that writes, "embedder" or "reranker" for those of `edgeinfer embed`.
        stored_bits: of a weight of its checkpoint.
        file_bytes: of its GGUF file on the hub; 0 where that has a checkpoint, which is converted on this machine.
        package: of the package index, which holds it as a GGUF file; None where the hub alone has it.
    """

    name: str
    repo: str
    purpose: str
    parameters: int
    licence: str
    languages: tuple[str, ...]
    context: int
    sizes: DecoderSizes
    kind: Literal["text", "embedder", "reranker"] = "text"
    stored_bits: int = 16
    file_bytes: int = 0
    package: Package | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether it is fetched as a GGUF file, which has its bits."""
        return self._gguf_bytes > 0

    @property
    def _gguf_bytes(self) -> int:
        return self.file_bytes if self.package is None else self.package.bytes

    @property
    def memory(self) -> int:
        """Bytes that running it takes with a context of 2048 tokens, an estimate where it is converted."""
        return gguf_memory(self._gguf_bytes, self.sizes) if self.is_gguf else self.sizes.memory()

    @property
    def download(self) -> int:
        """Bytes that are fetched."""
        return self._gguf_bytes or self.stored_bits // 8 * self.parameters

    @property
    def disk(self) -> int:
        """Bytes of the model that runs."""
        return self._gguf_bytes or self.sizes.weight_bytes()

    @property
    def hub_name(self) -> HubName:
        """The repository, and the type of its GGUF file."""
        parsed = parse_name(self.repo)
        assert parsed is not None, "a test reads the data"
        return parsed


@functools.cache
def catalog() -> tuple[CatalogModel, ...]:
    """Good models for devices, each of which runs by its name: `edgeinfer chat -m qwen2.5-0.5b`."""
    text = importlib.resources.files("edgeinfer.hub").joinpath("catalog.json").read_text("utf-8")
    return tuple(_read(entry) for entry in json.loads(text))


def catalog_model(name: str) -> CatalogModel | None:
    """The model of that short name, however it is capitalized; None where there is none."""
    return next((model for model in catalog() if model.name == name.strip().lower()), None)


def similar_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """The catalog's and other names that a mistyped name may mean, the likeliest first."""
    import difflib

    wanted = name.strip().lower()
    known = {model.name: model.name for model in catalog()} | {other.lower(): other for other in others}
    starting = sorted(known[each] for each in known if wanted and each.startswith(wanted))
    return list(dict.fromkeys([*starting, *(known[m] for m in difflib.get_close_matches(wanted, known, 3, 0.6))]))[:3]


def _read(entry: dict[str, Any]) -> CatalogModel:
    package = entry.get("package")
    fields = {
        **entry,
        "languages": tuple(entry["languages"]),
        "sizes": DecoderSizes(**entry["sizes"]),
        "package": None if package is None else Package(**package),
    }
    return CatalogModel(**fields)


# Model classes that edgeinfer.export builds; a test holds the two equal.
_CAUSAL = """
Afmoe Apertus Arcee Bamba BitNet Cohere2 Cohere2Moe Cohere DeepseekV2 DeepseekV3 Dots1 Ernie4_5 Ernie4_5_Moe Exaone4
FalconH1 FlexOlmo Gemma2 Gemma3 Gemma3n Gemma4 Gemma Glm4 Glm4Moe Glm4MoeLite Glm Gemma4Unified GptOss Granite
GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA Helium HunYuanDenseV1 HunYuanMoEV1 InternLM3
Lfm2 Lfm2Moe Lfm3 Llama Mamba2 Mellum MiniCPM3 MiniCPM MiniMaxM2 Ministral3 Ministral Mistral4 Mistral Mixtral
Nemotron NemotronH Olmo2 Olmo3 Olmoe Phi3 Phi PhiMoE Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe
SeedOss SmolLM3 StableLm Starcoder2 VaultGemma Youtu
"""
_CONDITIONAL = "Gemma3 Gemma3n Gemma4 Gemma4Unified Mistral3 Qwen2VL Qwen2_5_VL Qwen3VL Qwen3_5 Qwen3_5Moe"
CONVERTED = (
    *(f"{family}ForCausalLM" for family in _CAUSAL.split()),
    *(f"{family}ForConditionalGeneration" for family in _CONDITIONAL.split()),
)
# Architectures of GGUF files whose caches cannot be cut back, as those of recurrent layers.
_GGUF_REFUSED = frozenset(
    (
        *("falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "nemotron_h"),
        *("nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    )
)
# Results of the hub that are looked through for each model that runs.
_LOOKED_THROUGH = 10
_MOST = 100


@dataclass(frozen=True)
class FoundModel:
    """A model of the hub that a search found.

    Attributes:
        name: what loads it, ORG/NAME.
        kind: a checkpoint is converted when it is first loaded; of GGUF files a type is chosen.
        parameters: 0 where the hub does not tell.
        downloads: in the last month.
        licence: as the hub names it; "" where none is given.
        gated: whether its terms have to be accepted on the hub first.
    """

    name: str
    kind: Kind
    parameters: int
    downloads: int
    licence: str
    gated: bool


def search_hub(text: str, limit: int = 20) -> list[FoundModel]:
    """Finds text models that edgeinfer can run, the most downloaded first.

    Args:
        text: words of the name.
        limit: models at most, up to 100.

    Raises:
        HubError: the hub cannot be reached or refuses.
        UsageError: there is nothing to search for.
    """
    if not text.strip() or len(text) > 200:
        raise UsageError("The search is empty.", "Type part of a model's name, such as qwen3.")
    if not 1 <= limit <= _MOST:
        raise UsageError(f"limit={limit} is out of range.", f"Choose 1 to {_MOST}.")
    expand = ["config", "downloads", "gated", "gguf", "safetensors", "tags"]
    options: dict[str, Any] = {"search": text.strip(), "sort": "downloads", "limit": limit * _LOOKED_THROUGH}
    with hub_errors(text.strip()):
        listed = library().HfApi().list_models(**options, expand=expand)
        return list(itertools.islice(_running(listed), limit))


def _running(listed: Any) -> Iterator[FoundModel]:
    for info in listed:
        kind, parameters = _kind(info)
        if kind is None:
            continue
        licences = [tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")]
        yield FoundModel(
            name=info.id,
            kind=kind,
            parameters=parameters,
            downloads=int(info.downloads or 0),
            licence=licences[0] if licences else "",
            gated=bool(getattr(info, "gated", False)),
        )


def _kind(info: Any) -> tuple[Kind | None, int]:
    """The kind of a repository, None where nothing in it runs, and its parameters."""
    tags = set(info.tags or ())
    gguf = getattr(info, "gguf", None)
    if gguf or "gguf" in tags:
        data = gguf if isinstance(gguf, dict) else {}
        refused = data.get("architecture") in _GGUF_REFUSED
        return (None if refused else "gguf"), int(data.get("total") or 0)
    config = info.config if isinstance(info.config, dict) else {}
    classes = config.get("architectures") or []
    weights = getattr(info, "safetensors", None)
    # Quantized checkpoints cannot be converted.
    if weights is None or "quantization_config" in config or not set(classes) & set(CONVERTED):
        return None, 0
    total = weights.get("total") if isinstance(weights, dict) else getattr(weights, "total", 0)
    return "checkpoint", int(total or 0)
