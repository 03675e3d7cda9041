"""What GPUs can do by NVIDIA's data sheets, and which of them is the GPU that is here."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from typing import NamedTuple

log = logging.getLogger("memonger")

CALL = 5e-6  # seconds from one kernel to the next on any GPU: an assumption, no data sheet has it
USUAL = "V100"  # for a plan for any GPU, and for a GPU whose data sheet is not here


class Rates(NamedTuple):
    """What a device can do."""

    flops: float  # floating point operations a second
    nbytes: float  # bytes read and written a second
    call: float  # seconds that an operator takes that does nothing


#: FP32 TFLOP/s at the boost clock without tensor cores, and GB/s of the memory. MXNet 1.9.1's wheel
#: runs on all of them (compute capability 5.2 to 8.9) but the last three, which need a build of
#: their own (``docs/gpu.md``). Where a GPU is sold in several forms it is the SXM one; of the M60's
#: two GPUs one; of A100s that with 40 GB.
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
    "H100": (66.9, 3350),
    "H200": (66.9, 4800),
    "RTX 5090": (104.8, 1792),
}
GPUS = {
    name: Rates(tflops * 1e12, gbytes * 1e9, CALL)
    for name, (tflops, gbytes) in _DATA_SHEETS.items()
}


@functools.lru_cache(maxsize=None)
def find_sheet(device_id: int) -> str:
    """Find the name in `GPUS` of a GPU that is here; `USUAL`, with a warning, if it has none."""
    name = read_gpu_name(device_id)
    named = [gpu for gpu in GPUS if re.search(rf"(?<!\w){gpu}(?!\w)", name)]
    if not named:
        text = "no data sheet of gpu(%d) (%r) is known: times are those of a %s; gpu= names another"
        log.warning(text, device_id, name, USUAL)
    return max(named, key=len, default=USUAL)


def read_gpu_name(device_id: int) -> str:
    """Read how the driver names a GPU, numbered as in CUDA; empty if it does not say."""
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = (
            driver.cuInit(0)
            or driver.cuDeviceGet(ctypes.byref(device), device_id)
            or driver.cuDeviceGetName(name, len(name), device)
        )
    except (OSError, AttributeError):
        return ""
    return "" if failed else name.value.decode(errors="replace")
