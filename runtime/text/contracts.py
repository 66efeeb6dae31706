"""What a tokenizer does for whoever turns text into tokens and back; knows nothing of how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["MARK", "TokenizerLike"]

# Stands for a special token that was told of apart from the text; no token has this id.
MARK = -1


class TokenizerLike(Protocol):
    """Text to token ids and back, for several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may have more columns."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens marked as special."""

    @property
    def control_texts(self) -> Mapping[str, int]:
        """Texts that `encode` makes a token of only where special tokens are parsed, with that token's id."""

    @property
    def decoder_types(self) -> tuple[str, ...]:
        """Names of the decoding steps in order, such as ("ByteLevel",); empty where tokens are joined by spaces."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: let the tokenizer add its own, such as a beginning-of-text token.
            parse_special: turn special tokens spelled out in the text into their ids, as a rendered template needs.
                False takes them as plain text, as text from strangers needs. Added tokens that the tokenizer does not
                mark as special are parsed either way.

        Raises:
            PromptError: the text holds lone surrogates, so it is not Unicode text.
            TokenizerError: the tokenizer failed.
            BudgetError: there is not enough memory for it.
        """

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        """Token ids of text with special tokens, of which it is known where they are.

        Args:
            parts: every second one is a special token, for which MARK stands in the ids; the others are plain text.

        Raises:
            PromptError, TokenizerError, BudgetError: as `encode`.
        """

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the vocabulary lacks add nothing."""

    def token_to_id(self, text: str) -> int | None:
        """The id of one token as the vocabulary spells it, None where it has no such token."""

    def id_to_token(self, id_: int) -> str | None:
        """The vocabulary's spelling of an id, None where it has no such id."""

    def rest(self) -> None:
        """No text will be encoded for a while: what only encoding needs may leave memory until then."""
