"""What clients of other servers send and expect to be understood: replies that they began, documents of text, no limit
of tokens; and ids that are no tokens, which are refused."""

from __future__ import annotations

from typing import Any

from tests.apps.server.served import MESSAGES, Local, chat_body
from tests.speculation import needs_builtin

pytestmark = needs_builtin

BEGUN = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]


def ok(server: Local, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_reply_that_was_begun_goes_on(server: Local) -> None:
    body = chat_body(messages=BEGUN, max_tokens=8, continue_final_message=True)
    expected = ok(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    asked = {"model": "small", "messages": BEGUN}
    assert ok(server, "/v1/messages", {**asked, "max_tokens": 8})["content"][0]["text"] == expected
    body = {**asked, "options": {"num_predict": 8, "temperature": 0}, "stream": False}
    assert ok(server, "/api/chat", body)["message"]["content"] == expected
    # One that opens the conversation is no beginning of its answer.
    alone = {"messages": BEGUN[-1:], "max_tokens": 1}
    assert ok(server, "/v1/messages", alone)["content"]


def test_a_reply_that_was_begun_has_no_form_of_its_own(server: Local) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"name": "look", "input_schema": schema}
    asked = {"max_tokens": 4, "messages": [*MESSAGES, {"role": "assistant", "content": '{"a":'}]}
    for field, path, body in (
        (
            "output_config.format",
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        ("tool_choice", "/v1/messages", {"tools": [tool], "tool_choice": {"type": "any"}}),
        ("format", "/api/chat", {"format": "json"}),
        ("format", "/api/chat", {"format": schema}),
    ):
        refused = server.post(
            path, {**asked, **body} if path == "/v1/messages" else {**body, "messages": asked["messages"]}
        )
        assert refused.status_code == 400 and f"the form that {field} asks for" in refused.text
    assert ok(server, "/v1/messages", {**asked, "tools": [tool]})["content"]


def test_documents_of_text(server: Local) -> None:
    def counted(*blocks: Any) -> int:
        told = ok(server, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": list(blocks)}]})
        return int(told["input_tokens"])

    question = {"type": "text", "text": "Who is it about?"}
    text = "Tom had a dog."
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": text}]}}
    whole = counted({"type": "text", "text": f"{text}\n\n"}, question)
    assert counted(plain, question) == counted(parts, question) == whole
    assert counted({**plain, "title": "A dog"}, question) > whole
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    refused = server.post("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [pdf]}]})
    assert refused.status_code == 400 and "not text" in refused.text


def test_no_limit_of_tokens(server: Local) -> None:
    without = ok(server, "/v1/chat/completions", {"messages": MESSAGES, "stop": ["."]})
    for field in ("max_tokens", "max_completion_tokens"):
        limited = ok(server, "/v1/chat/completions", {"messages": MESSAGES, "stop": ["."], field: -1})
        assert limited["choices"] == without["choices"]
    for path, value in (("/v1/messages", -1), ("/v1/chat/completions", -1.5)):
        refused = server.post(path, {"messages": MESSAGES, "max_tokens": value})
        assert refused.status_code == 400 and "out of range" in refused.text


def test_ids_that_are_no_tokens_have_no_text(server: Local) -> None:
    refused = server.post("/detokenize", {"tokens": [5, 10**6]})
    assert refused.status_code == 400 and "1000000" in refused.json()["error"]["message"]
