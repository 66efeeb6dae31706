"""Chat templates that differ as those of published models do: in roles, their order, contents, tools and calls."""

from __future__ import annotations

from tests.runtime.text.test_template import CHATML, KNOWN, LLAMA2, TOOLS


def _joined(text: str) -> str:
    """A template that stands in several lines, of which the text has nothing."""
    return "".join(line.strip() for line in text.splitlines())


_TURNS = _joined("""
    {% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
""")
# No system role, strict turns: Gemma 1 and 2.
_GEMMA = _joined(r"""
    {{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
    {% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
    {% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
    {{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
    {% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
""")
# A system message goes into the first user's by itself, content is text or parts: Gemma 3.
_GEMMA3 = _joined(r"""
    {% set first = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}
    {% set first = messages[0].content if messages[0].content is string else messages[0].content[0].text %}
    {% set turns = messages[1:] %}{% endif %}{% for m in turns %}
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
    {{ '<|' + m.role + '|>' }}{{ first + '\n\n' if loop.first and first }}{% if m.content is string %}
    {{ m.content | trim }}{% elif m.content is iterable %}{% for c in m.content %}{{ c.text | trim }}
    {% endfor %}{% else %}{{ raise_exception('Invalid content type') }}{% endif %}{% endfor %}
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
""")
# Users and assistants by turns, nothing else, and nothing empty: early Mistral, Ministral.
_MISTRAL = _joined("""
    {{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
    {% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}
    {% if not m.content %}{{ raise_exception('Assistant message must have content') }}{% endif %}
    {{ m.content + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}
    {% endif %}{% endfor %}
""")
# Tools before the last user message, ids of nine letters, a message with calls says nothing else: Mistral v3.
_MISTRAL_TOOLS = _joined(r"""
    {% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}
    {% set ns = namespace(turn=0) %}
    {% for m in loop_messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
    {% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {% set ns.turn = ns.turn + 1 %}{% endfor %}{{ bos_token }}
    {% set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}{% for m in loop_messages %}
    {% if m.role == 'user' %}{% if tools and m == users[-1] %}
    {{ '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' }}
    {% if loop.first and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{ m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}
    {% if call.id | length != 9 %}
    {{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
    {{ call.function | tojson ~ (', ' if not loop.last else '') }}{% endfor %}{{ ']' + eos_token }}
    {% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% elif m.role == 'tool' %}
    {{ '[TOOL_RESULTS]' ~ {'content': m.content, 'call_id': m.tool_call_id} | tojson ~ '[/TOOL_RESULTS]' }}
    {% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}
""")
# Tools in the first user message, one call a message: Llama 3.1.
_LLAMA3 = _joined("""
    {% set system = '' %}{% set rest = messages %}{% if messages[0].role == 'system' %}
    {% set system = messages[0].content | trim %}{% set rest = messages[1:] %}{% endif %}
    {{ '<|system|>' + system + '<|eot_id|>' }}{% if tools is not none %}{% if rest | length == 0 %}
    {{ raise_exception('Cannot put tools in the first user message') }}{% endif %}
    {{ '<|user|>Respond as {"name": function name, "parameters": dictionary of argument name and value}.' }}
    {% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ rest[0].content | trim + '<|eot_id|>' }}
    {% set rest = rest[1:] %}{% endif %}{% for m in rest %}
    {% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
    {{ '<|' + m.role + '|>' + m.content | trim + '<|eot_id|>' }}{% elif 'tool_calls' in m %}
    {% if m.tool_calls | length != 1 %}
    {{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
    {% set f = m.tool_calls[0].function %}{{ '<|assistant|>{"name": "' + f.name + '", "parameters": ' }}
    {{ f.arguments | tojson }}{{ '}<|eot_id|>' }}{% else %}{{ '<|ipython|>' }}
    {{ m.content | tojson if m.content is mapping else m.content }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}
    {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
""")
# Users and assistants; whatever else there is vanishes: Phi 3, Zephyr's relatives.
_PHI3 = _joined(r"""
    {% for m in messages %}{% if m.role in ('user', 'assistant') %}
    {{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}
    {{ '<|assistant|>' }}{% endif %}
""")
# One system message, at the beginning: Qwen 3.5.
_SYSTEM_FIRST = _joined("""
    {% for m in messages %}{% if m.role == 'system' and not loop.first %}
    {{ raise_exception('System message must be at the beginning.') }}{% endif %}
    {{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}
    {% endif %}
""")
# Content is a list of parts, the first of which is looked at: SmolVLM.
_SMOLVLM = _joined(r"""
    <|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}
    {{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for c in m['content'] %}{% if c['type'] == 'text' %}
    {{ c['text'] }}{% elif c['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}
    {{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
""")
# Parts, filtered; a system message says nothing: LLaVA.
_LLAVA = _joined("""
    {% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}
    {% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}
    {% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
""")
# A user's content is a list of parts, all others' is text, and turns are strict.
_MIXED = _joined("""
    {% for m in messages %}{% if m.role == 'user' %}{% for c in m.content %}{{ '<|user|>' + c.text }}
    {% endfor %}{% elif m.role == 'system' %}{{ '<|system|>' + m.content.strip() }}
    {% elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content.strip() }}{% else %}
    {{ raise_exception('Unknown role: ' + m.role) }}{% endif %}{% endfor %}{% if add_generation_prompt %}
    {{ '<|assistant|>' }}{% endif %}
""")
# Content is printed, text or not.
_PRINTED = _joined(r"""
    {% for m in messages %}{{ m.role ~ ': ' }}{{ m.content ~ '\n' }}{% endfor %}{% if add_generation_prompt %}
    {{ '<|assistant|>' }}{% endif %}
""")
# Calls are recognized by content that is none, their arguments are text: DeepSeek R1.
_DEEPSEEK = _joined(r"""
    {% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
    {% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}
    {% elif m.role == 'assistant' and m.content is none %}{% for call in m.tool_calls %}
    {{ '<|call|>' + call.function.name + '\n' + call.function.arguments + '<|/call|>' }}{% endfor %}
    {% elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content + eos_token }}{% elif m.role == 'tool' %}
    {{ '<|output|>' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}
    {% endif %}
""")
# Arguments are taken apart: Qwen3-Coder, GLM.
_ELEMENTS = _joined("""
    {% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}
    {{ '<|' + m.role + '|>' }}{{ m.content if m.content }}{% for call in m.tool_calls or [] %}
    {{ '<function=' + call.function.name + '>' }}{% for key, value in call.function.arguments | items %}
    {{ '<parameter=' + key + '>' }}{{ value if value is string else value | tojson }}{% endfor %}
    {{ '</function>' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
""")
# A list of tools must be given: Hermes' tool_use, Command R+.
_TOOL_USE = _joined("""
    {% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}
    {{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}
    {{ '<|assistant|>' }}{% endif %}
""")
# Parts say more than their text: TranslateGemma.
_LANGUAGE = _joined("""
    {% for m in messages %}{% if m.content is not string and m.content[0].to in ('de', 'fr') %}
    {{ m.content[0].to + ': ' + m.content[0].text }}{% else %}{{ raise_exception('To which language?') }}{% endif %}
    {% endfor %}
""")
# Text may be left out, with or without a word.
_LAST_ONLY = "{{ messages[-1].content }}"
_NOTHING = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}"
DIALECTS = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "tools": TOOLS,
    "tales": KNOWN,
    "turns": _TURNS,
    "gemma": _GEMMA,
    "gemma3": _GEMMA3,
    "mistral": _MISTRAL,
    "mistral tools": _MISTRAL_TOOLS,
    "llama3": _LLAMA3,
    "phi3": _PHI3,
    "system first": _SYSTEM_FIRST,
    "smolvlm": _SMOLVLM,
    "llava": _LLAVA,
    "mixed": _MIXED,
    "printed": _PRINTED,
    "deepseek": _DEEPSEEK,
    "elements": _ELEMENTS,
    "tool use": _TOOL_USE,
    "language": _LANGUAGE,
    "last only": _LAST_ONLY,
    "nothing": _NOTHING,
}
