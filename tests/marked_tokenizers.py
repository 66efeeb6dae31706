"""Small tokenizers of every kind with control tokens, and chat templates that write them, for tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgeinfer.hub import resolve
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.runtime.text.test_template import CHATML, LLAMA2, MACROS, TOKENS, TOOLS

MARKS = (
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    *("[INST]", "<|end|><|user|>", "※", "<start_of_turn>"),
)
_UNK = MARKS.index("<unk>")
_TEXTS = [
    "Once upon a time there was a little dog. She said: the cat is not here, is it?",
    'def f(x): return [x < 3, "a > b", {1: 2}] # <div class="x"> & </div> | pipe system user assistant end',
    "<tools> </tool_call> </think> 漢字 été",
] * 4
_MARKED = [AddedToken(text, special=True, normalized=False) for text in MARKS]


def _bpe(trainer_options: dict[str, object], backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=list(MARKS), show_progress=False, **trainer_options)  # type: ignore[arg-type]
    backend.train_from_iterator(_TEXTS, trainer)
    return backend


def _byte_level(*, prefix: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    return _bpe({"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}, backend)


def _pieces(*, scheme: str | None) -> tokenizers.Tokenizer:
    """SentencePiece's byte pairs, spaces marked by the pre-tokenizer or, as of older files, by the normalizer."""
    alphabet = sorted({character for text in _TEXTS for character in text.replace(" ", "▁")})
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁t", "he", "▁the", "▁a", "in", "is", "▁is", "er", "us", "▁us", "<s", "</", "<|", "|>"]
    vocab = dict.fromkeys([*MARKS, *in_bytes, "▁", *alphabet, *words])
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("i", "n"), ("i", "s"), ("▁", "is"), ("e", "r")]
    # With the last of these, plain text becomes a control token.
    merges += [("u", "s"), ("▁", "us"), ("<", "s"), ("<", "/"), ("<", "|"), ("|", ">"), ("<s", ">")]
    model = models.BPE({text: i for i, text in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    if scheme is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(fallback)
    backend.add_special_tokens(_MARKED)
    return backend


def _unigram() -> tokenizers.Tokenizer:
    """With the marks as pieces of its vocabulary, as SentencePiece writes them."""
    alphabet = sorted({character for text in _TEXTS for character in text.replace(" ", "▁")} - set(MARKS))
    pieces = [(text, 0.0) for text in MARKS] + [("▁", -3.0)]
    pieces += [(text, -4.0) for text in alphabet if text != "▁"] + [("▁the", -2.0), ("er", -2.5)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=_UNK))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(_MARKED)
    return backend


def _word_piece(*, bert: bool) -> tokenizers.Tokenizer:
    letters = sorted({character.lower() for text in _TEXTS for character in text} - {" ", *MARKS})
    vocab = dict.fromkeys([*MARKS, *letters, *(f"##{letter}" for letter in letters), "the", "##er"])
    model = models.WordPiece({text: i for i, text in enumerate(vocab)}, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer() if bert else pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", MARKS.index("<s>")), ("</s>", MARKS.index("</s>"))]
    )
    backend.add_special_tokens(_MARKED)
    return backend


def _stripping() -> tokenizers.Tokenizer:
    """Whose marks take white space with them, as Phi-3's do, and which adds tokens that are not special."""
    backend = _byte_level()
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</think>", special=False)])
    ways = [{"rstrip": True}, {"lstrip": True}, {}]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, **ways[i % 3]) for i, text in enumerate(MARKS)]
    )
    return backend


def _normalized() -> tokenizers.Tokenizer:
    """Whose marks are found in normalized text: in other cases and widths, too."""
    backend = _byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=True) for text in MARKS])
    return backend


def _gaps() -> tokenizers.Tokenizer:
    """Cut by a pattern of its own, with ids that leave gaps, so that there are none for tokens of our own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: 3 * i for i, text in enumerate([*MARKS, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s?\p{L}+|."), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_MARKED)
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": _byte_level,
    "byte-level, prefixed": lambda: _byte_level(prefix=True),
    "pieces, first": lambda: _pieces(scheme="first"),
    "pieces, always": lambda: _pieces(scheme="always"),
    "pieces, normalized": lambda: _pieces(scheme=None),
    "unigram": _unigram,
    "word pieces": lambda: _word_piece(bert=True),
    "words": lambda: _word_piece(bert=False),
    "stripping": _stripping,
    "normalized marks": _normalized,
    "gaps": _gaps,
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    """One of KINDS."""
    return Tokenizer(KINDS[kind]())


_ROLES = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Which look at what is said: cut it, take marks out of it, write it in capitals, choose by it.
_CURIOUS = (
    "{% for m in messages %}<|im_start|>{{ m.role | upper }}\n"
    "{% set c = m.content or '' %}{% if '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if c.startswith('<tool_response>') and c.endswith('</tool_response>') %}[tool]{% endif %}"
    "{{ c.replace('</s>', '') | trim }}{{ c[:7] }}<|im_end|>{% endfor %}{{ messages | tojson(ensure_ascii=true) }}"
    "{% for k, v in (tools or [{}])[0] | dictsort %}{{ k }}={{ v }};{% endfor %}<|assistant|>"
)
_CAPITALS = "{% for m in messages %}<|user|>{{ m.content | upper }}</s>{% endfor %}<|assistant|>"
TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "tools": TOOLS,
    "macros": MACROS,
    "roles": _ROLES,
    "curious": _CURIOUS,
    "capitals": _CAPITALS,
}


@cache
def template(name: str) -> ChatTemplate:
    """One of TEMPLATES, or the built-in model's."""
    source = TEMPLATES.get(name) or (resolve(None) / "chat_template.jinja").read_text("utf-8")
    return ChatTemplate(source, TOKENS)
