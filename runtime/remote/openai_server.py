"""Replies that any server with OpenAI's /v1/completions streams as text; drafts and vocabularies play no part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgeinfer.errors import RemoteError
from edgeinfer.runtime.remote.contract import Decided
from edgeinfer.runtime.remote.http import RemoteRefusalError
from edgeinfer.runtime.remote.other_engines import OtherEngine, OtherEngineReply
from edgeinfer.runtime.text.contract import BYTE_LEVEL
from edgeinfer.runtime.text.special_tokens import LiteralEncoder

_PATH = "/v1/completions"
# Vocabularies of pieces put a blank before a text; not before what follows this.
_BEFORE = "\n"


class OpenAIReply(OtherEngineReply):
    """One reply. The server gets the prompt as text, control tokens spelled out, and says where the reply ends."""

    @property
    def verifies(self) -> bool:
        """See `contract.RemoteReply.verifies`."""
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
