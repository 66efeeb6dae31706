"""The recipe of the small mixture-of-experts model that quantization and decoding are measured on.

python -m tests.tools.research.tales_moe STORIES OUT [--exclude FILE] [--threads 2]

A Qwen3-MoE checkpoint of 7.5M weights in Hugging Face's format, trained from scratch on short stories in about half an
hour on two quiet cores. Its sizes are multiples of 256, which llama.cpp's k-quants need, so
that both sides quantize every matrix.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgeinfer.export.training.text import SEPARATOR
from tests.tools.dialogues import read_stories

_log = logging.getLogger("edgeinfer")
_Model = transformers.Qwen3MoeForCausalLM
# One story in so many is held out for measuring.
_HELD_OUT = 50


@dataclass(frozen=True)
class Recipe:
    """Sizes of the model and of its training.

    Attributes:
        steps: of training; the learning rate falls to zero over them.
        batch: sequences of `context` tokens per step.
    """

    vocabulary: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 32
    experts: int = 8
    top_k: int = 3
    expert_size: int = 256
    positions: int = 512
    steps: int = 3200
    batch: int = 8
    context: int = 256
    learning_rate: float = 2e-3
    seed: int = 1


def split_stories(stories: list[str]) -> tuple[list[str], list[str]]:
    """Splits stories into those to train on, and every fiftieth to measure with."""
    return [s for i, s in enumerate(stories) if i % _HELD_OUT], stories[::_HELD_OUT]


def make_tokenizer(stories: list[str], size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `size` tokens; `SEPARATOR` is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[SEPARATOR], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(stories, trainer)
    return tokenizer


def tokens_of(stories: list[str], tokenizer: Tokenizer) -> NDArray[np.int64]:  # (T,)
    """All stories in one run of tokens, each after a separator."""
    separator = tokenizer.token_to_id(SEPARATOR)
    runs = [[separator, *encoding.ids] for encoding in tokenizer.encode_batch(stories)]
    return np.concatenate([np.array(run, np.int64) for run in runs])


def config_of(recipe: Recipe) -> transformers.Qwen3MoeConfig:
    """The model's configuration."""
    # Annotated as a dict: some of these are not in the class's own signature.
    settings: dict[str, Any] = {
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.expert_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_size,
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
        "moe_intermediate_size": recipe.expert_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": recipe.positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 1e-2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    config = transformers.Qwen3MoeConfig(**settings)
    config.architectures = [_Model.__name__]
    return config


def train(recipe: Recipe, tokens: NDArray[np.int64]) -> _Model:  # (T,)
    """Trains a model from scratch on random windows of the text, for the recipe's steps."""
    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    model: _Model = _Model(config_of(recipe))
    model.train()
    # On a CPU one expert after the other is five times as fast as grouped products.
    model.set_experts_implementation("eager")
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    started, recent = time.monotonic(), math.nan
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.steps)
        starts = rng.integers(0, len(tokens) - recipe.context, recipe.batch)
        batch = torch.from_numpy(np.stack([tokens[s : s + recipe.context] for s in starts]))  # (B, S)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch, labels=batch, output_router_logits=True)
        optimizer.zero_grad()
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = float(output.loss.detach())
        recent = loss if math.isnan(recent) else 0.98 * recent + 0.02 * loss
        if step % 100 == 0:
            left = (time.monotonic() - started) / (step + 1) * (recipe.steps - step - 1)
            _log.info("step %d of %d, loss %.3f, %.0f s left", step, recipe.steps, recent, left)
    model.train(False)
    return model


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: up over 100 steps, and down along half a cosine."""
    return min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))


def perplexity(model: _Model, tokens: NDArray[np.int64], context: int) -> float:  # (T,)
    """Perplexity of consecutive windows of the text, or of all of a text that is shorter than one."""
    context = min(context, len(tokens))
    count = len(tokens) // context
    windows = torch.from_numpy(tokens[: count * context].reshape(count, context))
    with torch.inference_mode():
        losses = [float(model(w, labels=w, output_router_logits=False).loss) for w in torch.split(windows, 16)]
    return math.exp(sum(losses) / len(losses))


def make_checkpoint(recipe: Recipe, stories: list[str], out: Path) -> None:
    """Trains on all but every fiftieth story and saves model, tokenizer and what was done to a checkpoint directory."""
    seen, validation = split_stories(stories)
    tokenizer = make_tokenizer(seen, recipe.vocabulary)
    model = train(recipe, tokens_of(seen, tokenizer))
    measured = perplexity(model, tokens_of(validation, tokenizer), recipe.context)
    _log.info("perplexity of stories that were not seen: %.3f", measured)
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {"bos_token": SEPARATOR, "eos_token": SEPARATOR, "model_max_length": recipe.positions}
    (out / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    record = asdict(recipe) | {"held_out_perplexity": round(measured, 4), "stories": len(seen)}
    (out / "recipe.json").write_text(json.dumps(record, indent=1), "utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Runs the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", type=Path, help="folder of .txt and .jsonl files")
    parser.add_argument("out", type=Path, help="checkpoint directory to make")
    parser.add_argument("--exclude", type=Path, help="JSON list of beginnings of stories that are not to be seen")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    make_checkpoint(Recipe(), read_stories(args.stories, args.exclude), args.out)


if __name__ == "__main__":
    main()
