"""Replies that any server with OpenAI's /v1/completions streams as text; drafts and vocabularies play no part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from edgeinfer.core.errors import CapabilityError, RemoteError, Setting, UsageError, shown
from edgeinfer.runtime.remote.contract import Decided, RemoteAccess
from edgeinfer.runtime.remote.http import Connection, RemoteRefusalError, RetriedReply
from edgeinfer.runtime.text.contract import BYTE_LEVEL, TokenizerLike
from edgeinfer.runtime.text.special_tokens import LiteralEncoder

# Options that these engines have by the same names and meanings; ends of replies are looked after here.
_TAKEN = ("temperature", "top_k", "top_p", "min_p")
_OURS = ("stop_token_ids", "ignore_eos", "parse_special")
# Spelled differently by about any two vocabularies.
PROBE = "Zwölf 0x7f4a naïve foxes_jumped  over\n\tthe lazy dog; 我们 2026-11-26 — don't unbelievably."


class OtherEngine:
    """Implements `contract.RemoteServer` for one of these engines."""

    reply: ClassVar[type[OtherEngineReply]]

    def __init__(self, access: RemoteAccess) -> None:
        if access.digest is not None:
            message = "Only edgeinfer servers tell the digest of their model."
            raise CapabilityError(message, "Leave out " + Setting("remote_digest") + ".")
        self._access = access
        self.url = access.url

    def check(self, options: Mapping[str, Any]) -> None:
        drawn = options.get("temperature", 0.0) > 0
        for name, value in options.items():
            if name in (*_TAKEN, *_OURS) or (name == "seed" and not drawn):
                continue
            message = Setting(name, value) + " is for replies that an edgeinfer server decides, or this model."
            raise UsageError(message, "Leave it out.")

    def begin(self, prompt: Sequence[int], options: Mapping[str, Any]) -> OtherEngineReply:
        return self.reply(self._access, prompt, {name: options[name] for name in _TAKEN if name in options})


class OtherEngineReply(RetriedReply):
    """Implements `contract.RemoteReply` for one of these engines; `sampling` is empty for greedy text."""

    def __init__(self, access: RemoteAccess, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        super().__init__(access, Connection(access))
        self._prompt = list(prompt)
        self._sampling = {"temperature": 0.0, **sampling}
        self._looked = -1  # at the model, when so many requests had been sent again

    @property
    def verifies(self) -> bool:
        """Only greedy text: for sampled text these engines' choice is unknown."""
        return not self._sampling["temperature"]

    def _round(self, reply: Sequence[int], draft: Sequence[int], further: int) -> Iterator[Decided]:
        """A round, or a stream, which looks at no draft."""
        if self._looked != self.retries:
            self._look()
            self._looked = self.retries
        text = [*self._prompt, *reply]
        if further or not self.verifies:
            yield from self._streamed(text, 1 + further)
        else:
            tokens, server_ms = self._verified(text, draft)
            yield Decided(tokens, server_ms=server_ms)

    def _look(self) -> None:
        """Find out which model decides, and check its vocabulary."""
        listed = [str(entry["id"]) for entry in self._connection.get("/v1/models")["data"]]
        wanted = self.model or self._access.model
        if not listed or (wanted is not None and wanted not in listed):
            message = f"{self._access.url} has {shown(listed[0]) if listed else 'no model'}, not {shown(wanted)}."
            raise RemoteError(message, "Ask for a model that it has, or let it serve the one that was meant.")
        self.model = wanted or listed[0]
        if self._looked < 0:
            self._check_vocabulary()

    def _check_vocabulary(self) -> None:
        """Refuses a model whose tokens are others than those of drafts."""
        if not spells_alike(self._access.tokenizer, self._spelled(PROBE)):
            message = f"The tokens of {shown(self.model)} are not those that drafts are made of."
            raise RemoteError(message, "Draft with a model of the same family.")

    def _spelled(self, text: str) -> Sequence[int]:
        """The server's token ids of a text, with or without those that begin texts."""
        raise NotImplementedError

    def _verified(self, text: Sequence[int], draft: Sequence[int]) -> tuple[tuple[int, ...], float]:
        """The tokens that a greedy round decides, and the milliseconds in the server, 0 where it tells none."""
        raise NotImplementedError

    def _streamed(self, text: Sequence[int], tokens: int) -> Iterator[Decided]:
        """The next tokens, as they come."""
        raise NotImplementedError


def spells_alike(tokenizer: TokenizerLike, ids: Sequence[int]) -> bool:
    """Whether a server's tokens of PROBE are ours, but for those that begin texts."""
    ours = tokenizer.encode(PROBE, add_special_tokens=False)
    return list(ids[-len(ours) :]) == ours


def decided_greedily(likeliest: Sequence[int], draft: Sequence[int], beyond: int) -> tuple[int, ...]:
    """The tokens of a draft that are the likeliest, and the one that follows them."""
    for place, (best, token) in enumerate(zip(likeliest, draft, strict=True)):
        if best != token:
            return (*draft[:place], best)
    return (*draft, beyond)


_PATH = "/v1/completions"
# Vocabularies of pieces put a blank before a text; not before what follows this.
_BEFORE = "\n"


class OpenAIReply(OtherEngineReply):
    """One reply. The server gets the prompt as text, control tokens spelled out, and says where the reply ends."""

    @property
    def verifies(self) -> bool:
        return False

    def _check_vocabulary(self) -> None:
        """Nothing: texts are compared with none."""

    def _streamed(self, text: Sequence[int], tokens: int) -> Iterator[Decided]:
        tokenizer, begin = self._access.tokenizer, self._access.begin_ids
        # The server begins texts as this tokenizer does.
        added = tuple(tokenizer.encode("a")[: len(begin)]) == begin
        bare = text[len(begin) :] if added and tuple(text[: len(begin)]) == begin else text
        prompt = tokenizer.decode(bare, skip_special_tokens=False)
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, **self._sampling, "stream": True}
        left, encoder = tokens, LiteralEncoder(tokenizer, self._access.end_ids)
        before = "" if tokenizer.decoder_types == BYTE_LEVEL else _BEFORE
        skipped = len(encoder.literal(before)) if before else 0
        for event in self._connection.events(_PATH, body):
            for choice in event["choices"]:
                # What a stranger writes becomes no control token.
                new = encoder.literal(before + str(choice.get("text") or ""))[skipped:]
                if choice.get("finish_reason") == "stop" and self._access.end_ids:
                    new.append(min(self._access.end_ids))
                new = new[:left]
                left -= len(new)
                if new:
                    yield Decided(tuple(new), last=False)
            if left == 0:
                break
        yield Decided(())

    def _refused(self, error: RemoteRefusalError) -> RemoteError:
        if error.status in (404, 405):
            message = f"There is no {_PATH} on {self._access.url}."
            return RemoteError(message, "Chats alone are not enough: it takes a server that completes texts.")
        return super()._refused(error)


class OpenAIServer(OtherEngine):
    """Implements `contract.RemoteServer` by requests to a server with OpenAI's paths."""

    reply = OpenAIReply
