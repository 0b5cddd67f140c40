"""How numbers are stored."""

import enum


class Weights(enum.StrEnum):
    """Of matrix products."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"  # with a scale per output and 64 inputs (32 in the head); inputs become 16-bit integers


class KvDtype(enum.StrEnum):
    """Of the KV cache; the values are those of KvLayout.dtype."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"


class KvWire(enum.StrEnum):
    """Of KV on its way to a peer."""

    NATIVE = "native"  # as it is stored where it goes
    INT8 = "int8"  # with a scale per (token, head)


class Kernels(enum.StrEnum):
    """Whose code computes."""

    AUTO = "auto"  # native where they can be had
    NATIVE = "native"  # compiled for this machine's CPU; float products in bf16 tiles where it has them (AMX)
    PORTABLE = "portable"  # native, with the bits that every x86-64 CPU gives
    TORCH = "torch"
