"""Requests in the shape of those that agents and chat clients send, by client; the words are our own."""

from __future__ import annotations

from typing import Any

_SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "file_path": {"type": "string", "description": "Path of the file."},
        "offset": {"type": ["integer", "null"], "minimum": 0},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    },
    "required": ["file_path"],
    "additionalProperties": False,
}
_SYSTEM, _ASK = "You are a coding agent. Answer briefly.", "Which tests are there?"
_SAY = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _ASK}]
_TOOL = {"type": "function", "function": {"name": "read_file", "description": "Reads a file.", "parameters": _SCHEMA}}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"file_path": "a.py"}'}}
_TURN = [
    *_SAY,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "import pytest"},
]
_CACHED = {"type": "ephemeral"}
_CLAUDE_CODE: dict[str, Any] = {
    "model": "small",
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
    "system": [
        {"type": "text", "text": "You are an agent.", "cache_control": _CACHED},
        {"type": "text", "text": _SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>The folder has no notes.</system-reminder>"},
                {"type": "text", "text": _ASK, "cache_control": _CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look first.", "signature": "QQ=="},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"file_path": "/b.py"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "import pytest", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "No such file."}],
                    "is_error": True,
                    "cache_control": _CACHED,
                },
            ],
        },
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": _SCHEMA},
        {"name": "TodoWrite", "description": "Keeps a list.", "input_schema": {"type": "object", "properties": {}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "tool_choice": {"type": "auto"},
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}
_CODEX: dict[str, Any] = {
    "model": "small",
    "instructions": _SYSTEM,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before writing."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _ASK}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "QQ=="},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output": "a.py", "metadata": {}}'},
        {"type": "local_shell_call", "call_id": "call_2", "status": "completed", "action": {"type": "exec"}},
        {"type": "function_call_output", "call_id": "call_2", "output": "done"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_3", "name": "apply_patch", "input": "*"},
        {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Done."},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "pytest"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks."}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": _SCHEMA},
        {
            "type": "function",
            "name": "update_plan",
            "strict": False,
            "parameters": {"type": "object", "properties": {}},
        },
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198-1",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x": "y"},
}
_FORM = {"type": "json_schema", "json_schema": {"name": "Answer", "strict": True, "schema": _SCHEMA}}
_USAGE = {"include_usage": True}


def _ask(path: str, **body: Any) -> tuple[str, dict[str, Any]]:
    return path, body


def _chat(**body: Any) -> tuple[str, dict[str, Any]]:
    return _ask("/v1/chat/completions", model="small", **body)


# By client, the path and the body.
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": ("/v1/messages", _CLAUDE_CODE),
    "Claude Code, title": _ask(
        "/v1/messages",
        model="small",
        max_tokens=512,
        system=[{"type": "text", "text": "Name the conversation."}],
        messages=[{"role": "user", "content": _ASK}],
        tools=[],
        temperature=1,
        stream=False,
        output_config={
            "format": {
                "type": "json_schema",
                "schema": {
                    "type": "object",
                    "properties": {"title": {"enum": ["Tests"]}},
                    "required": ["title"],
                    "additionalProperties": False,
                },
            }
        },
        metadata={"user_id": "x"},
    ),
    "Codex": ("/v1/responses", _CODEX),
    "aider": _chat(messages=_SAY, temperature=0, stream=True, stream_options=_USAGE),
    "Continue": _chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": _ASK}]}],
        max_tokens=4096,
        temperature=0.5,
        top_p=1,
        stop=["\n\n"],
        stream=True,
        tools=[_TOOL],
        parallel_tool_calls=False,
    ),
    "Continue, Ollama": _ask(
        "/api/chat",
        model="small",
        messages=[{"role": "user", "content": _ASK, "images": None}],
        options={"num_ctx": 8192, "num_predict": 2048, "temperature": 0.1, "stop": [], "keep_alive": 1800},
        keep_alive=1800,
        stream=False,
    ),
    "Cline": _chat(
        messages=[*_TURN, {"role": "user", "content": [{"type": "text", "text": "<task>Go on.</task>"}]}],
        temperature=0,
        stream=True,
        stream_options=_USAGE,
        reasoning_effort=None,
        tools=[_TOOL],
        tool_choice="auto",
    ),
    "Roo Code, Anthropic": _ask(
        "/v1/messages",
        model="small",
        max_tokens=8192,
        temperature=0,
        thinking=None,
        system=[{"text": _SYSTEM, "type": "text", "cache_control": _CACHED}],
        messages=[{"role": "user", "content": [{"type": "text", "text": _ASK, "cache_control": _CACHED}]}],
        stream=True,
        tools=[{"name": "read_file", "description": "Reads.", "input_schema": _SCHEMA, "strict": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    ),
    "OpenHands": _chat(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": _SYSTEM, "cache_control": _CACHED}]},
            *_TURN[1:3],
            {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "call_1", "name": "read_file"},
        ],
        tools=[{**_TOOL, "function": {**_TOOL["function"], "strict": True}}],  # type: ignore[dict-item]
        temperature=0.0,
        top_p=1.0,
        seed=None,
        max_completion_tokens=4096,
        extra_body={"metadata": {"trace_name": "x"}},
        drop_params=True,
        stream=False,
    ),
    "langchain": _chat(
        messages=_SAY,
        n=1,
        temperature=0.7,
        stream=False,
        logprobs=False,
        frequency_penalty=0,
        presence_penalty=0,
        max_completion_tokens=64,
        response_format=_FORM,
        stop=None,
    ),
    "langchain, older": _chat(
        messages=[
            *_SAY,
            {"role": "assistant", "content": "", "function_call": {"name": "read_file", "arguments": "{}"}},
            {"role": "function", "name": "read_file", "content": "x"},
        ],
        functions=[_TOOL["function"]],
        function_call="auto",
    ),
    "litellm": _chat(
        messages=[*_SAY, {"role": "assistant", "content": "Yes", "provider_specific_fields": {}, "annotations": []}],
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        metadata={"user_api_key": "x"},
        timeout=600,
        litellm_call_id="x",
    ),
    "llm": _chat(messages=_SAY[1:], stream=True, stream_options=_USAGE, response_format=_FORM),
    "Open WebUI": _chat(
        messages=_SAY,
        stream=True,
        stream_options=_USAGE,
        params={},
        tool_servers=[],
        features={"web_search": False, "image_generation": False, "code_interpreter": False},
        variables={"{{USER_NAME}}": "Ann"},
        session_id="s",
        chat_id="c",
        id="i",
        background_tasks={"title_generation": True},
        files=None,
        frequency_penalty=None,
        min_p=0,
        repeat_penalty=1.1,
        think=False,
    ),
    "Open WebUI, Ollama": _ask(
        "/api/chat",
        model="small:latest",
        messages=_SAY,
        stream=True,
        options={"mirostat": 0, "num_ctx": 4096, "repeat_last_n": 64, "tfs_z": 1, "num_keep": 24, "num_predict": 8},
        format="",
        keep_alive="5m",
        think=None,
        tools=[],
    ),
    "SillyTavern, llama.cpp": _ask(
        "/completion",
        prompt=_ASK,
        n_predict=8,
        temperature=1.0,
        top_k=-1,
        top_p=0,
        typical_p=1,
        samplers=["top_k", "temperature"],
        dynatemp_range=0,
        xtc_probability=0,
        grammar="",
        json_schema=None,
        stop=[""],
        banned_strings=[],
        logit_bias=[],
        n_probs=0,
        post_sampling_probs=False,
        response_fields=[],
        cache_prompt=True,
        id_slot=-1,
        stream=True,
    ),
    "vLLM's clients": _chat(
        messages=_SAY,
        structured_outputs={"choice": ["yes", "no"]},
        top_k=-1,
        min_tokens=0,
        bad_words=[],
        allowed_token_ids=None,
        chat_template_kwargs={"enable_thinking": False},
        mm_processor_kwargs=None,
        return_tokens_as_token_ids=False,
        kv_transfer_params=None,
        vllm_xargs={},
    ),
}
