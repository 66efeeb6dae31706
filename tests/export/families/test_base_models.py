"""Checkpoints of a base model alone, as AutoModel saves them, and of a tied model with a head, whose copy it may be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import CheckpointError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.export.families.table import FAMILIES
from tests.export.families.test_families import TOLERANCE, run
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint

_SLOW = ("Gemma3", "Gemma3n", "Qwen3Moe", "Qwen3_5", "Mamba2", "Cohere2", "FalconH1")


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


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_head_is_the_embedding_where_it_is_its_copy(factor: float, tmp_path: Path) -> None:
    """Transformers uses a head with other values, though config.json says that it is tied."""
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, "Llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = np.float32(factor) * tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bundle = open_bundle(export_checkpoint(folder, tmp_path / "bundle", ExportConfig(bits=32)))
    assert bundle.manifest.decoder is not None and bundle.manifest.decoder.tied == (factor == 1)
    expected = expected_logits(transformers.AutoModelForCausalLM.from_pretrained(folder), TOKENS)
    found = run(ReferenceBackend(bundle, len(TOKENS)), TOKENS)
    assert np.abs(found - expected).max() <= TOLERANCE
