"""The number types of GGUF files, for tensors and for metadata, and their sizes."""

from __future__ import annotations

from edgeinfer.records import dataclass


@dataclass(frozen=True)
class GgmlType:
    """How the values of a tensor are stored: in blocks along a row.

    Attributes:
        name: as ggml writes it, such as "Q4_K".
        number: in files.
        block_values, block_bytes: of one block; plain numbers are blocks of one value.
    """

    name: str
    number: int
    block_values: int
    block_bytes: int

    @property
    def quantized(self) -> bool:
        """Whether values share scales."""
        return self.block_values > 1

    @property
    def bits(self) -> float:
        """Stored bits of a value, scales included."""
        return 8 * self.block_bytes / self.block_values

    def row_bytes(self, values: int) -> int:
        """Length of a row, which is whole blocks."""
        assert values % self.block_values == 0, f"{values} values are no whole blocks of {self.name}"
        return values // self.block_values * self.block_bytes


@dataclass(frozen=True)
class ItemType:
    """How a metadata value is stored; strings and arrays have no size of their own.

    Attributes:
        name: as the format's description writes it, such as "uint32".
        size: bytes of a value; 0 for strings and arrays.
        dtype: of numpy, little-endian; empty for strings and arrays.
    """

    name: str
    number: int
    size: int
    dtype: str


def _types(*rows: tuple[int, str, int, int]) -> dict[int, GgmlType]:
    return {number: GgmlType(name, number, values, size) for number, name, values, size in rows}


# By their numbers in files. Those that are missing in between were withdrawn, and no program reads them any more.
GGML_TYPES: dict[int, GgmlType] = _types(
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 40),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)

_BY_NAME = {kind.name: kind for kind in GGML_TYPES.values()}


def ggml_type(name: str) -> GgmlType:
    """A type by its name, which must be one of `GGML_TYPES`."""
    return _BY_NAME[name]


STRING, ARRAY, BOOL = 8, 9, 7

# By their numbers in files.
ITEM_TYPES: dict[int, ItemType] = {
    kind.number: kind
    for kind in (
        ItemType("uint8", 0, 1, "<u1"),
        ItemType("int8", 1, 1, "<i1"),
        ItemType("uint16", 2, 2, "<u2"),
        ItemType("int16", 3, 2, "<i2"),
        ItemType("uint32", 4, 4, "<u4"),
        ItemType("int32", 5, 4, "<i4"),
        ItemType("float32", 6, 4, "<f4"),
        ItemType("bool", BOOL, 1, "<u1"),
        ItemType("string", STRING, 0, ""),
        ItemType("array", ARRAY, 0, ""),
        ItemType("uint64", 10, 8, "<u8"),
        ItemType("int64", 11, 8, "<i8"),
        ItemType("float64", 12, 8, "<f8"),
    )
}
