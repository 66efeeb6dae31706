"""A finished request leaves nothing behind, without garbage collection, however it ended."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.generation import TokenStream
from edgeinfer.openai.chat import ChatCompletion
from edgeinfer.openai.text import TextCompletion
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.text.streaming import StopMatcher
from tests.apps.server.served import Local, chat_body
from tests.speculation import needs_builtin
from tests.waiting import wait_until

pytestmark = needs_builtin

# The sampler has the prompt, and completions what the request said.
KINDS = (StopMatcher, ReplyOptions, TokenStream, Sampler, ChatCompletion, TextCompletion)


@contextlib.contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """Weak references to the objects of `KINDS` made during the block, without garbage collection."""
    made: list[weakref.ref[Any]] = []

    def noting(kind: type[Any]) -> Any:
        first = kind.__init__

        def init(self: Any, *arguments: Any, **options: Any) -> None:
            made.append(weakref.ref(self))
            first(self, *arguments, **options)

        return init

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            for kind in KINDS:
                patch.setattr(kind, "__init__", noting(kind))
            yield made
    finally:
        gc.enable()


def check_freed(made: list[weakref.ref[Any]], least: int) -> None:
    def left() -> list[str]:
        return [type(each).__name__ for ref in made if (each := ref()) is not None]

    assert len({id(ref) for ref in made}) >= least
    wait_until(lambda: not left(), "the end of what a request held")


ENDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "an answer": ("/v1/chat/completions", chat_body(max_tokens=4, stop=["zzz"]), 200),
    "a stream": ("/v1/chat/completions", chat_body(max_tokens=4, stop=["zzz"], stream=True), 200),
    "several": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stop": "zzz"}, 200),
    "a round of a reply that is drafted elsewhere": ("/v1/verify", {"prompt": [5, 6], "draft": [7]}, 200),
    "a schema": ("/v1/chat/completions", chat_body(max_tokens=4, response_format={"type": "json_object"}), 200),
    "a wrong field": ("/v1/chat/completions", chat_body(max_tokens=4, stop=["a" * 2000]), 400),
    "a prompt too long": ("/v1/chat/completions", chat_body("dog " * 3000, stop=["zzz"]), 400),
    "a fault on the model's thread": ("/v1/chat/completions", chat_body(stop=["z"], logit_bias={"99999999": 1}), 400),
}


@pytest.mark.every_case
@pytest.mark.parametrize("end", ENDS)
def test_a_request_that_is_over_holds_nothing(server: Local, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, status = ENDS[end]
    # Memories of the first request of a kind are kept.
    server.post(path, body)
    with watched(monkeypatch) as made:
        answer = server.post(path, body)
        assert answer.status_code == status, answer.text
        check_freed(made, 1)


def test_a_request_whose_client_is_gone_holds_nothing(endless: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    body = chat_body(max_tokens=100_000, stream=True, stop=["zzz"])
    with watched(monkeypatch) as made:
        # One that runs, and two that wait for it.
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client())
            for _ in range(3):
                stack.enter_context(client.stream("POST", f"{endless.url}/v1/chat/completions", json=body))
                endless.wait_for("requests_processing", 1)
        endless.wait_for("requests_processing", 0)
        check_freed(made, 3)
