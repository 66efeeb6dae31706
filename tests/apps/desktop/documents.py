"""Files to attach: PDFs made here, byte by byte, as no library that writes them is needed otherwise."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def pdf(pages: Sequence[str], *, compressed: bytes | None = None, trailer: str = "") -> bytes:
    """A PDF with one line of text on each page; `compressed` stands in the file for the content of every page instead,
    and `trailer` adds entries to the trailer."""
    bodies = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    streams: dict[int, bytes] = {}
    for text in pages:
        number = len(bodies) + 1
        bodies.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {number + 1} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("latin-1") if text else b""
        data = zlib.compress(drawn) if compressed is None else compressed
        streams[number + 1] = data
        bodies.append(f"<< /Length {len(data)} /Filter /FlateDecode >>")
    kids = " ".join(f"{4 + 2 * place} 0 R" for place in range(len(pages)))
    bodies[1] = f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>"
    out, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(bodies, 1):
        offsets.append(len(out))
        stream = b"\nstream\n" + streams[number] + b"\nendstream" if number in streams else b""
        out += f"{number} 0 obj\n{body}".encode() + stream + b"\nendobj\n"
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    head = f"xref\n0 {len(bodies) + 1}\n0000000000 65535 f \n{table}"
    end = f"trailer\n<< /Size {len(bodies) + 1} /Root 1 0 R {trailer} >>\nstartxref\n{len(out)}\n%%EOF\n"
    return bytes(out) + head.encode() + end.encode()
