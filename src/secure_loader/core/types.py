"""Names for what a safetensors header describes: dtypes, tensors, byte ranges."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class DType:
    """One safetensors dtype.

    Attributes:
        code: The spelling in the header, for example ``"BF16"``.
        bits: Bits per element; F4 and the F6 kinds are packed below a byte.
        torch: Name of the attribute of ``torch``, or None where torch has none.
        numpy: Name that ``numpy.dtype`` takes, or None where numpy has none.
    """

    code: str
    bits: int
    torch: str | None
    numpy: str | None


# In the order of safetensors 0.8's `Dtype` enum, which its writer (and that of CryptoTensors) sorts by, descending.
_TABLE = (
    DType("BOOL", 8, "bool", "bool"),
    DType("F4", 4, "float4_e2m1fn_x2", None),
    DType("F6_E2M3", 6, None, None),
    DType("F6_E3M2", 6, None, None),
    DType("U8", 8, "uint8", "uint8"),
    DType("I8", 8, "int8", "int8"),
    DType("F8_E5M2", 8, "float8_e5m2", None),
    DType("F8_E4M3", 8, "float8_e4m3fn", None),
    DType("F8_E8M0", 8, "float8_e8m0fnu", None),
    DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", None),
    DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", None),
    DType("I16", 16, "int16", "int16"),
    DType("U16", 16, "uint16", "uint16"),
    DType("F16", 16, "float16", "float16"),
    DType("BF16", 16, "bfloat16", None),
    DType("I32", 32, "int32", "int32"),
    DType("U32", 32, "uint32", "uint32"),
    DType("F32", 32, "float32", "float32"),
    DType("C64", 64, "complex64", "complex64"),
    DType("F64", 64, "float64", "float64"),
    DType("I64", 64, "int64", "int64"),
    DType("U64", 64, "uint64", "uint64"),
)
DTYPES: dict[str, DType] = {d.code: d for d in _TABLE}
DTYPE_RANK: dict[str, int] = {d.code: i for i, d in enumerate(_TABLE)}


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Half-open range of bytes, ``[start, stop)``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class TensorInfo(NamedTuple):
    """One tensor as the header describes it. A tuple, because a header may hold a million of them.

    Attributes:
        name: Its key in the file.
        dtype: safetensors dtype code.
        shape: Logical shape, in elements.
        start: First byte, counted from the start of the body.
        stop: One past the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes; ciphertext is as long as plaintext."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of logical elements; 1 for a scalar."""
        return math.prod(self.shape)
