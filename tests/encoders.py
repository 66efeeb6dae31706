"""Small encoders of random weights with a tokenizer of a few words, as checkpoints and as bundles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "cat", "dog", "sat", "ran", "on", "the", "mat", "fast", "slow", "red"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}


def checkpoint(folder: Path, model: Any, modules: dict[str, dict[str, Any]] | None = None) -> Path:
    """A checkpoint, with sentence-transformers' modules behind the model where these are given by their folders."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.eval().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    if modules is not None:
        listed = [{"path": path, "type": f"sentence_transformers.models.{path[2:]}"} for path in modules]
        (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "a.Transformer"}, *listed]))
        for path, config in modules.items():
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(config))
    return folder


def exported(folder: Path, bits: int, **options: Any) -> Path:
    return export_checkpoint(folder, folder / f"{bits}", ExportConfig(bits=bits, calibration="none", **options))


def embedder(folder: Path) -> Path:
    """A bundle of a small BERT, in 8 bits."""
    return exported(checkpoint(folder, transformers.BertModel(transformers.BertConfig(**SIZES))), 8)


def reranker(folder: Path) -> Path:
    config = transformers.BertConfig(**SIZES | {"num_labels": 1})
    return exported(checkpoint(folder, transformers.BertForSequenceClassification(config)), 8)
