"""Renders a conversation with a model's chat template, as transformers does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import PromptError, TemplateError
from edgeinfer.runtime.text.allowance import ELEMENT_COST, MAX_INTEGER_BITS, size_of
from edgeinfer.runtime.text.fitting import AS_GIVEN, Form, Marked, forms

if TYPE_CHECKING:
    # They bring jinja2, which takes as long to import as a small model to load: who does not chat need not wait.
    from edgeinfer.runtime.text.render_process import RenderProcess
    from edgeinfer.runtime.text.rendering import Rendered, Rendering


MAX_SOURCE_CHARACTERS = 100_000  # the largest published templates have some 30,000
MAX_GIVEN_BYTES = 8_000_000  # of messages, tools and variables: several times the longest contexts
_MAX_DEPTH = 64  # of nested values in messages and tools
_MOST_SHAPES = 256  # of conversations whose forms are remembered
# What `strftime_now` knows, each also without its leading zero, as "%-d".
_DIRECTIVES = "aAbBcdDeFfGgHhIjklMmpPRsSTuUVwWxXyYzZ"
# SHA-256 over the UTF-8 text without the white space at its end, and whose template it is. Those of the built-in model
# and those that llama.cpp publishes in models/templates.
_KNOWN = {
    "dea688e9f24a339a0d2504f6840852adbcedb082373172a0b82ca2c55996768d": "Apertus-8B-Instruct",
    "86bc625842f60e1a5a8a3a9fc0dd3c9775db0ba31c12cde65e239f37959116d1": "Apriel-1.6-15b-Thinker-fixed",
    "a30b8c4531dda19196f35fb95ab84110dd8357acbd75eea3776c5543a70db5a9": "Bielik-11B-v3.0-Instruct",
    "3f9e0dc4adeb8032287d0129dc75b6298fee8698a52ab41e863dbc89929330d3": "ByteDance-Seed-OSS",
    "d8366efb9f07c571da620ce6a924594fc52c80273a0fbb46a38b643972df95fd": "Cohere2MoE",
    "658919e2d822e7b300e76b1304ffe60f409b0e3f300f4fec2a88aa474774eafc": "CohereForAI-c4ai-command-r-plus-tool_use",
    "cc60b553279347d83df761f5dc55b4b2fb66bc1fa9a33e219911c13c11552fac": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "dd2675619a64a449cdcdd2b93e605a0a50764cee41e344f244752bc93643936c": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "bbe594884b44d740667ee65a70bc8d333a565eab3d63ea59f291ea73ada84ba6": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "d9f5f351b276cf9e81d009db08830db7d38e94927aecd09a7beb43e2aafee94e": "deepseek-ai-DeepSeek-V3.1",
    "53b9683b3653cec369829a4e6b27e1be65c81c903a47c4f1478ce19388a2baef": "deepseek-ai-DeepSeek-V3.2",
    "f8b442fab67e75b3aa468334b5cdda671003b852ffd71f23cb23377d31d9c7be": "deepseek-ai-DeepSeek-V4",
    "8b6f730567ea3e0a994ce80ac79c18a4d49716e821fd13ad7a2c061b712e3520": "deepseek-ai-DeepSeek-V4-Flash-0731",
    "3d3bcfb70e21179932bfd603fbdeb524002e33cf8ca76215751d9f0ad437bcfb": "edgeinfer/tales",
    "5f259f602c593bdc4ee6f461bd3d6ebb30f7001cc2826d763e6d4a46656cd4d6": "fireworks-ai-llama-3-firefunction-v2",
    "bbbf2de800b645dfe032b1d85e1d6479d78fd82d38d4af0d8d5bb2dacacd20d6": "GigaChat3-10B-A1.8B",
    "304f0d64aa3ba30ee85c281befdeb0e5b32aed232b06dee1752310daa1208a4b": "GigaChat3.1-10B-A1.8B",
    "e6e2ddfb13f8aef529a869e362f74743725c0919b8675139b93c0cb1623796c8": "GLM-4.6",
    "d63ad536c3c81880043e22ec7fd08db42b4d8fb7c89c7138bc562bfa25281375": "GLM-4.7-Flash",
    "ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6": "google-gemma-2-2b-it",
    "1d35a24a2a63cc600c0cab43628a6df4cd3318e959b03307cf5f9f7e29ecf783": "google-gemma-4-31B-it",
    "df900edd2fcee5defc268bee887666c43c976d973bb3e87355b52423a651bf91": "google-gemma-4-31B-it-interleaved",
    "cbc1d50f777ec029b33f53b23d7a224cceb65bcc8c7fac54946dbb56514e4d1e": "HuggingFaceTB-SmolLM3-3B",
    "d0657ba05651bd2134160e7a9fbe40f1aa51ecb6bc2724618e34b04466291f87": "ibm-granite-granite-3.3-2B-Instruct",
    "9524df67b77a7b25a2dfee898f75b316a157eb9d855b51e32aeac79d7c8a83ce": "ibm-granite-granite-4.0",
    "fed2756d2d24e127b951dcf139d0b03ab7db8ef23a456128ebc9c2db4901d476": "ibm-granite-granite-4.1",
    "b4ab3a1c8f748e6f874d9aea102333efe7ab82528e8ab81c2eb155851e8705c6": "inclusionai-ling-3.0-flash",
    "02e91795d2270374161c7063c9b1d084bb8cb3fb04b1ae977cf0e2953bdbbf92": "Kimi-K2-Instruct",
    "4027d478e682204ecc53bb42cd60402338dcac3c9312c32335865fcaf59cb1e8": "Kimi-K2-Thinking",
    "f0c33f4b63ef8403f3dd16e10917440251ba16743c2a36d31675ac04b0ad1a1e": "Kimi-K3",
    "2294f49b51a0b9a1b0194add3f124237b5bd986599f43180eec49bba4de01365": "LFM2-8B-A1B",
    "6d65c8804847ad74eea912dd7eca3dc1cf7a457b53a77f47d841a14121910963": "LFM2.5-8B-A1B",
    "f05bf4b967dc993bdc7a2fe6e43759ee218eb0eb340d68b063e1c4f8ad148176": "LFM2.5-Instruct",
    "e0d5e227f0aedba8bc36d9173d4f814b6b9bc8bafa3e50d53fa0071567f90102": "llama-cpp-deepseek-r1",
    "e70723034f0928096207d99b2ec4678950361f290f5341c017d957f88b196935": "llama-cpp-rwkv-world",
    "2fc9dbfaea552f864b4b8cdf9d17401e9a49cbda199498531f137eb0ec5ae1d8": "meetkai-functionary-medium-v3.1",
    "5c7c96c27cfecf3418411d1ebd0d11d691ab6bd2155bb38dacc62250fe47c3c8": "meetkai-functionary-medium-v3.2",
    "d82792f95932f1c9cef5c4bd992f171225e3bf8c7b609b4557c9e1ec96be819f": "meta-llama-Llama-3.2-3B-Instruct",
    "93c0e9aa3629bbd77e68dbc0f5621f6e6b23aa8d74b932595cdb8d64684526d7": "meta-llama-Llama-3.3-70B-Instruct",
    "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90": "microsoft-Phi-3.5-mini-instruct",
    "e7fa3f870aabfc1c9cadf448926fee2bc3e0e4c2546edb2b7a8b933313607057": "MiMo-VL",
    "e1790d8fbe1c587e6fc385e2a712363f86faf52ae1fb1fcbfc5ded3eb1fae70a": "MiniMax-M1",
    "a3e05b110e2d1ccf5373f2d2a09f8e2e6c7fc48247c8cb6cab5160a462dc2209": "MiniMax-M2",
    "c56d1f3ab70881b0e2ed8f51fa6de435d37b84d6c804ebb19a0ec4986fa5ffa9": "MiniMax-M3",
    "d990bccdaaa20611e261434bf60bce767b03d8ee1f1d9b5cd0742b1cc96066b9": "Mistral-Small-3.2-24B-Instruct-2506",
    "31b50c917746ef1c2611c2fef122d3ebee690aca5748ab37832734f9ad375da1": "mistralai-Ministral-3-14B-Reasoning-2512",
    "e7deee034838db2bfc7487788a3013d8a307ab69f72f3c54a85f06fd76007d4e": "mistralai-Mistral-Nemo-Instruct-2407",
    "aab20feb9bc6881f941ea649356130ffbc4943b3c2577c0991e1fba90de5a0fc": "moonshotai-Kimi-K2",
    "6cd0e94d9b489fdb9a000743791f20e7e52b62c1e5cbb66fcc91c6716595223a": "muse-glimmer",
    "ce62e308475b364e1fc76699dccbddeb9ac08344f90d59719dba86a9922834d9": "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "43a92aacc2e169bb37055e4d8b0df31edfdc8657d8c387fcf98254cb246e626a": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "52ae8e50fa083e63a0a5726eeffc85502089b82064aceb1bddf0366f7317b3f8": "NVIDIA-Nemotron-Nano-v2",
    "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146": "openai-gpt-oss-120b",
    "86c78150a71c4c5b597cb8571c0d48b9a5c10f89cd54c02e02343ceb0bac5c0a": "openbmb-MiniCPM5-1B",
    "444819b8ad4612870827ac05b9147fe9e3344d3850cae8c2790898fc514099ff": "poolside-Laguna-S-2.1",
    "c64086c5feaef448e1b94da54bf018333e29e506be3772c1cb41f60cb13e4888": "poolside-Laguna-XS-2.1",
    "dadad29ff28c38064a91d928e758992e5f69d8e5002ee301c1c707d940ac0802": "poolside-Laguna-XS.2",
    "55b2f4a26ac9ee719330a61a0c39d9e538b0e9322212f048326318cff4f8674a": "Qwen-Qwen2.5-7B-Instruct",
    "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5": "Qwen-Qwen3-0.6B",
    "94c6035b4f0eb905c95e2b7d8dace8547abca03f7fe3e441ba8a6388b1941272": "Qwen-QwQ-32B",
    "eae48a3307931acb10a6fce475a36b711709672ea79ee1a9bc52f083d8b0a2af": "Qwen3-Coder",
    "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715": "Qwen3.5-4B",
    "546b04dba74993efae8f9da3ba08e29f437f5ac3f4e40b5cb9a4de5901a841df": "Reka-Edge",
    "c88f16f22024c5c5975a275b1168a711eef23fed681ebc51ed493fc13efeab72": "Spark2.5",
    "3a7cb642bf35cb4106cd3895147d8fcded3be856ad56cf6c88510aec879c2427": "StepFun3.5-Flash",
    "84437b9746423f042920c15289ac84d4eba7a50a11ebc05e8b414c460f814873": "tencent-Hy3",
    "156dd2c74e961f059aca24cc7b5a34f81715ed06762181c6f02155bfe78ca0c7": "unsloth-Apriel-1.5",
    "039a4710e2aabaa79e85a233fa3daa4fbc030a4a8dc218cb7f34fb0c4b8c13b1": "unsloth-mistral-Devstral-Small-2507",
    "c2e6220e74d32601bc99eeba3ce6caf69576080d18e2c33f93e560f6035ce1e3": "upstage-Solar-Open-100B",
}


class ChatTemplate:
    """A chat template, for any number of threads.

    Templates come with models and are not trusted: they may use listed operations only, and one that does too much work
    fails. One whose text is not known besides is rendered in a process of its own, which can be ended whatever it does.
    Frozen applications have no interpreter to start; there it is rendered in this process, inside the same limits.

    Args:
        source: jinja2 text.
        special_tokens: names to texts that the template may use, such as bos_token.
        now: the clock behind `strftime_now`.
        tool_source: jinja2 text of conversations with tools, where those have a template of their own.

    Attributes:
        source: as it was given.
        tool_use: the template of conversations with tools; None where it is this one.

    Raises:
        TemplateError: the source is too large or malformed.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        tool_source: str | None = None,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise TemplateError(
                f"The chat template is too large ({len(source)} characters).",
                f"The limit is {MAX_SOURCE_CHARACTERS} characters.",
            )
        self.source = source
        self.tool_use = None if tool_source is None else ChatTemplate(tool_source, special_tokens, now)
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._forms: dict[bytes, Form | TemplateError] = {}  # by shape of conversation
        self._process: RenderProcess | None = None
        self._rendering: Rendering | None = None
        if not is_known(source):
            self._make_ready()

    def _make_ready(self) -> None:
        """Makes what renders it: of one that is known, which cannot be malformed, when it is first rendered."""
        from edgeinfer.runtime.text.render_process import RenderProcess, can_start
        from edgeinfer.runtime.text.rendering import RenderError, Rendering, check_syntax

        try:
            if is_known(self.source) or not can_start():
                self._rendering = Rendering(self.source)
            else:
                check_syntax(self.source)
                self._process = RenderProcess(self.source)
        except RenderError as error:
            hint = "Fix chat_template.jinja or export the model again."
            raise TemplateError(f"The chat template {error.what}: {error.reason}.", hint) from error

    @property
    def process(self) -> RenderProcess | None:
        """What renders it elsewhere; None where this process does."""
        return self._process

    def close(self) -> None:
        """Ends the process that renders it, if there is one. The next render starts another."""
        if self.tool_use is not None:
            self.tool_use.close()
        if self._process is not None:
            self._process.close()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the text the model was trained on, as far as its template takes it; else in a form that
        the template takes whole, as `fitted` finds it.

        Args:
            messages: mappings with a str `role` and a `content` that is a str or a list of text parts; `content` may be
                None or absent beside `tool_calls`. Other keys pass through.
            tools: JSON schemas of functions, as OpenAI shapes them.
        """
        if tools and self.tool_use is not None:
            return self.tool_use.render(messages, add_generation_prompt, tools, variables)
        messages, tools = self.fitted(messages, add_generation_prompt, tools, variables)
        return self.rendered(messages, add_generation_prompt, tools, variables)

    def fitted(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Messages and tools in the form that the template takes whole, which changes least; arguments and errors as
        `render`."""
        if (variables or {}).get("documents") and "documents" not in self.source:
            raise TemplateError("The chat template takes no documents.", "Put their texts into a message.")
        conversation = _conversation(messages)
        marked = Marked.of(conversation, tools)
        key = hashlib.sha256(f"{marked.key} {add_generation_prompt} {variables!r}".encode("utf-8", "surrogatepass"))
        found = self._forms.get(key.digest())
        if found is None:
            found = self._form_of(marked, add_generation_prompt, variables)
            if len(self._forms) >= _MOST_SHAPES:
                self._forms.clear()
            self._forms[key.digest()] = found
        if isinstance(found, Form):
            return found.of(conversation), [] if found.listed else tools
        raise TemplateError(found.message, found.hint)

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of messages that are `fitted`; arguments and errors as `render`."""
        names = self._names(messages, add_generation_prompt, tools, variables)
        outcome = self._outcomes([names])[-1]
        if outcome.text is None:
            raise _failure(*outcome.failure)
        return outcome.text

    def _form_of(
        self, marked: Marked, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> Form | TemplateError:
        def outcomes(tried: Sequence[Form]) -> list[Rendered]:
            made = [(form.of(marked.messages), [] if form.listed else marked.tools) for form in tried]
            given = [self._names(each, add_generation_prompt, tools, variables) for each, tools in made]
            return self._outcomes(given, tuple(marked.marks))

        first = outcomes([AS_GIVEN])[-1]
        if first.whole:
            return AS_GIVEN
        lists = marked.tools is None and "tools" in self.source
        others = [] if first.spent else list(forms(marked.messages, parts=self._takes_parts, lists=lists))
        tried = outcomes(others) if others else [first]
        if tried[-1].whole:
            return others[len(tried) - 1]
        rendered = [each for each in (first, *tried) if each.text is not None]
        if not rendered:
            return _failure(*first.failure)
        lost = marked.marks[min((each.missing for each in rendered), key=len)[0]]
        message = f"The chat template leaves out {lost}, in every form that was tried."
        return TemplateError(message, "Leave it out, or take a model whose template knows it.")

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a user's text reaches the reply as a list of parts only."""
        asked = Marked.of([{"role": "user", "content": "text"}], None)
        given = [self._names(Form(content).of(asked.messages), True, None, None) for content in ("text", "parts")]
        outcomes = self._outcomes(given, tuple(asked.marks))
        return len(outcomes) == len(given) and outcomes[-1].whole

    def _names(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """What the template sees."""
        return {
            **self._special_tokens,
            "documents": None,
            **{str(name): _plain(value, str(name)) for name, value in (variables or {}).items()},
            "messages": messages,
            "tools": None if tools is None else [_plain(tool, "tools") for tool in tools],
            "add_generation_prompt": bool((variables or {}).get("add_generation_prompt", add_generation_prompt)),
        }

    def _outcomes(self, attempts: Sequence[dict[str, Any]], marks: Sequence[str] = ()) -> list[Rendered]:
        """What comes of each attempt up to the first whose text has all marks."""
        from edgeinfer.runtime.text.render_process import RenderProcessError

        given = max(map(_size, attempts))
        if given > MAX_GIVEN_BYTES:
            raise PromptError(
                f"The messages are too long ({given} bytes).", f"The limit is {MAX_GIVEN_BYTES} bytes; shorten them."
            )
        moment = _moment(self._now()) if "strftime_now" in self.source else {}
        if self._process is None and self._rendering is None:
            self._make_ready()
        if self._process is None:
            assert self._rendering is not None
            return self._rendering.render(attempts, given, moment, marks)
        try:
            return self._process.ask({"attempts": attempts, "given": given, "moment": moment, "marks": marks})
        except RenderProcessError as error:
            raise _failure("failed", str(error)) from error


def _failure(what: str, reason: str) -> TemplateError:
    return TemplateError(
        f"The chat template {what}: {reason}.",
        "Check the messages against what the model's template allows, or take its makers' own template.",
    )


def _moment(now: datetime) -> dict[str, str]:
    """What each directive gives now; a template's own text never reaches the system's formatting."""
    parts = {"%": "%"}
    for directive in (prefix + letter for prefix in ("", "-") for letter in _DIRECTIVES):
        try:
            parts[directive] = now.strftime(f"%{directive}")
        except ValueError:  # not known to this system
            continue
    return parts


def _size(value: Any) -> int:
    """Bytes that plain values take, about."""
    if isinstance(value, str):
        return ELEMENT_COST + size_of(value)
    if isinstance(value, dict):
        return ELEMENT_COST + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return ELEMENT_COST + sum(map(_size, value))
    return ELEMENT_COST


def _conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError(
            "The messages are not a non-empty list.", 'Give a list such as [{"role": "user", "content": "Hello"}].'
        )
    return [_message(message, index) for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(
            f"Message {index} is not a mapping with a string 'role'.", "Give each message role and content."
        )
    plain: dict[str, Any] = _plain(message, f"message {index}")
    content = plain.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, index)
    elif not isinstance(content, str) and not (content is None and plain.get("tool_calls")):
        raise PromptError(
            f"The content of message {index} is {type(content).__name__}, not text.",
            "Give a str or a list of text parts.",
        )
    plain.setdefault("content", None)
    calls = plain.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        hint = 'Calls look like {"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        raise PromptError(f"The tool_calls of message {index} are no list of calls.", hint)
    return plain


def _check_part(part: object, index: int) -> None:
    if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
        raise PromptError(
            f"Message {index} has a part that is not text.", 'Parts look like {"type": "text", "text": "..."}.'
        )


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of JSON types alone: templates see no object with methods of its own."""
    if depth > _MAX_DEPTH:
        raise PromptError(f"The {where} nest more than {_MAX_DEPTH} levels deep.", "Flatten them.")
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise PromptError(f"The {where} contain a number of more than {MAX_INTEGER_BITS} bits.", "Give it as text.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(_plain(key, where, depth + 1)): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise PromptError(f"The {where} contain a {type(value).__name__}, which is not JSON.", "Use JSON types only.")


def is_known(source: str) -> bool:
    """Whether a template is one of them."""
    return hashlib.sha256(source.rstrip().encode("utf-8", "surrogatepass")).hexdigest() in _KNOWN
