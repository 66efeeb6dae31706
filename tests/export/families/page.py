"""Writes docs/families.md: every family of the table, with how far its logits are from transformers'.

python -m tests.export.families.page
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.export.architectures import ARCHITECTURES
from edgeinfer.export.architectures.refused import REFUSED
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.gguf.writer import GGUF_ARCHITECTURES, WITHOUT_GGUF
from edgeinfer.export.options import ExportConfig
from tests.export.families.table import FAMILIES, Family
from tests.export.families.test_families import ROOT, backends, branches, chunks, run
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint

_LEAD = """\
# Families

These are the checkpoints that edgeinfer converts by itself, with transformers' names of their classes. Small random
checkpoints of each are exported in float32, run, and compared with transformers. The numbers are the largest
difference of any logit, in one pass, in chunks and on a draft tree, over all configurations that the tests try:
`native` by our own kernel, `portable` by the operators of ONNX Runtime. `GGUF` is the architecture of llama.cpp that
GGUF files are written as, where there is one; llama.cpp's logits of them are held to 1e-4 too. Such files are read
back by our own kernel, but for what [GGUF files](guide/gguf.md) and [limits](limits.md) name.
Besides, 30 configurations of each, drawn at random over what published ones vary, are held to 1e-4 in chunks.
BlockFFN runs as well; transformers does not have it. InternLM3 runs as the Llama that transformers makes of it.
Of Gemma 3, 3n and 4, Mistral 3, Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, which also see, the language model is
converted.

`python -m tests.export.families.page` writes this page, and the tests hold every family to 1e-4.

"""

_REFUSED_LEAD = """
## What is refused

GGUF files of some families are not written:

"""
_OTHERS_LEAD = """
Checkpoints of other classes are refused by name, and the message says whether llama.cpp has them, so that a GGUF file
runs there. These would need parts that edgeinfer's decoders do not have:

"""


def _refused() -> str:
    """Families without GGUF files and models that are not converted, with the reasons."""
    of = {family.model_types[0]: family.classes[0] for family in ARCHITECTURES}
    without = "".join(f"- {lacking} (`{of[kind]}`)\n" for kind, lacking in sorted(WITHOUT_GGUF.items()))
    others = "".join(f"- `{kind}`: {why}\n" for kind, why in sorted(REFUSED.items()))
    return _REFUSED_LEAD + without + _OTHERS_LEAD + others


def _differences(family: Family) -> tuple[str, ...]:
    """The largest difference of each layout, over all configurations."""
    found: dict[str, float] = {}
    for settings in family.settings:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = make_checkpoint(folder / "checkpoint", family.name, **settings)
            expected = expected_logits(model, TOKENS)
            bundle = open_bundle(export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=32)))
            for backend, layout in zip(backends(bundle, family), ("native", "portable"), strict=False):
                seen = [chunks(backend) - expected, branches(backend) - expected[7:10]]
                backend.cache.clear()
                most = max(float(np.abs(each).max()) for each in (*seen, run(backend, TOKENS) - expected))
                found[layout] = max(most, found.get(layout, 0.0))
    return tuple(f"{found[layout]:.1e}" if layout in found else "" for layout in ("native", "portable"))


def _gguf(family: Family) -> str:
    """llama.cpp's name of it, or nothing."""
    [found] = (each for each in ARCHITECTURES if f"{family.name}ForCausalLM" in each.classes)
    architecture = GGUF_ARCHITECTURES.get(found.model_types[0])
    return "" if architecture is None else f"`{architecture.name}`"


def main() -> None:
    """Measures all families and writes the page."""
    rows = [
        (family.title, *_differences(family), _gguf(family), str(len(family.settings)), f"`{family.name}ForCausalLM`")
        for family in FAMILIES
    ]
    header = ("family", "native", "portable", "GGUF", "configurations", "class")
    text = _LEAD + markdown_table(header, rows, left=(0, 3, 5)) + _refused()
    (ROOT / "docs" / "families.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
