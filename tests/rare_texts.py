"""Texts that people seldom write and files hold, by a seed: all planes, forms of composition, marks, code, tags."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

_PLANES = (
    (0, 0xD800),
    (0xE000, 0x10000),
    (0x10000, 0x20000),
    (0x20000, 0x30000),
    (0x1F000, 0x1FB00),
    (0x30000, 0x110000),
)
_RANGES: dict[str, tuple[tuple[int, int], ...]] = {
    "ascii": ((0x20, 0x7F),),
    "control": ((0, 0x20), (0x7F, 0xA0)),
    "combining": ((0x300, 0x370), (0x591, 0x5BE), (0x64B, 0x660), (0x93A, 0x94E), (0xE31, 0xE3B), (0x20D0, 0x20F1)),
    "jamo": ((0x1100, 0x1113), (0x1161, 0x1176), (0x11A8, 0x11C3)),
    "hangul": ((0xAC00, 0xD7A4),),
    "width": ((0xFF01, 0xFFEF),),
    "private": ((0xE000, 0xE010), (0xF0000, 0xF0010), (0xFFFD, 0x10002)),
    "white": ((0x2000, 0x200B), (0x2028, 0x2030)),
}
_PIECES: dict[str, tuple[str, ...]] = {
    "spaces": (*" \t\n\v\f\r\x85\xa0\u1680\u202f\u205f\u3000", "\r\n", "   ", "\t\t"),
    "invisible": (*"\u200b\u200c\u200d\u2060\ufeff\xad\u061c\u180e\u200e\u200f\u202a\u202e\u2066\u2069",),
    "ligatures": ("\ufb00", "\ufb03", "\ufdf2", "\u32ff", "\u01c4", "\u0133", "\u2167", "\u2460"),
    "digits": (*"0123456789\u0660\u0967\uff11\xb2\xbd\u2188\u24f5", "12345678901234567890", "1e-9", "0x1F"),
    "emoji": (
        *("\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f44d\U0001f3fd", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f"),
        *("1\ufe0f\u20e3", "\U0001f600"),
    ),
    "singletons": (*"\u2126\u212a\u212b\u0340\u0344\u037e\u0387\u1f71\u2001\u2329\uf900\ufb1d\u0958\u0f43",),
    "code": (
        "def f(x):\n    return x\n",
        "for(;;){}",
        "==>",
        "'s",
        "'RE",
        "\u2019s",
        "'ll've",
        "'\u017f",
        "\\n",
        "{{",
        "//",
    ),
    "tags": (
        *(
            "<p>",
            "</p>",
            "<s>",
            "</s>",
            '<a href="x">',
            "&nbsp;",
            "<unk>",
            "<pad>",
            "<EOT>",
            "[EOS]",
            "[INST]",
            "<0x0A>",
        ),
        *("<eos>", "<PAD>", "<|im_end|>", "<|endoftext|>", "</think>"),
    ),
    "scripts": (
        *(
            "\u041f\u0440\u0438\u0432\u0435\u0442",
            "\u03b3\u03b5\u03b9\u03ac",
            "\u05e9\u05dc\u05d5\u05dd",
            "\u4f60\u597d",
        ),
        *(
            "\u0645\u0631\u062d",
            "\u0928\u092e\u0938\u094d\u0924\u0947",
            "\u0e2a\u0e27\u0e31",
            "\u3053\u3093",
            "\u1780\u17d2",
        ),
        *(
            "\U00010348",
            "\U0001d4d7",
            "\U00013000",
            "\xdf",
            "\u0130",
            "\u01c5",
            "\u3005",
            "\uff8a\uff9f",
            "\u304b\u3099",
        ),
    ),
    "words": (
        "hello",
        " the",
        " a",
        "World",
        " don't",
        " it's",
        "ing",
        " 12",
        "_y",
        "Foo",
        "\u2581",
        "\u0120",
        "\u010a",
    ),
}


def rare_texts(count: int, seed: int, special: Sequence[str]) -> list[str]:
    """Such texts; special tokens stand in them as they are, cut short and in capitals."""
    drawn = random.Random(seed)
    return ["".join(_piece(drawn, special) for _ in range(drawn.randrange(1, 14))) for _ in range(count)]


def _piece(drawn: random.Random, special: Sequence[str]) -> str:
    kind = drawn.randrange(12)
    if kind == 0:
        return chr(drawn.randrange(*drawn.choice(_PLANES)))
    if kind in (1, 2):
        token = drawn.choice(special)
        cut = drawn.randrange(len(token))
        return drawn.choice((token, token, token[:cut], token[cut:], token.upper()))
    if kind == 3:
        letters = "".join(chr(drawn.randrange(0xC0, 0x250)) for _ in range(3)) + chr(drawn.randrange(0xAC00, 0xD7A4))
        return unicodedata.normalize(drawn.choice(("NFC", "NFD", "NFKC", "NFKD")), letters)
    if kind == 4:
        return drawn.choice("aeiouAEIOUns\u03c9\u043a\u3055") + _of(drawn, "combining") + _of(drawn, "combining")
    if kind == 5:
        return drawn.choice(drawn.choice(list(_PIECES.values()))) * drawn.randrange(2, 30)
    if kind < 8:
        return drawn.choice(_PIECES["words"])
    name = drawn.choice([*_RANGES, *_PIECES])
    return "".join(_of(drawn, name) for _ in range(drawn.randrange(1, 4)))


def _of(drawn: random.Random, name: str) -> str:
    return chr(drawn.randrange(*drawn.choice(_RANGES[name]))) if name in _RANGES else drawn.choice(_PIECES[name])
