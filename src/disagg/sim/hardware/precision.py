"""How wide a number is, and which of a device's rates it runs at."""

import enum


class Precision(enum.StrEnum):
    """Of weights or of the KV cache."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP8_BLOCK = "fp8_block"  # with a scale for every block of 128 x 128, as DeepSeek publishes
    INT8 = "int8"
    FP4 = "fp4"
    INT4 = "int4"

    @property
    def bytes_each(self) -> float:
        """Bytes of a number; four-bit formats keep one byte of scale for sixteen numbers."""
        return _BYTES[self]


_BYTES = {
    Precision.FP32: 4.0,
    Precision.BF16: 2.0,
    Precision.FP16: 2.0,
    Precision.FP8: 1.0,
    Precision.FP8_BLOCK: 1.0,
    Precision.INT8: 1.0,
    Precision.FP4: 0.5625,
    Precision.INT4: 0.5625,
}
