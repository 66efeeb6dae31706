"""GGUF's types in bundles: every bit of a file's blocks comes back, and stands for what the gguf package says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.codecs import CODECS
from edgeinfer.bundle.gguf.metadata import ggml_type
from edgeinfer.bundle.kinds import KINDS, Segment, join_segments, pack_blocks, read_blocks, unpack_blocks
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, STATIC
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.packing import QuantizedMatrix, QuantizedShape, blocks_of_file
from edgeinfer.bundle.tables import Outline, convert_table, file_bytes, lay_out
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.quant.policy import QuantScheme
from tests.gguf_blocks import HALVES, Bytes, random_rows, values_of
from tests.kernel import require_kernel
from tests.tables import each_row

ALL = sorted(KINDS)
BLOCKS = [name for name in ALL if not KINDS[name].floats]


@pytest.fixture(autouse=True, scope="module")
def _library() -> None:
    require_kernel()


@each_row("kind", ALL)
def test_a_kind_is_ggmls_type(kind: str) -> None:
    of, theirs = KINDS[kind], ggml_type(kind)
    assert (of.number, of.values, of.nbytes) == (theirs.number, theirs.block_values, theirs.block_bytes)


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(ALL),
    half=st.integers(1, 40),
    blocks=st.integers(1, 12),
    paired=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_blocks_come_back_and_stand_for_what_gguf_says(
    seed: int, kind: str, half: int, blocks: int, paired: bool
) -> None:
    rng, k = np.random.default_rng(seed), blocks * KINDS[kind].values
    rows = random_rows(rng, kind, 2 * half if paired else 2 * half - 1, k)
    tiles = pack_blocks(kind, rows, k, paired=paired, name="x")
    assert [run.shape for run in tiles] == [(-(-len(rows) // 32), size) for size in KINDS[kind].tile_bytes(k)]
    np.testing.assert_array_equal(unpack_blocks(kind, tiles, len(rows), k, paired=paired), rows)
    wanted = values_of(kind, rows)
    # Sums of a product and a minimum are rounded once here and twice there.
    np.testing.assert_allclose(read_blocks(kind, rows, k), wanted, rtol=0, atol=np.spacing(np.abs(wanted).max()))


@each_row("kind", ALL)
def test_scales_that_are_not_finite_are_refused(kind: str) -> None:
    rng, k = np.random.default_rng(3), 2 * KINDS[kind].values
    for at in HALVES[kind]:
        for half in (b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"):
            rows = random_rows(rng, kind, 40, k)
            rows[35, KINDS[kind].nbytes + at : KINDS[kind].nbytes + at + 2] = np.frombuffer(half, np.uint8)
            with pytest.raises(BundleError, match=r"layers\.0\.up has scales or values that are not finite"):
                pack_blocks(kind, rows, k, paired=False, name="layers.0.up")
    if kind == "BF16":
        rows = random_rows(rng, kind, 40, k)
        rows[39, 2:4] = np.frombuffer(b"\x80\xff", np.uint8)
        with pytest.raises(BundleError, match="not finite"):
            pack_blocks(kind, rows, k, paired=False, name="x")
    if kind == "MXFP4":
        rows = random_rows(rng, kind, 40, k)
        rows[39, 17] = 255
        with pytest.raises(BundleError, match="not finite"):
            read_blocks(kind, rows, k)


def entry_of(*segments: Segment, k: int, paired: bool = False, factor: float = 1.0) -> TensorEntry:
    """A matrix in its place behind another tensor."""
    scheme = QuantScheme.of_file(segments)
    n = sum(segment.rows for segment in segments)
    shape = QuantizedShape(n, k, scheme.bits, scheme.block_size, False, paired, segments=scheme.segments)
    outlines = [Outline("norm", (7,)), Outline("layers.0.attn.qkv", (n, k), shape, factor=factor)]
    return lay_out(outlines, NATIVE)[1]


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), paired=st.booleans())
@settings(max_examples=60, deadline=None)
def test_segments_are_written_and_read_back(
    data: st.DataObject, seed: int, paired: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng, path = np.random.default_rng(seed), tmp_path_factory.mktemp("kinds") / "weights.bin"
    several = st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=1 if paired else 3)
    names = data.draw(several if paired else several | st.sampled_from([["F16"], ["BF16"]]))
    k = 256 * data.draw(st.integers(1, 3))
    segments = join_segments(Segment(name, 2 * data.draw(st.integers(1, 50))) for name in names)
    entry = entry_of(*segments, k=k, paired=paired)
    rows: list[Bytes] = [random_rows(rng, segment.kind, segment.rows, k) for segment in segments]
    starts = np.cumsum([0, *(segment.rows for segment in segments)])

    def asked(start: int, stop: int) -> QuantizedMatrix:
        at = int(np.searchsorted(starts, start, side="right")) - 1
        return blocks_of_file(rows[at][start - starts[at] : stop - starts[at]])

    with path.open("wb") as file:
        file.truncate(file_bytes([entry]))
        CODECS[NATIVE].write(file, entry, asked)
    for at, segment in enumerate(segments):
        start = data.draw(st.integers(0, segment.rows - 1))
        stop = data.draw(st.integers(start + 1, segment.rows))
        found = CODECS[NATIVE].read(path, entry, int(starts[at]) + start, int(starts[at]) + stop)
        np.testing.assert_array_equal(found.data, rows[at][start:stop])


def test_neighbours_of_one_kind_are_one_segment() -> None:
    entry = entry_of(Segment("Q4_K", 64), Segment("Q4_K", 16), Segment("Q6_K", 16), k=512)
    assert entry.segments == (Segment("Q4_K", 80), Segment("Q6_K", 16))
    assert (entry.bits, entry.layout) == (6, NATIVE)
    assert entry.nbytes == 3 * 2 * (8 * 576) + 1 * 2 * (8 * 840)


@each_row(
    ("change", "what"),
    [
        ({"segments": (Segment("Q4_K", 80), Segment("Q6_K", 8))}, "88 rows"),
        ({"segments": (Segment("Q4_K", 80), Segment("Q9_K", 16))}, "unknown types"),
        ({"segments": (Segment("Q6_K", 80), Segment("Q4_K", 16))}, "inconsistent data"),
        ({"segments": (Segment("F16", 80), Segment("Q6_K", 16)), "bits": 16}, "floats among"),
        ({"paired": True}, "impossible segments"),
        ({"bits": 4}, "4 bits"),
        ({"factor": 0.0}, "factor of 0"),
        ({"segments": ()}, "6 bits"),
        ({"shape": (96, 520)}, "incomplete blocks"),
    ],
)
def test_damaged_entries_are_refused(change: dict[str, object], what: str) -> None:
    entry = entry_of(Segment("Q4_K", 80), Segment("Q6_K", 16), k=512)
    with pytest.raises(BundleError, match=what):
        dataclasses.replace(entry, **change)  # type: ignore[arg-type]


def test_other_layouts_refuse_them() -> None:
    entry = entry_of(Segment("Q4_K", 80), k=512)
    for layout in (PORTABLE, STATIC):
        with pytest.raises(UsageError, match="native layout alone"):
            convert_table([entry], layout)


def test_a_tied_head_has_a_factor_of_its_own(tmp_path: Path) -> None:
    scheme = QuantScheme.of_file([Segment("Q8_0", 64)])
    shape = QuantizedShape(64, 32, 8, 32, False, segments=scheme.segments)
    outlines = [Outline("embed", (64, 32), shape, factor=5.5), Outline("head", (64, 32), shares="embed")]
    embed, head = lay_out(outlines, NATIVE)
    assert (embed.factor, head.factor, embed.data) == (5.5, 1.0, head.data)
    assert [tensor.factor for tensor in convert_table([embed, head], NATIVE)] == [5.5, 1.0]
