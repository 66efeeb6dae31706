"""Rounds that an SGLang server decides, by its /generate: greedy text is verified, drawn text is streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgeinfer.runtime.remote.contract import Decided
from edgeinfer.runtime.remote.http import tokens_in
from edgeinfer.runtime.remote.openai_server import OtherEngine, OtherEngineReply, decided_greedily

_PATH = "/generate"


class SGLangReply(OtherEngineReply):
    """One reply; fields as https://docs.sglang.io/basic_usage/sampling_params.html has them."""

    def _spelled(self, text: str) -> Sequence[int]:
        """As the log-probabilities of a prompt name its tokens."""
        body = {"text": text, "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 0, "return_logprob": True}
        return [entry[1] for entry in self._connection.post(_PATH, body)["meta_info"]["input_token_logprobs"]]

    def _verified(self, text: Sequence[int], draft: Sequence[int]) -> tuple[tuple[int, ...], float]:
        body = self._body([*text, *draft], 1)
        if draft:
            # The cache of a prefix has no logits, so the first token that is scored has none before it: one earlier.
            body |= {"return_logprob": True, "logprob_start_len": len(text) - 1, "top_logprobs_num": 1}
        answer = self._connection.post(_PATH, body)
        meta, (beyond,) = answer["meta_info"], tokens_in(answer["output_ids"])
        likeliest: tuple[int, ...] = ()
        if draft:
            scored = meta["input_token_logprobs"][-len(draft) :]
            if [entry[1] for entry in scored] != list(draft):
                raise ValueError("other tokens than those of the draft were scored")
            likeliest = tokens_in([entries[0][1] for entries in meta["input_top_logprobs"][-len(draft) :]])
        return decided_greedily(likeliest, draft, beyond), float(meta.get("e2e_latency") or 0.0) * 1e3

    def _streamed(self, text: Sequence[int], tokens: int) -> Iterator[Decided]:
        seen = 0
        for event in self._connection.events(_PATH, self._body(text, tokens) | {"stream": True}):
            ids, total = tokens_in(event["output_ids"]), event["meta_info"]["completion_tokens"]
            # All so far, unless the server was started with --incremental-streaming-output.
            new = ids[seen:] if len(ids) == total else ids
            seen += len(new)
            if new:
                yield Decided(new, last=False)
        yield Decided(())

    def _body(self, ids: Sequence[int], tokens: int) -> dict[str, Any]:
        # Ends of the text are looked for here: which tokens end it is the drafting model's to say.
        sampling = {**self._sampling, "max_new_tokens": tokens, "ignore_eos": True}
        return {"input_ids": list(ids), "sampling_params": sampling}


class SGLangServer(OtherEngine):
    """Implements `contract.RemoteServer` by requests to SGLang."""

    reply = SGLangReply
