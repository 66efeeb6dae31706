"""What passes of m rows over a mixture of experts cost, predicted by the experts that they meet, beside what they take.

    python -m tests.tools.expert_passes FOLDER [--experts 32] [--top-k 4] [--rounds 12]

MoESD (arXiv:2505.19645) calls T(1)/T(m), the cost of a pass over one row by that over m, the target efficiency: a draft
of m - 1 tokens pays where it commits more than its inverse. In FOLDER a Qwen3-MoE of random weights in 4 bits is made,
unless it is there. Passes run on one thread in turns, every row with logits, of random tokens that no pass repeats;
costs are the least processor time over the rounds. Predicted are the experts that m independent rows meet, the bytes
of these and of those that were met, and the pass as the plan guesses it of a model that never ran here.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.apps.bench.render import markdown_table
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.wrapped import active_experts
from edgeinfer.runtime.planning.speed_model import guessed_passes
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.weights.experts import ExpertBytes, expected_experts
from tests.tools.shape_speed import write_checkpoint

ROWS = (1, 2, 4, 8, 16, 32)
_PAST, _CONTEXT, _VOCABULARY = 64, 256, 8192


def _make(folder: Path, experts: int, top_k: int) -> Bundle:
    """The mixture: attention and head are a tenth of what one row reads."""
    checkpoint, bundle = folder / f"mixture-{experts}-{top_k}", folder / f"mixture-{experts}-{top_k}-b4"
    values: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **{"vocab_size": _VOCABULARY, "hidden_size": 1024, "intermediate_size": 1024, "moe_intermediate_size": 512},
        **{"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
        **{"num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": True, "rms_norm_eps": 1e-6},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu", "attention_bias": False},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    if not checkpoint.is_dir():
        write_checkpoint(checkpoint, values)
    if not bundle.is_dir():
        export_checkpoint(checkpoint, bundle, ExportConfig(bits=4, group_size=128))
    return open_bundle(bundle)


def measure(bundle: Bundle, rounds: int) -> tuple[PassCosts, dict[int, float]]:
    """Costs in processor milliseconds of a pass and the experts that a layer of it met, both by rows."""
    backend = PagedBackend(bundle, _CONTEXT, threads=1)
    moe, chance = backend.geometry, np.random.default_rng(0)
    decoder = bundle.manifest.decoder
    assert decoder is not None and decoder.moe is not None, "made above"
    best: dict[int, float] = {}
    met: defaultdict[int, list[float]] = defaultdict(list)
    past = chance.integers(2, moe.vocab_size, _PAST)
    backend.forward(ForwardInput(past, np.arange(_PAST), np.zeros(0, np.int64)))
    for _ in range(rounds):
        for rows in ROWS:
            tokens = chance.integers(2, moe.vocab_size, rows)
            started = time.process_time()
            output = backend.forward(ForwardInput(tokens, np.arange(rows) + _PAST, np.arange(rows)))
            ms = 1e3 * (time.process_time() - started)
            if output.experts is None:
                raise SystemExit("The model does not tell which experts it used.")
            best[rows] = min(ms, best.get(rows, ms))
            used = active_experts(output.experts, decoder.moe.experts)  # (S, L, E)
            met[rows].append(float(used.any(axis=0).sum()) / used.shape[1])
            backend.cache.trim(_PAST)
    backend.close()
    return PassCosts(tuple(best.items())), {rows: float(np.mean(counts)) for rows, counts in met.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    bundle = _make(args.folder, args.experts, args.top_k)
    takes = ExpertBytes.of(bundle.manifest.decoder, tensors_in(bundle.manifest, NATIVE))
    always = bundle.manifest.weight_bytes - takes.total
    guessed, (costs, met) = guessed_passes(always, takes.needed), measure(bundle, args.rounds)

    def read(experts: float) -> float:
        return float(always + takes.total * experts / args.experts)

    rows = [
        (
            str(m),
            f"{expected_experts(args.experts, args.top_k, m):.1f}",
            f"{met[m]:.1f}",
            f"{read(args.top_k) / read(expected_experts(args.experts, args.top_k, m)):.2f}",
            f"{read(args.top_k) / read(met[m]):.2f}",
            f"{guessed.ms(1) / guessed.ms(m):.2f}",
            f"{costs.ms(1) / costs.ms(m):.2f}",
            f"{costs.ms(m):.2f}",
        )
        for m in ROWS
    ]
    names = ("rows", "experts by chance", "met", "T(1)/T(m) by chance", "by those met", "by the plan", "measured", "ms")
    print(f"{bundle.manifest.weight_bytes / 1e6:.0f} MB, of which experts {takes.total / 1e6:.0f}.")
    print(markdown_table(names, rows))


if __name__ == "__main__":
    main()
