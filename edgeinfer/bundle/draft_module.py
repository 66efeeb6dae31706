"""How a draft module reads its target: EAGLE heads and modules for multi-token prediction, nested in a target's bundle.

A module is a decoder of one layer or a few. Its row for a token reads that token's embedding, and the state from which
the target, or the module itself in the row before, predicted it; or its rows are a block that is drafted at once.
Embedding and head may be the target's own, whose bytes are read where the target's bundle has them.
"""

from __future__ import annotations

from edgeinfer.bundle.geometry import require_described as _require
from edgeinfer.records import dataclass

# Rows of the target that wait for their module at most, and have memory planned.
WAITING_ROWS = 64
# Rows of a block at most: published drafters have 8 to 16.
MOST_BLOCK = 64
# Heads behind a prefix layer, of which published modules have 4, and layers of each.
MOST_DRAFT_HEADS, MOST_HEAD_LAYERS = 8, 8

# What a module can read in its target's bundle.
_SHARED = ("embed", "head")


@dataclass(frozen=True)
class DraftModule:
    """What a draft module has beside its decoder.

    Attributes:
        width: W, of what it reads of each of the target's rows: the states of all tapped layers, or the last state.
        drafter: name of the drafter that it is for.
        vocab_size: tokens that it can draft; 0 is all of the target's.
        shares: tensors that lie in the target's bundle, of "embed" and "head".
        beside: the first layer's attention reads normed embedding and normed state side by side, the state being a
            product of what is read of the target (EAGLE-3); otherwise a product of both enters the first layer.
        residual_normed: what the first layer adds to is the normed state (EAGLE-3's norm_before_residual).
        taps_normed: what is read of the target is normed before that product (EAGLE-3's norm_before_fc).
        parts_normed: embedding and state are normed before their product (MTP).
        first_normed: what enters the first layer's attention is normed (all but EAGLE-1).
        last_normed: the head reads normed states (all but EAGLE-1).
        state_normed: the state of the target is read as its head reads it: through its final norm.
        feeds_normed: so is the module's own, through the module's (Qwen's MTP).
        block: rows of a block that is drafted at once: the last token, then masks that see each other and the text,
            whose rows are keys and values alone, made of a normed product of what is read of the target (DFlash); 0
            where tokens are drafted one by one.
        mask: the token of the masks.
        embed_scale: what multiplies the rows of the target's stored embedding that a block's tokens and heads read.
        causal: layers in which a row of a block sees none of those behind it.
        heads: one for each token of a draft, over what the layer gives of the target's normed states alone (Hydra++); 0
            where the layers draft.
        head_layers: of each head.
    """

    width: int
    drafter: str
    vocab_size: int = 0
    shares: tuple[str, ...] = ()
    beside: bool = False
    residual_normed: bool = False
    taps_normed: bool = False
    parts_normed: bool = False
    first_normed: bool = True
    last_normed: bool = True
    state_normed: bool = False
    feeds_normed: bool = False
    block: int = 0
    mask: int = 0
    embed_scale: float = 1.0
    causal: tuple[int, ...] = ()
    heads: int = 0
    head_layers: int = 1

    def __post_init__(self) -> None:
        _require(self.width > 0 and self.vocab_size >= 0, "a draft module reads states")
        _require(all(name in _SHARED for name in self.shares), f"a draft module shares {self.shares}")
        _require(self.first_normed or not self.beside, "a draft module that reads side by side norms what it reads")
        _require(self.block == 0 or 2 <= self.block <= MOST_BLOCK, f"a block has from 2 to {MOST_BLOCK} rows")
        _require(self.mask >= 0, "a mask is a token")
        _require(self.embed_scale > 0, f"embeddings are multiplied by {self.embed_scale}")
        _require(all(layer >= 0 for layer in self.causal), f"layers are numbered from 0, not as {self.causal}")
        heads, layers = self.heads, self.head_layers
        _require(0 <= heads <= MOST_DRAFT_HEADS, f"a draft module has up to {MOST_DRAFT_HEADS} heads, not {heads}")
        _require(1 <= layers <= MOST_HEAD_LAYERS, f"a head has from 1 to {MOST_HEAD_LAYERS} layers, not {layers}")
        _require(not (heads and self.block), "a draft module has heads or blocks")
