"""Decoders with states, shared caches or latent attention: the same bits however a text is cut, drafted and kept."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.layouts import NATIVE, PORTABLE
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError, BundleError, CapabilityError, UnsupportedArchitectureError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import checkpoint_tensors
from edgeinfer.quant.calibration_layers import LayerWalk
from edgeinfer.runtime.backends.contract import Pass, PassCancelledError
from edgeinfer.runtime.backends.onnx.memory import memory_of
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, run_alone
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.kv_cache.prefix_cache import PrefixCache
from edgeinfer.runtime.native.library import LIBRARY
from edgeinfer.runtime.paging.layout import PAGE, PageLayout
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.drafters.logit_drafter import Follower
from edgeinfer.runtime.system.memory import releases_pages
from tests.alone import Alone, restore
from tests.runtime.models import bundle_of, checkpoint_of, feed, given
from tests.windowed import stream_layers

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
SCAN: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
PROMPT = "Once upon a time there was a little dog. Once upon a time there was"
TOKENS = np.arange(100, dtype=np.int64) * 37 % 300
CONTEXT = 128
DRAFTERS = ("ngram", "exit", "bits", "recycle")
# By the name of transformers' classes: a kind of recurrence, in other layers than attention, with it, without any.
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3_5": DELTA,
    "FalconH1": SCAN | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "GraniteMoeHybrid": SCAN | {"layer_types": DELTA["layer_types"], "num_local_experts": 0},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "NemotronH": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
}
# Recurrent layers without a state of numbers, shared caches, latent attention.
LAYERS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}
SHARING: dict[str, Any] = {
    **{"num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": 9, "head_dim": 16, "global_head_dim": 32},
    **{"layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True},
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320},
}
STREAMS = {name: value for name, value in SHARING.items() if name not in ("global_head_dim", "use_double_wide_mlp")}
STREAMS |= {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0, 0.0], "laurel_rank": 32}
LATENT: dict[str, Any] = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
MODELS = {"Lfm2": LAYERS, "Gemma4": SHARING, "Gemma3n": STREAMS, "DeepseekV3": LATENT}
FEW = np.arange(40, dtype=np.int64) * 37 % 300
EVERY = pytest.mark.parametrize("bundle", [*KINDS, *MODELS], indirect=True)


def made(kind: str) -> Bundle:
    config = ExportConfig(bits=8, group_size=32, keep_small=False)
    return bundle_of(kind, config, **({"tie_word_embeddings": True} | (KINDS | MODELS)[kind]))


@pytest.fixture(scope="module", params=KINDS)
def bundle(request: pytest.FixtureRequest) -> Bundle:
    return made(request.param)


@pytest.fixture(scope="module")
def whole(bundle: Bundle) -> Any:
    """The logits of TOKENS, evaluated at once."""
    return feed(Alone(PagedBackend(bundle, CONTEXT), CONTEXT), TOKENS)


def cut(backend: Alone[PagedBackend], *ends: int) -> Any:
    """The logits of passes that end there."""
    starts = (backend.cache.length, *ends)
    return np.concatenate([feed(backend, TOKENS[a:b]) for a, b in zip(starts, ends, strict=False)])


def test_cuts_and_threads_leave_every_bit(bundle: Bundle, whole: Any) -> None:
    # Passes as long as a draft, longer, and longer than a ring, one after the other and token by token.
    for ends in ((1, 2, 3, 20, 29, 30, 100), (60, 61, 100), (5, 55, 100), (*range(40, 100), 100)):
        for threads in (1, 2):
            assert np.array_equal(cut(Alone(PagedBackend(bundle, CONTEXT, threads=threads), CONTEXT), *ends), whole)


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_what_was_cut_off_leaves_no_trace(kv: str, bundle: Bundle) -> None:
    backend, other = (
        Alone(PagedBackend(bundle, CONTEXT, kv=kv), CONTEXT),
        Alone(PagedBackend(bundle, CONTEXT, kv=kv), CONTEXT),
    )
    expected = feed(other, TOKENS)
    cut(backend, 50)
    for start, drafted, kept in ((50, 16, 3), (53, 1, 0), (53, 20, 20), (73, 9, 0), (73, 12, 12)):
        feed(backend, (TOKENS[start : start + drafted] + (np.arange(drafted) >= kept)) % 300)
        backend.cache.trim(start + kept)
    assert np.array_equal(cut(backend, 100), expected[85:])


def test_trees_leave_every_bit_on_each_of_their_paths(bundle: Bundle, whole: Any) -> None:
    backend = Alone(PagedBackend(bundle, CONTEXT, threads=2), CONTEXT)
    cut(backend, 40)
    parents = [-1, -1, 1, 0, 2, 4, 2, 4]  # the text is the rows 1, 2, 4, 7
    tokens = [5, TOKENS[40], TOKENS[41], 6, TOKENS[42], 7, 8, TOKENS[43]]
    depths = [40, 40, 41, 41, 42, 43, 42, 43]
    batch = Pass(np.array(tokens), np.array(depths), np.arange(8), tree=np.array(parents))
    logits = backend.forward(batch).logits.copy()
    assert np.array_equal(logits[[1, 2, 4, 7]], whole[40:44])
    backend.cache.keep(40, [1, 2, 4, 7])
    assert np.array_equal(cut(backend, 45, 100), whole[44:])


def test_company_forks_and_snapshots_leave_every_bit(bundle: Bundle, whole: Any) -> None:
    backend = Alone(PagedBackend(bundle, CONTEXT), CONTEXT)
    cut(backend, 50)
    fork, far = backend.cache.fork(), backend.new_sequence(CONTEXT)
    texts = [(backend.cache, TOKENS[50:90], 50), (fork, TOKENS[50:52], 50), (far, TOKENS[:3], 0)]
    outputs = backend.forward_together([(cache, given(tokens, start)) for cache, tokens, start in texts])
    for output, expected in zip(outputs, (whole[50:90], whole[50:52], whole[:3]), strict=True):
        assert np.array_equal(output.logits, expected)
    kept = fork.snapshot()
    backend.forward_together([(fork, given(TOKENS[:5], 52))])
    backend.cache.clear()
    restore(backend.cache, kept)
    assert np.array_equal(cut(backend, 53, 100), whole[52:])
    part = backend.cache.snapshot(0, 98)
    assert part.rewindable_to(98) == 98 and part.rewindable_to(60) == 0


def test_a_pass_that_failed_is_run_again(bundle: Bundle, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Alone(PagedBackend(bundle, CONTEXT), CONTEXT)
    session = backend._session
    for start, stop in ((0, 60), (60, 61), (61, 70), (70, 100)):
        with monkeypatch.context() as patch:
            inner = session.run

            def fail(binding: Any, inner: Any = inner) -> None:
                inner(binding)
                raise PassCancelledError("Cancelled.")

            patch.setattr(session, "run", fail)
            with pytest.raises(PassCancelledError):
                feed(backend, TOKENS[start:stop])
        assert np.array_equal(feed(backend, TOKENS[start:stop]), whole[start:stop])


def test_what_a_state_cannot_do_is_refused(bundle: Bundle) -> None:
    backend = Alone(PagedBackend(bundle, CONTEXT), CONTEXT)
    cut(backend, 90)
    assert backend.cache.rewindable_to(40) == 0 and backend.cache.rewindable_to(85) == 85
    with pytest.raises(BackendError, match="cannot go back to 40 tokens"):
        backend.cache.trim(40)
    assert backend.cache.length == 90
    with pytest.raises(BackendError, match="too long: at most 28"):
        backend.forward(given(TOKENS[:30], 90, tree=np.arange(-1, 29)))
    with (
        edgeinfer.load(bundle.path, context=CONTEXT, threads=1) as model,
        pytest.raises(CapabilityError, match="recurrent layers"),
    ):
        model.generate(PROMPT, max_tokens=4, compute="exit")
    with pytest.raises(UsageError, match="recurrent layers"):
        edgeinfer.load(bundle.path, context=CONTEXT, overflow="window")


@pytest.mark.skipif(not releases_pages(), reason="pages of weights cannot be released here")
def test_streamed_weights_leave_every_bit(bundle: Bundle, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Alone(PagedBackend(bundle, CONTEXT), CONTEXT)
    backend, pages = stream_layers(inner, 2), inner._session
    for start, stop, kept in ((0, 60, 60), (60, 70, 63), (63, 64, 64), (64, 80, 80)):
        run_whole, passes = pages.run, 0

        def fail(binding: Any, run_whole: Any = run_whole) -> None:
            nonlocal passes
            run_whole(binding)
            passes += 1
            if passes == 2:
                raise PassCancelledError("Cancelled.")

        # A pass whose first window has run, and not all of them.
        with monkeypatch.context() as patch, pytest.raises(PassCancelledError):
            patch.setattr(pages, "run", fail)
            feed(backend, TOKENS[start:stop])
        assert np.array_equal(feed(backend, TOKENS[start:stop]), whole[start:stop])
        backend.cache.trim(kept)
    kept_rows = backend.cache.snapshot()
    assert np.array_equal(feed(backend, TOKENS[80:]), whole[80:])
    restore(backend.cache, kept_rows)
    assert np.array_equal(feed(inner, TOKENS[80:]), whole[80:])
    backend.close()


@EVERY
def test_drafting_leaves_the_text_as_it_is(bundle: Bundle) -> None:
    with edgeinfer.load(bundle.path, context=CONTEXT, threads=1) as model:
        plain = model.generate(PROMPT, max_tokens=60, temperature=0, speculation="off")
        for drafter in DRAFTERS:
            reply = model.generate(PROMPT, max_tokens=60, temperature=0, speculation=drafter)
            assert reply.token_ids == plain.token_ids, drafter
        prompts = [PROMPT, PROMPT[:30], f"Tom saw this: {PROMPT}", PROMPT]
        options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3}
        alone = [model.generate(prompt, speculation="off", **options).token_ids for prompt in prompts]
        together = model.generate_batch(prompts, speculation="ngram,recycle", **options)
        assert [reply.token_ids for reply in together] == alone
    with edgeinfer.load(bundle.path, context=CONTEXT, threads=1, draft_model=str(bundle.path)) as model:
        reply = model.generate(PROMPT, max_tokens=60, temperature=0, speculation="model")
    assert reply.token_ids == plain.token_ids


def test_a_draft_model_with_states_follows_accepted_tokens(bundle: Bundle, whole: Any) -> None:
    backend = Alone(PagedBackend(bundle, CONTEXT), CONTEXT)

    def forward(tokens: Any, positions: Any, rows: Any) -> Passes[Any]:
        (result,) = yield Evaluate(backend.model, [(backend.cache, Pass(tokens, positions, rows))])
        return result.logits

    follower, text = Follower(backend.cache, forward, 16), TOKENS.tolist()
    for head, drafted in ((50, 0), (50, 1), (50, 9), (53, 0), (53, 15), (68, 0), (68, 3), (70, 2), (90, 1)):
        for wrong in (0, 1):
            path = text[head : head + drafted]
            found = run_alone(follower.follow(text[:head], [*path[: drafted - wrong], 299][:drafted], 1))
        found = run_alone(follower.follow(text[:head], path, 1))
        assert np.array_equal(found[0], whole[head + drafted - 1])


def text_of(backend: PagedBackend, chunk: int, **options: Any) -> Text:
    return Text(backend, backend.new_sequence(CONTEXT), chunk, **options)


def greedy(engine: Text, prompt: Any, size: int = 6) -> list[int]:
    processor = LogitsProcessor(ReplyOptions(temperature=0), engine.backend.geometry.vocab_size, 0)
    steps = engine.generate(list(prompt), Sampler(processor, list(prompt)), max_tokens=size, stop_ids=frozenset())
    return [step.token for step in steps]


def test_turns_go_on_where_they_can(bundle: Bundle) -> None:
    engine = text_of(PagedBackend(bundle, CONTEXT), 16, prefixes=PrefixCache(8 << 20))
    one, two = TOKENS[:60].tolist(), TOKENS[40:90].tolist()
    said = greedy(engine, one)
    assert greedy(engine, [*one, *said[:5], 9, 9])[0] >= 0 and engine.prefill.cached == 65
    engine.forget()
    greedy(engine, one)
    for prompt, cached in (
        ([*one, 8, 8], 60),  # the reply is left out of the next turn: back to the end of the prompt
        (two, 0),
        ([*one, 8, 8, 7, 7], 62),  # what was kept of it while another text was there
        ([*two, 7], 50),
    ):
        reply = greedy(engine, prompt)
        assert engine.prefill.cached == cached
        assert reply == greedy(text_of(PagedBackend(bundle, CONTEXT), 128), prompt)


@EVERY
def test_a_session_continues(bundle: Bundle, tmp_path: Path) -> None:
    with edgeinfer.load(bundle.path, context=CONTEXT, threads=1) as model:
        model.generate(PROMPT, max_tokens=1, temperature=0)
        model.save_session(tmp_path / "talk")
        expected = model.generate(PROMPT + " and", max_tokens=8, temperature=0)
    with edgeinfer.load(bundle.path, context=CONTEXT, threads=1) as other:
        other.load_session(tmp_path / "talk")
        reply = other.generate(PROMPT + " and", max_tokens=8, temperature=0)
    assert reply.token_ids == expected.token_ids and reply.timings.cached_prompt_tokens > 10


SEARCHES: tuple[dict[str, Any], ...] = (
    {"search": "samples", "temperature": 0.8, "seed": 3},
    {"search": "beam", "temperature": 0},
)


@pytest.mark.slow
@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: search["search"])
def test_searches_find_the_same_as_in_one_cache(search: dict[str, Any]) -> None:
    floats = bundle_of("Qwen3_5", ExportConfig(bits=32), **DELTA).path
    found = []
    for backend in ("onnx", "reference"):
        with edgeinfer.load(floats, context=CONTEXT, threads=1, backend=backend) as model:
            found.append(model.generate(PROMPT, max_tokens=8, **search).token_ids)
    assert found[0] == found[1]


def test_the_plan_counts_the_states(bundle: Bundle) -> None:
    backend = Alone(PagedBackend(bundle, CONTEXT), CONTEXT)
    planned = memory_of(bundle, NATIVE)._cache("float32", CONTEXT)  # type: ignore[attr-defined]
    engine = Text(backend.model, backend.cache, 16)
    said = greedy(engine, TOKENS[:60].tolist(), 20)
    greedy(engine, [*TOKENS[:60].tolist(), *said, 3, 4, 5] * 1, 10)
    states = sum(4 * state.parameters for state in backend.geometry.states)  # without their rings
    assert states < backend.nbytes()["kv"] <= planned


CODE = """
import sys, hashlib
from pathlib import Path
from edgeinfer.bundle.opening import open_bundle
from tests.alone import Alone
from tests.runtime.test_states import CONTEXT, PagedBackend, cut
for path in sys.argv[1:]:
    backend = Alone(PagedBackend(open_bundle(Path(path)), CONTEXT), CONTEXT)
    print(hashlib.sha256(cut(backend, 50, 53, 100).tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    bundles = [made(kind) for kind in KINDS]
    environment = os.environ | {"EDGEINFER_NATIVE_ISA": isa}
    command = [sys.executable, "-c", CODE, *(str(bundle.path) for bundle in bundles)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    logits = [feed(Alone(PagedBackend(bundle, CONTEXT), CONTEXT), TOKENS) for bundle in bundles]
    assert found.split() == [hashlib.sha256(whole.tobytes()).hexdigest() for whole in logits]


@pytest.mark.parametrize("bundle", MODELS, indirect=True)
@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_cuts_threads_company_and_forks_leave_every_bit(kv: str, bundle: Bundle) -> None:
    backend, other = Alone(PagedBackend(bundle, 64, kv=kv), 64), Alone(PagedBackend(bundle, 64, kv=kv, threads=2), 64)
    whole = feed(backend, FEW)
    parts = np.concatenate([feed(other, FEW[a:b]) for a, b in ((0, 17), (17, 18), (18, 40))])
    assert np.array_equal(parts, whole)
    backend.cache.trim(20)
    fork = backend.cache.fork()
    pair = [(backend.cache, given(FEW[20:25], 20)), (fork, given(FEW[20:22], 20))]
    outputs = [output.logits.copy() for output in backend.forward_together(pair)]
    assert np.array_equal(outputs[0], whole[20:25]) and np.array_equal(outputs[1], whole[20:22])
    kept = backend.cache.snapshot()
    backend.cache.clear()
    restore(backend.cache, kept)
    assert np.array_equal(feed(backend, FEW[25:]), whole[25:])


@pytest.mark.parametrize("bundle", ["Lfm2"], indirect=True)
def test_what_recurrent_layers_cannot_do_is_refused_by_name(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recurrent layers"):
        edgeinfer.load(bundle.path, context=128, overflow="window")
    with pytest.raises(BundleError, match="no graph for the portable layout"):
        edgeinfer.load(bundle.path, context=128, native=False)
    with pytest.raises(UsageError, match="no graph for the portable layout"):
        convert_bundle(bundle, PORTABLE, tmp_path / "portable")
    with pytest.raises(UsageError, match="not a plain Llama"):
        next(iter(checkpoint_tensors(bundle)))
    with pytest.raises(UnsupportedArchitectureError, match="Portable bundles"):
        export_checkpoint(checkpoint_of("Lfm2", **LAYERS), tmp_path / "bundle", ExportConfig(bits=8, layout="portable"))


@pytest.mark.parametrize("bundle", ["Gemma4", "Gemma3n"], indirect=True)
def test_a_layer_whose_cache_is_read_attends_with_its_readers(bundle: Bundle) -> None:
    spec = bundle.manifest.decoder
    assert spec is not None and spec.kv_sources == (0, 1, 2, 1, 2, 1)
    mask = np.ones(12, np.bool_)
    mask[[2, 3, 5, 8]] = False  # attention and MLP of layer 1, which layers 3 and 5 read
    batch = Pass(FEW, np.arange(40), np.arange(40), layer_mask=mask)
    wanted = Alone(ReferenceBackend(bundle, 64), 64).forward(batch).logits
    backend = Alone(PagedBackend(bundle, 64), 64)
    assert np.linalg.norm(backend.forward(batch).logits - wanted) < 0.03 * np.linalg.norm(wanted)
    whole = feed(Alone(PagedBackend(bundle, 64), 64), FEW)
    # The first layers alone, then the others: nothing that was written is written again.
    backend.cache.clear()
    first = np.arange(12) < 8
    hidden = backend.forward(Pass(FEW, np.arange(40), np.arange(0), layer_mask=first)).hidden
    assert hidden is not None
    hidden = hidden.copy()
    backend.cache.trim(0)
    resumed = Pass(FEW, np.arange(40), np.arange(40), layer_mask=~first, hidden=hidden)
    assert np.array_equal(backend.forward(resumed).logits, whole)


@pytest.mark.parametrize("bundle", ["Gemma4"], indirect=True)
def test_what_shared_caches_cannot_do_is_refused_by_name(bundle: Bundle, tmp_path: Path) -> None:
    for overflow in ("window", "cluster"):
        with pytest.raises(UsageError, match="full_heads"):
            edgeinfer.load(bundle.path, context=128, overflow=overflow)
    with pytest.raises(UsageError, match="not a plain Llama"):
        next(iter(checkpoint_tensors(bundle)))
    for config, named in (
        (ExportConfig(bits=8, layout="portable"), "layers that share keys and values"),
        (ExportConfig(bits=8, format="gguf"), "no shared caches but of"),
    ):
        with pytest.raises(UnsupportedArchitectureError, match=named):
            export_checkpoint(checkpoint_of("Gemma4", **SHARING), tmp_path / "bundle", config)
    with pytest.raises(UnsupportedArchitectureError, match="kv_sources"):
        assert bundle.manifest.decoder is not None
        LayerWalk(bundle.manifest.decoder, bundle.tensor, [4], lambda _, weight, __: weight, (False,), hessian=False)


@pytest.mark.parametrize("bundle", ["DeepseekV3"], indirect=True)
def test_latent_attention_caches_little_and_refuses_by_name(bundle: Bundle, tmp_path: Path) -> None:
    """A small vector and one key of each token are cached; a full context forgets its middle."""
    geometry = bundle.manifest.geometry
    assert geometry.kv_bytes_per_token() == 4 * geometry.num_layers * (32 + 8)
    page_bytes = PageLayout.of(geometry, "float32").page_bytes
    assert page_bytes - 4096 < PAGE * geometry.kv_bytes_per_token() <= page_bytes
    with edgeinfer.load(bundle.path, context=64, threads=1, overflow="window") as model:
        reply = model.generate(PROMPT, max_tokens=96, temperature=0, speculation="off")
    assert len(reply.token_ids) == 96 or reply.finish_reason == "stop"
    with pytest.raises(UsageError, match="latent attention"):
        edgeinfer.load(bundle.path, context=128, overflow="cluster")
    with pytest.raises(BundleError, match="no graph for the portable layout"):
        edgeinfer.load(bundle.path, context=128, native=False)
    with pytest.raises(UnsupportedArchitectureError, match="Portable bundles of a decoder with latent attention"):
        config = ExportConfig(bits=8, layout="portable")
        export_checkpoint(checkpoint_of("DeepseekV3", **LATENT), tmp_path / "bundle", config)
    assert not (tmp_path / "bundle").exists()
