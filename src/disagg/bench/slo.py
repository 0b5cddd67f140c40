"""What a request must attain to count."""

import msgspec


class Slo(msgspec.Struct, frozen=True):
    """Targets of one request; it attains them when it ends well within all."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1
