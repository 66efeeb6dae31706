"""The C functions of the kernel library with Python types.

The other side is exports.c; the structures are those of lowbit.h and attention.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass

# Of gguf.c: no row has scales that are not finite.
_NONE = -1
# Of exports.c; a library of another version is not used.
VERSION = 11
# Bytes of the inline scales of a block: 32 of bfloat16.
INLINE_BYTES = 64
# Activation functions by name, in the order of activation.h. The last two are no part of an MLP.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "xielu", "swiglu_oai", "sigmoid", "softcap")

# The codebook of values.h, found by k-means on Gaussian numbers (docs/log/2026-11-26.md, "codebooks").
MAGNITUDES = np.array(
    [
        *((1, 1, 1, 1), (1, 1, 4, 1), (4, 1, 1, 1), (1, 3, 1, 3)),
        *((2, 1, 2, 3), (2, 3, 2, 1), (2, 2, 2, 7), (2, 2, 7, 2)),
        *((2, 7, 2, 2), (7, 2, 2, 2), (2, 2, 5, 5), (2, 5, 5, 2)),
        *((5, 2, 2, 5), (5, 2, 5, 2), (5, 5, 2, 2), (2, 6, 3, 6)),
    ],
    np.int8,
)  # (16, 4)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix (N, K) in the layout of lowbit.h; arrays are flat and contiguous."""

    n: int
    k: int
    bits: int
    block: int
    data: Bytes  # the values; of 8-bit matrices the high plane
    scales: NDArray[np.uint16] | None  # bits of bfloat16; None where they lie inline or in heads, among `data`
    low: Bytes | None = None  # the low plane; without it an 8-bit matrix is read by its high plane alone
    zeros: Bytes | None = None  # None is the middle of the range
    paired: bool = False  # two matrices of N / 2 rows, gate and up, share the tiles
    vectors: bool = False  # bytes of 2 bits are codes of vectors
    float16: bool = False  # `scales` are float16
    kind: int = 0  # of spans.h, whose matrices have `data` alone


@dataclass(frozen=True)
class AttentionPass:
    """A pass of the operator Attention over a cache of one layer; ort_attention.c tells what its inputs are."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    layout: tuple[int, int, int, int]  # key type, value type, bytes of a page, offset of the layer
    pages: NDArray[np.int32]  # (B, P)
    rows: NDArray[np.int32]  # (S, 4)
    extras: NDArray[np.int32]  # (X,)
    qkv: Floats  # (S, width)
    positions: NDArray[np.int64]  # (S,)
    cos: Floats | None = None  # (P', rotary / 2)
    sin: Floats | None = None
    rotary: int = 0  # channels that are rotated by the tables cos and sin
    window: int = 0
    softcap: float = 0.0


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("paired", ctypes.c_int32),
        ("e2m1", ctypes.c_int32),
        ("vectors", ctypes.c_int32),
        ("inline_scales", ctypes.c_int32),
        ("float16", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("low", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
    )


class _Input(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class _Output(ctypes.Structure):
    _fields_ = (
        ("y", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("swiglu", ctypes.c_int32),
        ("stride", ctypes.c_int64),
        ("factor", ctypes.c_float),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "key_size", "value_size", "key_type", "value_type")),
        *((name, ctypes.c_int32) for name in ("rotary", "interleaved", "norm_whole", "norm_after", "value_norm")),
        *((name, ctypes.c_int32) for name in ("shared", "latent", "weighed", "still")),
        ("window", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "norm_epsilon")),
        ("pool", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("page_bytes", "offset")),
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("columns", "count")),
        *((name, ctypes.c_void_p) for name in ("qkv", "rows", "extras", "positions", "cosines", "sines")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "sinks", "qkv_bias", "out")),
    )


class _Bounds(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("pool", "sequences", "extras", "positions"))


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class Binding:
    """A loaded library.

    Attributes:
        version: nothing may be called where it is not VERSION.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        try:
            self.version = int(self._library.edgeinfer_version())
            if self.version == VERSION:
                self._declare()
        except AttributeError as error:
            raise OSError(f"{path} is not a library of edgeinfer") from error

    def _declare(self) -> None:
        c = self._library
        c.edgeinfer_isa_name.restype = ctypes.c_char_p
        c.edgeinfer_select.argtypes = [ctypes.c_char_p]
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        c.edgeinfer_multiply.argtypes = [ctypes.c_char_p, pointer, pointer, count, pointer, count]
        c.edgeinfer_attend.argtypes = [ctypes.c_char_p, pointer, pointer, pointer, count]
        c.edgeinfer_activate.argtypes = [ctypes.c_char_p, ctypes.c_int32, *[pointer] * 3, count, pointer]
        c.edgeinfer_drop_behind.argtypes, c.edgeinfer_drop_behind.restype = [pointer, count], None
        c.edgeinfer_row.argtypes = [pointer, count, pointer]
        for name in ("pack", "unpack", "dequantize"):
            function = getattr(c, f"edgeinfer_{name}")
            function.argtypes = [
                ctypes.c_int32,
                pointer,
                count,
                count,
                *[ctypes.c_int32] * (name != "dequantize"),
                pointer,
            ]
            function.restype = count
        c.edgeinfer_probe_dots.argtypes, c.edgeinfer_probe_dots.restype = [count], count
        c.edgeinfer_probe_read.argtypes, c.edgeinfer_probe_read.restype = [pointer, ctypes.c_size_t], ctypes.c_uint64

    def isas(self) -> tuple[str, ...]:
        """Instruction sets that this machine can run, best first; the last is "portable"."""
        names, index = [], 0
        while name := self._library.edgeinfer_isa_name(index):
            if self._library.edgeinfer_isa_usable(index):
                names.append(name.decode())
            index += 1
        return tuple(names)

    def select(self, isa: str) -> None:
        """Sets the instruction set of sessions that are made from now on, in the whole process."""
        done = self._library.edgeinfer_select(isa.encode())
        assert done, isa

    def multiply(
        self,
        isa: str,
        matrix: PackedMatrix,
        x: Floats,  # (M, K)
        *,
        norm: Floats | None = None,  # (K,)
        epsilon: float = 1e-6,
        bias: Floats | None = None,  # (N,)
        residual: Floats | None = None,  # (M, width)
        swiglu: bool = False,
        jobs: int = 1,
    ) -> Floats:  # (M, width), width is N, with swiglu N / 2
        """Rows times a matrix, in `jobs` pieces one after the other; arguments as of the operator LinearLowBit."""
        rows = np.ascontiguousarray(x, np.float32)
        y = np.full((len(rows), matrix.n // 2 if swiglu else matrix.n), np.nan, np.float32)
        given = _Input(_address(rows), _address(norm), epsilon)
        output = _Output(_address(y), _address(bias), _address(residual), swiglu)
        packed = _matrix(matrix)
        pointers = [ctypes.byref(struct) for struct in (packed, given, output)]
        done = self._library.edgeinfer_multiply(isa.encode(), *pointers[:2], len(rows), pointers[2], jobs)
        assert done, (isa, matrix.n, matrix.k, matrix.bits, matrix.block)
        return y

    def attend(self, isa: str, given: AttentionPass, pool: Bytes, *, jobs: int = 1) -> Floats:  # (S, heads v)
        """One pass, which writes its rows to the pool, in about `jobs` pieces one after the other."""
        g = given
        y = np.full((len(g.rows), g.heads * g.value_size), np.nan, np.float32)
        attention = _Attention(
            *(g.heads, g.kv_heads, g.key_size, g.value_size),
            rotary=g.rotary,
            window=g.window,
            scale=g.key_size**-0.5,
            softcap=g.softcap,
            pool=_address(pool),
            pages=_address(g.pages),
            columns=g.pages.shape[1],
            count=len(g.rows),
            qkv=_address(g.qkv),
            rows=_address(g.rows),
            extras=_address(g.extras),
            positions=_address(g.positions),
            cosines=_address(g.cos),
            sines=_address(g.sin),
            out=_address(y),
        )
        bounds = _Bounds(pool.size, len(g.pages), g.extras.size, 0 if g.cos is None else len(g.cos))
        layout = (ctypes.c_int64 * 4)(*g.layout)
        pointers = [ctypes.byref(struct) for struct in (attention, bounds, layout)]
        done = self._library.edgeinfer_attend(isa.encode(), *pointers, jobs)
        assert done, (isa, g.heads, g.kv_heads, g.key_size, g.value_size, g.layout)
        return y

    def activate(self, isa: str, name: str, x: Floats, times: Floats, constants: tuple[float, float]) -> Floats:  # (N,)
        """Output of an activation function, one of ACTIVATIONS, multiplied by `times`."""
        y, numbers = np.full_like(x, np.nan), np.array(constants, np.float32)
        pointers = [_address(array) for array in (numbers, x, times)]
        done = self._library.edgeinfer_activate(isa.encode(), ACTIVATIONS.index(name), *pointers, x.size, _address(y))
        assert done, (isa, name)
        return y

    @contextmanager
    def dropping_behind(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Let operators that this thread runs drop the pages that they have read, each tile's once it is done."""
        array = (_Span * len(spans))(*(_Span(*each) for each in spans))
        self._library.edgeinfer_drop_behind(array, len(spans))
        try:
            yield
        finally:
            self._library.edgeinfer_drop_behind(None, 0)

    def row(self, matrix: PackedMatrix, index: int) -> Floats:  # (K,)
        """One row, dequantized."""
        y = np.full(matrix.k, np.nan, np.float32)
        done = self._library.edgeinfer_row(ctypes.byref(_matrix(matrix)), index, _address(y))
        assert done, index
        return y

    def pack(self, kind: int, rows: Bytes, k: int, tiles: Bytes, *, paired: bool = False) -> bool:
        """Moves rows of a GGUF file's blocks (N, bytes of a row) into tiles, which are zero.

        Args:
            kind: number of the type in files.

        Returns:
            whether all scales are finite.
        """
        done = int(self._library.edgeinfer_pack(kind, _address(rows), len(rows), k, paired, _address(tiles)))
        assert done >= _NONE, (kind, rows.shape, k)
        return done == _NONE

    def unpack(self, kind: int, tiles: Bytes, k: int, rows: Bytes, *, paired: bool = False) -> None:
        """Reverses `pack` into rows, which are zero."""
        done = self._library.edgeinfer_unpack(kind, _address(tiles), len(rows), k, paired, _address(rows))
        assert done >= _NONE, (kind, rows.shape, k)

    def dequantize(self, kind: int, rows: Bytes, y: Floats) -> bool:  # (N, bytes of a row), (N, K)
        """Writes the values of rows of a GGUF file's blocks; whether all scales are finite."""
        done = int(self._library.edgeinfer_dequantize(kind, _address(rows), len(rows), y.shape[1], _address(y)))
        assert done >= _NONE, (kind, rows.shape, y.shape)
        return done == _NONE

    def probe_dots(self, rounds: int) -> int:
        """Does nothing but multiply-adds, with the selected instruction set; returns how many, 0 where it cannot."""
        return int(self._library.edgeinfer_probe_dots(rounds))

    def probe_read(self, words: NDArray[np.uint64]) -> int:  # (W,)
        """Reads words and returns their sum."""
        return int(self._library.edgeinfer_probe_read(_address(words), words.size))


def _address(array: NDArray[np.generic] | None) -> int | None:
    assert array is None or array.flags.c_contiguous
    return None if array is None else array.ctypes.data


def _matrix(m: PackedMatrix) -> _Matrix:
    data, low, scales, zeros = (_address(a) for a in (m.data, m.low, m.scales, m.zeros))
    inline = m.scales is None and not m.kind
    if inline:
        assert data is not None
        data, scales = data + INLINE_BYTES, data
    sizes = (m.n, m.k, m.bits, m.block)
    return _Matrix(*sizes, m.paired, 0, m.vectors, inline, m.float16, m.kind, data, low, scales, zeros)
