"""What a run does to its device: peak memory, and the share of time in which a GPU is busy."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import threading
from pathlib import Path
from types import TracebackType

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
SAMPLE_SECONDS = 0.05


def reset_peak_memory(device: torch.device) -> None:
    """Forget the peak so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:  # not Linux, or not allowed: the peak is then the process's since its start
        return


def peak_memory_bytes(device: torch.device) -> int | None:
    """The peak since the last reset: of torch's allocator on a GPU, of the process on Linux."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return kib[0] * 1024 if kib else None


def available_memory_bytes() -> int:
    """What the system can give a process: on Linux also what it keeps of files and can drop."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    [kib] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kib * 1024


def gib(num_bytes: int | None) -> float | None:
    """GiB to two places."""
    return None if num_bytes is None else round(num_bytes / 2**30, 2)


class _Utilisation(ctypes.Structure):
    """NVML's nvmlUtilization_t: percent of the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuUtilisation:
    """Samples NVML while a block runs; `mean` is the share of time in which some kernel ran.

    NVML comes with the driver; its own sample period is up to a second, so a short block is seen
    coarsely. `mean` is None on a CPU, without a device, and where NVML does not answer for the
    device (as on a slice of a GPU) or the block was too short for a sample.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._read = _nvml_reader(device) if device and device.type == "cuda" else None
        self._samples: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def mean(self) -> float | None:
        if not self._samples:
            return None
        return round(sum(self._samples) / len(self._samples) / 100, 3)

    def __enter__(self) -> GpuUtilisation:
        if self._read is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while self._read is not None and not self._stop.wait(SAMPLE_SECONDS):
            percent = self._read()
            if percent is None:
                return
            self._samples.append(percent)


class _NvmlReader:
    """Percent of NVML's last sample period in which the device was busy; None without an answer."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    def __call__(self) -> int | None:
        rates = _Utilisation()
        failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates))
        return None if failed else int(rates.gpu)


def _nvml_reader(device: torch.device) -> _NvmlReader | None:
    name = ctypes.util.find_library("nvidia-ml") or "libnvidia-ml.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    handle = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    return _NvmlReader(library, handle)
