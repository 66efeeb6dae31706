"""Checkpoints of a base model alone, as AutoModel saves them: names without the model's prefix, and no head."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from edgeinfer.errors import CheckpointError
from edgeinfer.export import ExportConfig, export_checkpoint
from tests.export.families.table import FAMILIES
from tests.factories import make_checkpoint

_SLOW = ("Gemma3", "Gemma3n", "Qwen3Moe", "Qwen3_5", "Mamba2", "NemotronH", "Cohere2", "FalconH1")


@pytest.mark.parametrize("name", ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)])
def test_it_is_the_same_decoder(name: str, tmp_path: Path) -> None:
    settings = next(family.settings[0] for family in FAMILIES if family.name == name)
    make_checkpoint(tmp_path / "whole", name, **{**settings, "tie_word_embeddings": True})
    make_checkpoint(tmp_path / "base", name, **{**settings, "tie_word_embeddings": True})
    transformers.AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "base")
    whole, base = (
        export_checkpoint(tmp_path / kind, tmp_path / f"{kind}-bundle", ExportConfig(bits=32))
        for kind in ("whole", "base")
    )
    assert (base / "weights.bin").read_bytes() == (whole / "weights.bin").read_bytes()


def test_one_whose_head_is_missing_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "base", "Llama")
    transformers.AutoModel.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
        export_checkpoint(tmp_path / "base", tmp_path / "bundle", ExportConfig(bits=32))
