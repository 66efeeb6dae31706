"""Replies that any server with OpenAI's /v1/completions streams as text; drafts and vocabularies play no part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.core.errors import CapabilityError, RemoteError, Setting, UsageError, shown
from edgeinfer.runtime.remote.contract import Decided, RemoteAccess
from edgeinfer.runtime.remote.http import Connection, RemoteRefusalError, RetriedReply
from edgeinfer.runtime.text.contract import BYTE_LEVEL
from edgeinfer.runtime.text.special_tokens import LiteralEncoder

# Options that these servers have by the same names and meanings; ends of replies are looked after here.
_TAKEN = ("temperature", "top_k", "top_p", "min_p")
_OURS = ("stop_token_ids", "ignore_eos", "parse_special")
_PATH = "/v1/completions"
# Vocabularies of pieces put a blank before a text; not before what follows this.
_BEFORE = "\n"


class OpenAIServer:
    """Implements `contract.RemoteServer` by requests to a server with OpenAI's paths."""

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

    def begin(self, prompt: Sequence[int], options: Mapping[str, Any]) -> OpenAIReply:
        return OpenAIReply(self._access, prompt, {name: options[name] for name in _TAKEN if name in options})


class OpenAIReply(RetriedReply):
    """One reply; `sampling` is empty for greedy text. The server gets the prompt as text, control tokens spelled out,
    and says where the reply ends."""

    verifies = False

    def __init__(self, access: RemoteAccess, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        super().__init__(access, Connection(access))
        self._prompt = list(prompt)
        self._sampling = {"temperature": 0.0, **sampling}
        self._looked = -1  # at the model, when so many requests had been sent again

    def _round(self, reply: Sequence[int], draft: Sequence[int], further: int) -> Iterator[Decided]:
        """A stream, which looks at no draft."""
        if self._looked != self.retries:
            self._look()
            self._looked = self.retries
        yield from self._streamed([*self._prompt, *reply], 1 + further)

    def _look(self) -> None:
        """Find out which model decides."""
        listed = [str(entry["id"]) for entry in self._connection.get("/v1/models")["data"]]
        wanted = self.model or self._access.model
        if not listed or (wanted is not None and wanted not in listed):
            message = f"{self._access.url} has {shown(listed[0]) if listed else 'no model'}, not {shown(wanted)}."
            raise RemoteError(message, "Ask for a model that it has, or let it serve the one that was meant.")
        self.model = wanted or listed[0]

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
