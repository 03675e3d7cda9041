"""Rates of GPUs from NVIDIA's data sheets, and the names of the GPUs of this machine."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from typing import NamedTuple

log = logging.getLogger("memonger")

CALL = 5e-6  # seconds from one kernel to the next on any GPU; assumed, for no data sheet has it
USUAL = "V100"  # for plans for any GPU, and for GPUs without a data sheet below


class Rates(NamedTuple):
    """The rates of a device."""

    flops: float  # floating point operations a second
    nbytes: float  # bytes read and written a second
    call: float  # seconds of the call of an operator


#: FP32 TFLOP/s at the boost clock without tensor cores, and GB/s of the memory. The wheel of MXNet
#: 1.9.1 runs on all of them (compute capability 5.2 to 8.9) except the last three, which need
#: another build (``docs/gpu.md``). The figures are for the SXM form where there are several, for
#: one of the M60's two GPUs, and for the A100 with 40 GB.
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
    """Return the name in `GPUS` of a GPU of this machine; `USUAL`, with a warning, if unknown."""
    name = read_gpu_name(device_id)
    named = [gpu for gpu in GPUS if re.search(rf"(?<!\w){gpu}(?!\w)", name)]
    if not named:
        text = "gpu(%d) (%r) has no known data sheet: predicting times for %r; set gpu= for another"
        log.warning(text, device_id, name, USUAL)
    return max(named, key=len, default=USUAL)


def read_gpu_name(device_id: int) -> str:
    """Return the driver's name of a GPU, by its number in CUDA; '' if there is none."""
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
