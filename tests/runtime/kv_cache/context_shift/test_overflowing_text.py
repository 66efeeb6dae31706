"""Texts that outgrow the context: the same however they were drafted, cut into passes or taken up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.store import Bundle
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.kv_cache.context_shift.policy import Lost
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES, make_context_shift
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.sampling.distributions import Logits
from edgeinfer.runtime.sampling.sampler import LogitsProcessor, Sampler
from edgeinfer.runtime.speculation.decoding import SpeculativeDecoding
from edgeinfer.runtime.speculation.drafters.method import DrafterParts, drafter_method
from tests.alone import Alone
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend
from tests.runtime.speculation.prices import FLAT, Prices, eager_rounds

CAPACITY = 48
CYCLE = [40, 51, 62, 73, 84, 95]
FEW = dict.fromkeys((40, 51, 62), 50.0)
GREEDY = ReplyOptions(logit_bias=FEW)
SAMPLED = ReplyOptions(temperature=0.8, top_p=0.9, seed=5, logit_bias=FEW)
ALL = ("copy", "recycle", "exit", "bits")
DRAFTED: list[tuple[str, tuple[str, ...]]] = [
    ("window", (name,)) for name in ("copy", "ngram", "recycle", "exit", "bits")
]
DRAFTED += [(policy, names) for policy in POLICIES for names in (("exit",), ALL)][1:]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
# Once the text is longer than its own context it has nothing to say.
DRAFTED += [("window", ("model",))]
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_config = pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


class Witness(Sampler):
    """A sampler that keeps the logits and the positions that tokens were chosen from."""

    def __init__(self, config: ReplyOptions, vocabulary: int, prompt: Sequence[int]) -> None:
        super().__init__(LogitsProcessor(config, vocabulary, config.seed or 0), prompt)
        self.logits: dict[int, Floats] = {}

    def sample(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:
        self.logits[position] = logits.astype(np.float32)
        return super().sample(logits, position, path)


class Writer:
    """A model whose context is small, and its engine."""

    def __init__(self, bundle: Bundle, policy: str, capacity: int = CAPACITY, chunk: int = 8) -> None:
        self.bundle = bundle
        self.backend: Alone[Any] = make_graph_backend(bundle, capacity, weighed=policy == "cluster")
        shift = make_context_shift(policy, bundle, self.backend.model, self.backend.cache)
        self.engine = Text(self.backend.model, self.backend.cache, chunk, shift)

    def write(
        self, prompt: Sequence[int], config: ReplyOptions, count: int, drafters: Sequence[str] = ()
    ) -> tuple[list[int], Witness, SpeculativeDecoding | None]:
        """Tokens of a reply."""
        sampler = Witness(config, self.backend.geometry.vocab_size, prompt)
        rounds = self._rounds(sampler, config, drafters) if drafters else None
        steps = self.engine.generate(prompt, sampler, max_tokens=count, stop_ids=frozenset(), strategy=rounds)
        return [step.token for step in steps], sampler, rounds

    def _rounds(self, sampler: Witness, config: ReplyOptions, names: Sequence[str]) -> SpeculativeDecoding:
        small = make_graph_backend(self.bundle, self.backend.cache.capacity) if "model" in names else None
        draft, cache = (None, None) if small is None else (small.model, small.cache)
        parts = DrafterParts(self.backend.model, self.backend.cache, draft, cache, 8, TunedDrafting())
        if not self.backend.capabilities.high_planes:
            names = [name for name in names if name != "bits"] or pytest.skip("these weights have one plane")
        made = [drafter_method(name).make(parts) for name in names]
        return eager_rounds(self.engine, sampler, made, Prices(FLAT, {"exit": 0.1, "bits": 0.1}))


@pytest.fixture(scope="module", params=[("8-bit", "native"), ("4-bit", "portable")], ids="-".join)
def bundle(request: pytest.FixtureRequest) -> Bundle:
    width, layout = request.param
    if layout == "native":
        require_kernel()
    config = ExportConfig(8 if width == "8-bit" else 4, 64, keep_small=False, layout=layout, calibration="none")
    return bundle_of("qwen2", config, **SIZES)


@pytest.fixture(scope="module")
def writer(bundle: Bundle) -> Iterator[Callable[..., Writer]]:
    made: dict[tuple[str, int], Writer] = {}

    def make(policy: str, chunk: int = 8) -> Writer:
        if (policy, chunk) not in made:
            made[policy, chunk] = Writer(bundle, policy, chunk=chunk)
        made[policy, chunk].engine.forget()
        return made[policy, chunk]

    yield make
    for each in made.values():
        each.backend.close()


def assert_same(mine: tuple[list[int], Witness, Any], theirs: tuple[list[int], Witness, Any]) -> None:
    assert mine[0] == theirs[0]
    for position, logits in theirs[1].logits.items():
        assert np.array_equal(mine[1].logits[position], logits), f"logits of position {position}"


@each_config
@pytest.mark.parametrize(("policy", "drafters"), DRAFTED, ids=lambda p: p if isinstance(p, str) else "+".join(p))
def test_drafting_gives_the_text_of_plain_decoding_bit_for_bit(
    writer: Callable[..., Writer], drafters: tuple[str, ...], policy: str, config: ReplyOptions
) -> None:
    prompt = CYCLE * 3
    plain = writer(policy).write(prompt, config, 70)
    lost = writer(policy).engine.lost
    assert lost == Lost(), "forgotten"
    subject = writer(policy)
    drafted = subject.write(prompt, config, 70, drafters)
    assert subject.engine.lost.events >= 3
    assert drafted[2] is not None
    assert drafted[2].speculation.drafted > 10
    assert_same(drafted, plain)


@each_policy
@pytest.mark.parametrize("size", [47, 48, 49, 54, 55, 130])
def test_a_long_prompt_overflows_like_a_written_text(writer: Callable[..., Writer], policy: str, size: int) -> None:
    whole = [*CYCLE, *writer(policy).write(CYCLE, SAMPLED, 160)[0]]
    for chunk in (8, 5, 64):
        subject = writer(policy, chunk)
        reply, _, _ = subject.write(whole[:size], SAMPLED, 12)
        assert reply == whole[size : size + 12]
        assert subject.engine.prefill.evaluated == size


@given(data=st.data())
@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_came_before_never_changes_a_reply(writer: Callable[..., Writer], data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from([*POLICIES]))
    subject, expected = writer(policy), {}
    text: list[int] = CYCLE * 2
    for _ in range(4):
        shared = data.draw(st.integers(1, len(text)))
        added = data.draw(st.lists(st.sampled_from(CYCLE), min_size=1, max_size=60))
        prompt = [*text[:shared], *added]
        since = subject.engine.lost.since
        reply, _, _ = subject.write(prompt, GREEDY, 6)
        assert subject.engine.prefill.cached + subject.engine.prefill.evaluated == len(prompt)
        if shared < since and prompt[: since + 1] != text[: since + 1]:
            assert subject.engine.prefill.cached == 0
        expected[tuple(prompt)] = reply
        text = [*prompt, *reply]
    for prompt_, reply_ in expected.items():
        assert writer(policy).write(prompt_, GREEDY, 6)[0] == reply_
