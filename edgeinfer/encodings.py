"""Text that users give in files, in the encodings that editors and shells write: UTF-8, or what a mark tells."""

from __future__ import annotations

import codecs

from edgeinfer.errors import PromptError

# UTF-32's first mark begins with UTF-16's. PowerShell 5 writes UTF-16 by default.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Bytes that are looked at for zeros, of which half of UTF-16 without a mark is made, and text of UTF-8 has none.
_LOOKED_AT = 4096
_ZEROS = 0.2


def marked_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark at the beginning tells; None where there is none."""
    return next((encoding for mark, encoding in _MARKS.items() if data.startswith(mark)), None)


def decode_text(data: bytes, source: object) -> str:
    """The text of what was read, without its byte order mark; UTF-8 where it has none.

    Args:
        source: where it was read, as messages name it.
    """
    encoding = marked_encoding(data) or "utf-8"
    known = "UTF-8" if encoding.startswith("utf-8") else encoding.upper()
    head = data[:_LOOKED_AT]
    if encoding == "utf-8" and head.count(0) > _ZEROS * len(head):
        message = f"{source} is not UTF-8 text: it may be UTF-16 without a byte order mark."
        raise PromptError(message, "Save it as UTF-8, for example with iconv -f UTF-16LE -t UTF-8.")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        hint = "Save it as UTF-8, for example with iconv -t UTF-8."
        raise PromptError(f"{source} is not {known} text (byte {error.start}).", hint) from error
