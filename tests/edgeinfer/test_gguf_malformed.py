"""Malformed GGUF files of every kind known to have harmed a reader: each is refused, soon and in little memory."""

from __future__ import annotations

import shutil
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.gguf.metadata import GgufArray
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError, TemplateError
from edgeinfer.tokenizing import boundary_ids, chat_template
from tests.cli import edgeinfer, edgeinfer_process, refuses
from tests.gguf_builder import ARRAY, INT32, STRING, UINT32, Builder, Tensor, small_model
from tests.gguf_corpus import CASES, GIB, Case, u64
from tests.tables import each_row

_MOST_BYTES = 64_000_000
_MOST_LINES = 20_000  # of Python that run; a good file takes a third
_UINT8 = 0


@contextmanager
def little_work(most_lines: int = _MOST_LINES) -> Iterator[None]:
    """Within, few lines of Python run and little memory is taken."""
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    tracemalloc.start()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert lines < most_lines
    assert peak < _MOST_BYTES


def refused(path: Path, most_lines: int = _MOST_LINES) -> BundleError:
    """Opens a file that must be refused with little work."""
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    # Again, as counting slows everything down several times and hides it from whoever else looks on.
    with little_work(most_lines), pytest.raises(BundleError):
        open_bundle(path)
    assert caught.value.hint
    assert str(caught.value).replace(str(path.parent), "").isprintable()
    assert len(caught.value.message.replace(str(path.parent), "")) < 400
    return caught.value


def write(path: Path, made: Builder | bytes) -> Path:
    path.write_bytes(made if isinstance(made, bytes) else made.build())
    return path


def test_the_corpus_is_made_from_a_good_file(tmp_path: Path) -> None:
    assert len(CASES) >= 60
    bundle = open_bundle(small_model().write(tmp_path / "model.gguf"))
    assert bundle.manifest.name == "Tiny"


def test_all_malformed_files_are_refused(tmp_path: Path) -> None:
    """One after the other; those that are not are named."""
    opened = []
    for name, case in CASES.items():
        try:
            open_bundle(write(tmp_path / "model.gguf", case()))
        except BundleError as error:
            assert error.hint, name
        else:
            opened.append(name)
    assert opened == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_malformed_files_are_refused_with_little_work(tmp_path: Path, case: Case) -> None:
    refused(write(tmp_path / "model.gguf", case()))


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    builder = small_model()
    whole = builder.build()
    for end in sorted(
        {place + step for place in builder.boundaries for step in (-1, 0, 1) if place + step < len(whole)}
    ):
        if end > len(whole) - 32:  # the padding behind the last tensor may be missing
            continue
        refused(write(tmp_path / "model.gguf", whole[:end]))


def test_padding_at_the_end_may_be_missing(tmp_path: Path) -> None:
    builder = small_model()
    builder.tensors[-1].data += bytes(16)
    builder.tensors[-1].dims = [12]
    whole = builder.build()
    assert len(open_bundle(write(tmp_path / "model.gguf", whole[:-16])).gguf.tensors) == 8


# Files that are large, but of holes: what would take long or much memory if it were read.


def sparse(path: Path, head: bytes, size: int) -> Path:
    path.write_bytes(head)
    with path.open("r+b") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("count", "most_lines"),
    [pytest.param(1_500_000, 5 * 1_500_000, marks=pytest.mark.slow), (100_000_000, _MOST_LINES)],
)
def test_millions_of_empty_strings_are_refused(tmp_path: Path, count: int, most_lines: int) -> None:
    entry = u64(1) + b"x" + struct.pack("<II", ARRAY, STRING)
    head = b"GGUF" + struct.pack("<I", 3) + u64(0, 1) + entry + u64(count)
    refused(sparse(tmp_path / "model.gguf", head, 2 * GIB), most_lines)


def test_a_gibibyte_of_numbers_is_refused(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<I", 3) + u64(0, 1) + u64(1) + b"x" + struct.pack("<II", ARRAY, _UINT8) + u64(GIB)
    assert "header has more than" in refused(sparse(tmp_path / "model.gguf", head, 2 * GIB)).message


@each_row("counts", [(60_000, 0), (0, 4000)])
def test_many_entries_of_zeros_are_refused(tmp_path: Path, counts: tuple[int, int]) -> None:
    head = b"GGUF" + struct.pack("<I", 3) + u64(*counts)
    refused(sparse(tmp_path / "model.gguf", head, 2 * GIB))


def test_many_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    builder = small_model()
    builder.tensors += [Tensor("same", [8], bytes(32)) for _ in range(20_000)]
    assert "there twice" in refused(builder.write(tmp_path / "model.gguf")).message


def test_many_tensors_at_one_place_are_refused(tmp_path: Path) -> None:
    builder = small_model()
    builder.tensors += [Tensor(f"t{i}", [8], b"", offset=0) for i in range(20_000)]
    assert "overlaps" in refused(builder.write(tmp_path / "model.gguf")).message


# Parts of a model that was split


def split_model(folder: Path, *, count: int = 2, **changes: Any) -> list[Path]:
    """A model in two files; changes are of the second one's metadata."""
    whole = small_model()
    total = len(whole.tensors)

    def marks(number: int) -> dict[str, Any]:
        return {"split__no": (UINT32, number), "split__count": (UINT32, count), "split__tensors__count": (INT32, total)}

    first = small_model(**marks(0))
    first.tensors = whole.tensors[:3]
    second = Builder({k.replace("__", "."): v for k, v in (marks(1) | changes).items() if v}, whole.tensors[3:])
    paths = [folder / f"m-0000{number}-of-0000{count}.gguf" for number in (1, 2)]
    return [first.write(paths[0]), second.write(paths[1])]


def test_parts_are_one_model(tmp_path: Path) -> None:
    paths = split_model(tmp_path)
    bundle = open_bundle(paths[0])
    assert [tensor.split for tensor in bundle.gguf.tensors] == [0] * 3 + [1] * 5
    assert sorted(bundle.manifest.files) == [path.name for path in paths]
    assert bundle.manifest.weight_bytes == sum(path.stat().st_size for path in paths)
    assert main(["inspect", str(paths[0]), "--tensors"]) == 0


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first, second = split_model(tmp_path)
    assert "not the first" in refused(second).message or "split.no" in refused(second).message
    renamed = first.rename(tmp_path / "model.gguf")
    assert "name does not say so" in refused(renamed).message
    renamed.rename(first)
    for changes in (
        {"split__no": (UINT32, 0)},
        {"split__no": None},
        {"split__count": (UINT32, 3)},
        {"split__tensors__count": (INT32, 9)},
    ):
        split_model(tmp_path, **changes)
        refused(first)
    split_model(tmp_path)
    shutil.copy(first, second)
    refused(first)
    second.write_bytes(b"GGUF")
    refused(first)
    second.unlink()
    assert "is missing" in refused(first).message


def test_tensors_in_two_parts_are_refused(tmp_path: Path) -> None:
    first, second = split_model(tmp_path)
    again = Builder(
        {"split.no": (UINT32, 1), "split.count": (UINT32, 2), "split.tensors.count": (INT32, 8)},
        small_model().tensors[2:7],
    )
    again.write(second)
    assert "in two of its parts" in refused(first).message


def test_a_part_of_thousands_is_refused(tmp_path: Path) -> None:
    builder = small_model(split__count=(UINT32, 65_535))
    refused(builder.write(tmp_path / "m-00001-of-65535.gguf"))


# What only harms when it is used


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{% set x = namespace(v='a') %}{% for i in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}",
        "{{ messages.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{" * 5000,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "x" * 2_000_000,
    ],
    ids=["loops", "repetition", "doubling", "internals", "recursion", "braces", "brackets", "length"],
)
def test_a_hostile_template_fails(tmp_path: Path, template: str) -> None:
    """As any other does; how much work a template may do is tested where that is decided."""
    bundle = open_bundle(small_model(tokenizer__chat_template=(STRING, template)).write(tmp_path / "model.gguf"))
    with pytest.raises(TemplateError):
        compiled = chat_template(bundle)
        assert compiled is not None
        compiled.render([{"role": "user", "content": "x"}])


COMMANDS = ("header: bad magic", "array: 1 GiB of bytes", "tensor: data one byte short", "vocabulary: no tokens")


@each_row("name", COMMANDS)
def test_inspect_refuses(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "model.gguf", CASES[name]())
    for options in ([], ["--tensors", "--json"]):
        assert main(["inspect", str(path), *options]) == 3
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1


@each_row("name", COMMANDS[:2])
def test_the_command_refuses(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", CASES[name]())
    refuses(3, "model.gguf", edgeinfer("inspect", path))
    refuses(3, "model.gguf", edgeinfer("run", "-m", path, "-p", "x"))


@pytest.mark.slow
def test_a_process_of_its_own_refuses(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", CASES[COMMANDS[0]]())
    refuses(3, "model.gguf", edgeinfer_process("run", "-m", path, "-p", "x"))


# Chance


def use(bundle: Bundle) -> None:
    """Takes everything out of a bundle that was opened."""
    for value in bundle.gguf.metadata.values():
        if isinstance(value, GgufArray):
            assert len(value.values()) == value.count
    boundary_ids(bundle)
    assert bundle.read_object("special_tokens.json") is not None
    for tensor in bundle.gguf.tensors:
        assert tensor.offset + tensor.nbytes <= bundle.gguf.size


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model().write(tmp_path_factory.mktemp("chance") / "model.gguf")


_GOOD = small_model().build()


@settings(max_examples=100, deadline=None)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(_GOOD) - 1), st.integers(0, 255)), max_size=8),
    end=st.integers(0, len(_GOOD)) | st.none(),
)
def test_damaged_files_open_or_are_refused(good: Path, flips: list[tuple[int, int]], end: int | None) -> None:
    data = bytearray(_GOOD)
    for place, value in flips:
        data[place] = value
    good.write_bytes(bytes(data[:end]))
    try:
        bundle = open_bundle(good)
    except BundleError:
        return
    use(bundle)


@settings(max_examples=100, deadline=None)
@given(tail=st.binary(max_size=400), counts=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_noise_opens_or_is_refused(good: Path, tail: bytes, counts: tuple[int, int]) -> None:
    good.write_bytes(b"GGUF" + struct.pack("<I", 3) + u64(*counts) + tail)
    with pytest.raises(BundleError):
        open_bundle(good)
