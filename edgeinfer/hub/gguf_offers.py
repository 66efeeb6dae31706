"""The types that a repository of GGUF files offers, with the memory each needs and the one to take here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec

from edgeinfer.bundle.names import quantization_of, stem_of
from edgeinfer.config import format_size
from edgeinfer.errors import BudgetError, HubError, UsageError
from edgeinfer.hub.cache import gguf_name
from edgeinfer.hub.download import Repository, look_up
from edgeinfer.hub.estimate import gguf_memory, room
from edgeinfer.hub.ids import first_part, is_gguf_model, parse_name
from edgeinfer.records import dataclass

# The type that is taken where it fits: beyond it text hardly improves, and every token takes longer. Makers of GGUF
# files and llama.cpp take the same. Types behind it stand in for it where a repository has none, best first.
_USUAL = (
    "Q4_K_M",
    "UD-Q4_K_XL",
    "Q4_K_S",
    "Q4_0",
    "IQ4_NL",
    "IQ4_XS",
    "Q4_1",
    "MXFP4",
    "MXFP4_MOE",
    "Q5_K_M",
    "Q5_K_S",
)


@dataclass(frozen=True)
class Offer:
    """One GGUF model of a repository.

    Attributes:
        name: what loads it, ORG/NAME:TYPE.
        type: by llama.cpp's name; "" where the name of the file says none.
        bytes: of its files; 0 where the hub does not tell.
        memory: bytes that running it takes, by the size of its files.
        fits: whether this machine, or the budget asked about, has that much.
        recommended: whether it is the one to take.
    """

    name: str
    type: str
    bytes: int
    memory: int
    fits: bool
    recommended: bool = False


def offers(name: str, *, memory: int | None = None) -> list[Offer]:
    """The types of a repository of GGUF files, smallest first.

    Args:
        name: ORG/NAME.
        memory: budget in bytes; None is what this machine has.

    Raises:
        HubError: as `edgeinfer.pull`, or the repository holds no GGUF files.
    """
    parsed = parse_name(name)
    if parsed is None:
        raise HubError(f"{name!r} is not a Hugging Face id.", "Write it as OWNER/NAME.")
    found = look_up(parsed.repo_id)
    if found.kind != "gguf":
        raise HubError(f"{parsed.repo_id} contains a {found.kind}, not GGUF files.", "Load it by this name.")
    return offers_in(found, memory)


def offers_in(repository: Repository, memory: int | None = None) -> list[Offer]:
    """As `offers`, of a repository that was looked up."""
    models = _models(repository.sizes)
    limit = room(memory)
    found = []
    for first, size in models.items():
        needed = gguf_memory(size)
        tag = quantization_of(first) or ""
        found.append(Offer(gguf_name(repository.repo_id, first, list(models)), tag, size, needed, needed <= limit))
    found.sort(key=lambda offer: (offer.bytes, offer.name))
    best = _best(found)
    return [offer if offer is not best else _recommended(offer) for offer in found]


def best_offer(repository: Repository, memory: int | None = None) -> Offer:
    """The type to take: Q4_K_M or its like where that fits, else the largest that does."""
    found = offers_in(repository, memory)
    for offer in found:
        if offer.recommended:
            return offer
    smallest = found[0]
    message = f"No type of {repository.repo_id} fits into {format_size(room(memory))} of memory."
    hint = f"The smallest, {smallest.name}, needs about {format_size(smallest.memory)}; name it to run it all the same."
    raise BudgetError(message, hint, minimum_bytes=smallest.memory)


def require_gguf(name: str) -> None:
    """Refuses a GGUF file before it is fetched where nothing here could run it."""
    if find_spec("llama_cpp") is None:
        raise UsageError(f"{name} is a GGUF file, which llama.cpp runs.", "Install it: pip install 'edgeinfer[gguf]'")


def _models(sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each model with all its parts, by its first file."""
    names = sorted(filter(is_gguf_model, sizes))
    return {
        first: sum(sizes[name] for name in names if stem_of(name) == stem_of(first))
        for first in names
        if first_part(first)
    }


def _best(found: Iterable[Offer]) -> Offer | None:
    fitting = [offer for offer in found if offer.fits]
    for kind in _USUAL:
        for offer in fitting:
            if offer.type == kind:
                return offer
    quantized = [offer for offer in fitting if offer.type not in ("F16", "BF16", "F32")]
    return max(quantized or fitting, key=lambda offer: offer.bytes, default=None)


def _recommended(offer: Offer) -> Offer:
    return Offer(offer.name, offer.type, offer.bytes, offer.memory, offer.fits, recommended=True)
