"""Decoders whose recurrent layers have a state: the same bits however a text is cut, drafted, gone back in and kept."""

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
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BackendError, CapabilityError, UsageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.options.reply import GenerationConfig
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, PassCancelledError
from edgeinfer.runtime.backends.onnx.memory import memory_of
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.onnx.windowed import StreamedBackend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.kv_cache.prefix_cache import PrefixCache
from edgeinfer.runtime.native.library import LIBRARY
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.drafters.logit_drafter import Follower
from edgeinfer.runtime.system.memory import releases_pages
from tests.runtime.models import bundle_of

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
DRAFTERS = ("ngram", "exit", "skip", "bits", "recycle")


# By the name of transformers' classes: a kind of recurrence, in other layers than attention, with it, without any.
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3_5": DELTA,
    "FalconH1": SCAN | {"mamba_d_ssm": 128, "mamba_rms_norm": True},
    "GraniteMoeHybrid": SCAN | {"layer_types": DELTA["layer_types"], "num_local_experts": 0},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "NemotronH": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
}


@pytest.fixture(scope="module", params=KINDS)
def bundle(request: pytest.FixtureRequest) -> Bundle:
    config = ExportConfig(bits=8, group_size=32, keep_small=False)
    return bundle_of(request.param, config, **({"tie_word_embeddings": True} | KINDS[request.param]))


@pytest.fixture(scope="module")
def whole(bundle: Bundle) -> Any:
    """The logits of TOKENS, evaluated at once."""
    return run(PagedBackend(bundle, CONTEXT), TOKENS)


def given(tokens: Any, start: int, **further: Any) -> ForwardInput:
    size = len(tokens)
    return ForwardInput(np.asarray(tokens, np.int64), np.arange(start, start + size), np.arange(size), **further)


def run(backend: Backend, tokens: Any) -> Any:
    return backend.forward(given(tokens, backend.cache.length)).logits.copy()


def cut(backend: PagedBackend, *ends: int) -> Any:
    """The logits of passes that end there."""
    starts = (backend.cache.length, *ends)
    return np.concatenate([run(backend, TOKENS[a:b]) for a, b in zip(starts, ends, strict=False)])


def test_cuts_and_threads_leave_every_bit(bundle: Bundle, whole: Any) -> None:
    # Passes as long as a draft, longer, and longer than a ring, one after the other and token by token.
    for ends in ((1, 2, 3, 20, 29, 30, 100), (60, 61, 100), (5, 55, 100), (*range(40, 100), 100)):
        for threads in (1, 2):
            assert np.array_equal(cut(PagedBackend(bundle, CONTEXT, threads=threads), *ends), whole)


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_what_was_cut_off_leaves_no_trace(kv: str, bundle: Bundle) -> None:
    backend, other = PagedBackend(bundle, CONTEXT, kv=kv), PagedBackend(bundle, CONTEXT, kv=kv)
    expected = run(other, TOKENS)
    cut(backend, 50)
    for start, drafted, kept in ((50, 16, 3), (53, 1, 0), (53, 20, 20), (73, 9, 0), (73, 12, 12)):
        run(backend, (TOKENS[start : start + drafted] + (np.arange(drafted) >= kept)) % 300)
        backend.cache.trim(start + kept)
    assert np.array_equal(cut(backend, 100), expected[85:])


def test_trees_leave_every_bit_on_each_of_their_paths(bundle: Bundle, whole: Any) -> None:
    backend = PagedBackend(bundle, CONTEXT, threads=2)
    cut(backend, 40)
    parents = [-1, -1, 1, 0, 2, 4, 2, 4]  # the text is the rows 1, 2, 4, 7
    tokens = [5, TOKENS[40], TOKENS[41], 6, TOKENS[42], 7, 8, TOKENS[43]]
    depths = [40, 40, 41, 41, 42, 43, 42, 43]
    batch = ForwardInput(np.array(tokens), np.array(depths), np.arange(8), tree=np.array(parents))
    logits = backend.forward(batch).logits.copy()
    assert np.array_equal(logits[[1, 2, 4, 7]], whole[40:44])
    backend.cache.keep(40, [1, 2, 4, 7])
    assert np.array_equal(cut(backend, 45, 100), whole[44:])


def test_company_forks_and_snapshots_leave_every_bit(bundle: Bundle, whole: Any) -> None:
    backend = PagedBackend(bundle, CONTEXT)
    cut(backend, 50)
    fork, far = backend.cache.fork(), backend.new_sequence(CONTEXT)
    texts = [(backend.cache, TOKENS[50:90], 50), (fork, TOKENS[50:52], 50), (far, TOKENS[:3], 0)]
    outputs = backend.forward_together([(cache, given(tokens, start)) for cache, tokens, start in texts])
    for output, expected in zip(outputs, (whole[50:90], whole[50:52], whole[:3]), strict=True):
        assert np.array_equal(output.logits, expected)
    kept = fork.snapshot()
    backend.forward_together([(fork, given(TOKENS[:5], 52))])
    backend.cache.clear()
    backend.cache.restore(kept)
    assert np.array_equal(cut(backend, 53, 100), whole[52:])
    part = backend.cache.snapshot(0, 98)
    assert part.resumable(98) == 98 and part.resumable(60) == 0


def test_a_pass_that_failed_is_run_again(bundle: Bundle, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = PagedBackend(bundle, CONTEXT)
    session = backend._session
    for start, stop in ((0, 60), (60, 61), (61, 70), (70, 100)):
        with monkeypatch.context() as patch:
            inner = session.run

            def fail(binding: Any, inner: Any = inner) -> None:
                inner(binding)
                raise PassCancelledError("Cancelled.")

            patch.setattr(session, "run", fail)
            with pytest.raises(PassCancelledError):
                run(backend, TOKENS[start:stop])
        assert np.array_equal(run(backend, TOKENS[start:stop]), whole[start:stop])


def test_what_a_state_cannot_do_is_refused(bundle: Bundle) -> None:
    backend = PagedBackend(bundle, CONTEXT)
    cut(backend, 90)
    assert backend.cache.resumable(40) == 0 and backend.cache.resumable(85) == 85
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
    inner = PagedBackend(bundle, CONTEXT)
    backend, pages = StreamedBackend(inner, 2), inner._session
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
            run(backend, TOKENS[start:stop])
        assert np.array_equal(run(backend, TOKENS[start:stop]), whole[start:stop])
        backend.cache.trim(kept)
    kept_rows = backend.cache.snapshot()
    assert np.array_equal(run(backend, TOKENS[80:]), whole[80:])
    backend.cache.restore(kept_rows)
    assert np.array_equal(run(inner, TOKENS[80:]), whole[80:])
    backend.close()


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
    backend = PagedBackend(bundle, CONTEXT)

    def forward(tokens: Any, positions: Any, rows: Any) -> Any:
        return backend.forward(ForwardInput(tokens, positions, rows)).logits

    follower, text = Follower(backend, forward, 16), TOKENS.tolist()
    for head, drafted in ((50, 0), (50, 1), (50, 9), (53, 0), (53, 15), (68, 0), (68, 3), (70, 2), (90, 1)):
        for wrong in (0, 1):
            path = text[head : head + drafted]
            found = follower.follow(text[:head], [*path[: drafted - wrong], 299][:drafted], 1)
        found = follower.follow(text[:head], path, 1)
        assert np.array_equal(found[0], whole[head + drafted - 1])


def greedy(engine: Engine, prompt: Any, size: int = 6) -> list[int]:
    processor = LogitsProcessor(GenerationConfig(temperature=0), engine.backend.geometry.vocab_size, 0)
    steps = engine.generate(list(prompt), Sampler(processor, list(prompt)), max_tokens=size, stop_ids=frozenset())
    return [step.token for step in steps]


def test_turns_go_on_where_they_can(bundle: Bundle) -> None:
    engine = Engine(PagedBackend(bundle, CONTEXT), 16, prefixes=PrefixCache(8 << 20))
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
        assert reply == greedy(Engine(PagedBackend(bundle, CONTEXT), 128), prompt)


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
    {"search": "lookahead", "temperature": 0},
    {"search": "contrast", "temperature": 0, "method_options": {"lame_prompt": "A dog"}},
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
    backend = PagedBackend(bundle, CONTEXT)
    planned = memory_of(bundle, NATIVE)._cache("float32", CONTEXT)  # type: ignore[attr-defined]
    engine = Engine(backend, 16)
    said = greedy(engine, TOKENS[:60].tolist(), 20)
    greedy(engine, [*TOKENS[:60].tolist(), *said, 3, 4, 5] * 1, 10)
    states = sum(4 * state.parameters for state in backend.geometry.states)  # without their rings
    assert states < backend.nbytes()["kv"] <= planned


CODE = """
import sys, hashlib
from pathlib import Path
from tests.runtime.test_states import CONTEXT, TOKENS, PagedBackend, cut, open_bundle
print(hashlib.sha256(cut(PagedBackend(open_bundle(Path(sys.argv[1])), CONTEXT), 50, 53, 100).tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_every_instruction_set_gives_the_same_bits(isa: str, bundle: Bundle, whole: Any) -> None:
    environment = os.environ | {"EDGEINFER_NATIVE_ISA": isa}
    command = [sys.executable, "-c", CODE, str(bundle.path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True).stdout
    assert found.strip() == hashlib.sha256(whole.tobytes()).hexdigest()
