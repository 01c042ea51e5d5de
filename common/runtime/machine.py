"""Which machine this is: its properties and software, its clocks and power, other processes on it, its memory."""
import contextlib
import datetime
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import sources

# NVML calls these "clocks event reasons" by now; an idle GPU and one told to be slow are not throttled.
POWER_CAP = "power cap"
_THROTTLE = {0x4: POWER_CAP, 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal",
             0x80: "power brake"}


def facts(device: torch.device) -> dict[str, Any]:
    """What does not change during a run: the machine, its software, the sources. Missing facts are None."""
    known: dict[str, Any] = {
        "device": "cpu", "name": _cpu_name(), "cpu_model": _cpu_name(), "cpu_threads": torch.get_num_threads(),
        "gpu_uuid": None, "torch": torch.__version__, "cuda": None, "cudnn": None, "driver": None,
        "triton": _version("triton"), "transformer_engine": _version("transformer_engine"), "numpy": _version("numpy"),
        "python": platform.python_version(), "git": sources.commit(), "sources": sources.digest(),
        "began": datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known |= {
            "device": "cuda", "name": properties.name, "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count, "memory_gib": properties.total_memory / 2**30,
            "gpu_uuid": f"GPU-{properties.uuid}", "cuda": torch.version.cuda, "cudnn": _cudnn_version(),
        }
        with _nvml(device) as (nvml, handle):
            if nvml:
                known["driver"] = nvml.nvmlSystemGetDriverVersion()
    return known


def _cudnn_version() -> int | str | None:
    try:
        loaded = torch.backends.cudnn.version()
    except RuntimeError:                           # not the one that torch was built with
        return "two versions"
    folders = {library.parent for library in cudnn_libraries()}
    return "two versions" if len(folders) > 1 else loaded


def cudnn_libraries() -> list[Path]:
    """The files of cuDNN that are loaded into this process; none where the system does not say."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    names = re.findall(r"/.*/libcudnn[^/\n]*$", maps, re.MULTILINE)
    return [Path(name) for name in dict.fromkeys(names)]


def state(device: torch.device) -> dict[str, Any]:
    """What does change: the host's load; on a GPU its clocks (MHz), power (W), temperature (C) and throttle reasons."""
    readings: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    with _nvml(device) as (nvml, handle):
        if nvml:
            for key, read in {
                "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "sm_mhz_max": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
                "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
                "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                "throttled": lambda: _reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
            }.items():
                with contextlib.suppress(nvml.NVMLError):          # some GPUs have no power sensor, say
                    readings[key] = read()
    return readings


def _reasons(bits: int) -> list[str]:
    return [name for bit, name in _THROTTLE.items() if bits & bit]


def neighbours(device: torch.device) -> list[str]:
    """The other processes that compute on this GPU, as "name (pid n)": whatever they do is in our timings."""
    with _nvml(device) as (nvml, handle):
        if not nvml:
            return []
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return [f"{_process_name(process.pid)} (pid {process.pid})" for process in running
                if process.pid != os.getpid()]
    return []


@contextlib.contextmanager
def _nvml(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """(pynvml, handle of `device`), or (None, None) where there is no GPU or its driver will not say."""
    if device.type != "cuda":
        yield None, None
        return
    try:
        import pynvml
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:        # no library, no permission, a partitioned GPU: clocks are then simply not reported
        yield None, None
        return
    try:
        yield pynvml, handle
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()


class PowerMeter:
    """A GPU's energy counter and power sensor, as NVML gives them. What can't be read is None."""
    INSTANT = 186                              # NVML's field of the power at this moment

    def __init__(self, nvml: Any, handle: Any):
        self._nvml, self._handle = nvml, handle
        self.averaged = self._instant() is None        # else NVML gives the mean of the last second, on most GPUs

    def joules(self) -> float | None:
        """Since the driver was loaded."""
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

    def watts(self) -> float | None:
        """At this moment, or of the second before where it is `averaged`."""
        if not self.averaged:
            return self._instant()
        try:
            return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except self._nvml.NVMLError:
            return None

    def _instant(self) -> float | None:
        try:
            field = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self.INSTANT])[0]
        except (self._nvml.NVMLError, AttributeError):
            return None
        return None if field.nvmlReturn else field.value.uiVal / 1e3


@contextlib.contextmanager
def power_meter(device: torch.device) -> Iterator[PowerMeter | None]:
    """The meter of a GPU; None where there is no GPU, or it has no energy counter."""
    with _nvml(device) as (nvml, handle):
        meter = PowerMeter(nvml, handle) if nvml else None
        yield None if meter is None or meter.joules() is None else meter


def busy(readings: dict[str, Any]) -> bool:
    """Whether a CPU had other work too: the last minute's load is beyond its threads by more than one.

    `readings` are `facts` and `state`, or what a record holds of them.
    """
    return readings.get("load_average", 0.0) > readings.get("cpu_threads", float("inf")) + 1


def memory_total(device: torch.device) -> int:
    """Bytes of memory of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):            # a container's own limit; "max" where it has none
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def memory_free(device: torch.device) -> int:
    """Bytes that could be allocated now, what torch has cached for itself included."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    total = memory_total(device)
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return min(total, int(available.split()[1]) * 1024)
    return total


def at_power_cap(state: Mapping[str, Any]) -> bool | None:
    """Whether a GPU's clocks were held down by its power cap in that state; None where that is not known."""
    return POWER_CAP in state["throttled"] if "throttled" in state else None


class BeyondMemory(MemoryError):
    """A machine has less than is needed; the message says how much."""


def refuse_beyond_memory(needed: int, device: torch.device, what: str = "") -> None:
    """Raise BeyondMemory where a CPU's memory does not hold `needed` bytes: Linux would kill the process instead."""
    total = memory_total(device)
    if device.type == "cpu" and needed > total:
        raise BeyondMemory(f"{what}about {needed / 2**30:,.0f} GiB needed, this machine has {total / 2**30:.0f}")


def memory_peak(device: torch.device) -> int:
    """Bytes at the peak: of tensors on the GPU since the last reset, or of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_in_words(device: torch.device) -> str:
    """How much memory was in use at the peak, of how much."""
    return f"{memory_peak(device) / 2**30:.1f} of {memory_total(device) / 2**30:.1f} GiB in use at the peak"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "another container's process"
