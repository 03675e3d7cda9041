"""What GPUs can do by NVIDIA's data sheets, for plans that are made where the GPU is not."""

from __future__ import annotations

from typing import NamedTuple

CALL = 5e-6  # seconds from one kernel to the next on any GPU: an assumption, no data sheet has it
USUAL = "V100"  # for a plan for any GPU


class Rates(NamedTuple):
    """What a device can do."""

    flops: float  # floating point operations a second, in a large matrix product
    nbytes: float  # bytes read and written a second, in a large sum of two arrays
    call: float  # seconds that an operator takes that does nothing


#: FP32 TFLOP/s at the boost clock without tensor cores, and GB/s of the memory. MXNet 1.9.1's wheel
#: runs on all of them (compute capability 5.2 to 8.9). Where a GPU is sold in several forms it is
#: the SXM one; of the M60's two GPUs one; of A100s that with 40 GB.
_DATA_SHEETS = {
    "M60": (4.8, 160),
    "P100": (10.6, 732),
    "GTX 1080 Ti": (11.3, 484),
    "V100": (15.7, 900),
    "T4": (8.1, 320),
    "RTX 2080 Ti": (13.4, 616),
    "A100": (19.5, 1555),
    "A10": (31.2, 600),
    "RTX 3090": (35.6, 936),
    "RTX 4090": (82.6, 1008),
    "L4": (30.3, 300),
}
GPUS = {
    name: Rates(tflops * 1e12, gbytes * 1e9, CALL)
    for name, (tflops, gbytes) in _DATA_SHEETS.items()
}
