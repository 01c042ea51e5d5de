"""Which machine this is: properties, clocks, throttling, other processes; what is missing on it."""
import contextlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

# NVML calls these "clocks event reasons" by now; an idle GPU and one told to be slow are not throttled.
_THROTTLE = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal",
             0x80: "power brake"}

_waited: list[float] = []                # seconds that `alone` has waited for other runs


def facts(device: torch.device) -> dict:
    """What does not change during a run: the machine and the software on it. Missing facts are None."""
    found = {
        "device": "cpu", "name": _cpu_name(), "cpu_threads": torch.get_num_threads(),
        "torch": torch.__version__, "cuda": None, "cudnn": None, "driver": None,
        "triton": _version("triton"), "transformer_engine": _version("transformer_engine"),
        "python": platform.python_version(), "git": _git_commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": "cuda", "name": properties.name, "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count, "memory_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
        }
        try:
            found["cudnn"] = torch.backends.cudnn.version()
        except RuntimeError:                           # not the one that torch was built with
            found["cudnn"] = "two versions"
        if len({library.parent for library in cudnn_libraries()}) > 1:
            found["cudnn"] = "two versions"
        with _nvml(device) as (nvml, handle):
            if nvml:
                found["driver"] = nvml.nvmlSystemGetDriverVersion()
    return found


def cudnn_libraries() -> list[Path]:
    """The files of cuDNN that are loaded into this process; none where the system does not say."""
    with contextlib.suppress(OSError):
        return [Path(path) for path in dict.fromkeys(
            re.findall(r"/.*/libcudnn[^/\n]*$", Path("/proc/self/maps").read_text(), re.MULTILINE))]
    return []


def state(device: torch.device) -> dict:
    """What does change: the host's load; on a GPU its clocks (MHz), power (W), temperature (C) and throttle reasons."""
    found: dict = {"load_average": os.getloadavg()[0]}
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
                    found[key] = read()
    return found


def _reasons(bits: int) -> list[str]:
    return [name for bit, name in _THROTTLE.items() if bits & bit]


def neighbours(device: torch.device) -> list[str]:
    """The other processes that compute on this GPU, as "name (pid n)": whatever they do is in our timings."""
    with _nvml(device) as (nvml, handle):
        if not nvml:
            return []
        others = [p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid != os.getpid()]
        return [f"{_process_name(pid)} (pid {pid})" for pid in others]
    return []


@contextlib.contextmanager
def _nvml(device: torch.device):
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


@contextlib.contextmanager
def alone(device: torch.device, name: str):
    """While it lasts, no other run of this user measures on `device`: two at a time would time each other.

    A second one, `diff <(python 1_cublas.py) <(python 2_sdpa.py)` say, says on stderr for whom `name` waits, and does.
    """
    which = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else "cpu"
    try:
        import fcntl
        path = Path(tempfile.gettempdir()) / f"transformer-block-{os.getuid()}-{which}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except (ImportError, OSError):                 # not this system, or not this folder: then as best it goes
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            whom = os.pread(lock, 200, 0).decode(errors="replace") or "another run"
            print(f"{name}: waiting for {whom} on this device to end", file=sys.stderr, flush=True)
            since = time.monotonic()
            fcntl.flock(lock, fcntl.LOCK_EX)
            _waited.append(time.monotonic() - since)
        with contextlib.suppress(OSError):                         # a full disk: then who waits is told less
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{name} (process {os.getpid()})".encode(), 0)
        yield
    finally:
        os.close(lock)


def own_folder(path: str) -> bool:
    """Whether `path` is a folder that nobody else can write to; it is made where there is none."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    except (OSError, AttributeError):              # it can't be made; or this system has no such owners
        return False


def amp_default(device: torch.device, step: int | None = None) -> tuple[torch.dtype | None, str]:
    """(autocast's dtype where none is asked for, why it is None).

    float16 on a GPU, bfloat16 on a CPU that multiplies it: on one that does not (no AVX-512), PyTorch's own loops are
    so much slower than FP32 that a default run would not end. Step 4 has it there too: it multiplies in FP32.
    """
    if device.type == "cuda":
        return torch.float16, ""
    if step == 4 or cpu_multiplies_bfloat16():
        return torch.bfloat16, ""
    return None, "this CPU has no fast 16-bit matmuls; --amp-dtype bfloat16 takes the slow ones"


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; without them PyTorch's loops take many times as long as FP32."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compiler_missing(device: torch.device) -> str | None:
    """Why torch.compile can't generate code for `device`, or None. Both backends need a compiler on the host.

    Inductor compiles C++ for a CPU; Triton compiles a small C launcher for each GPU kernel.
    """
    if device.type == "cuda":
        names = [os.environ["CC"].split()[0]] if os.environ.get("CC", "").strip() else ["gcc", "clang"]
        found = any(shutil.which(name) for name in names)
        return None if found else "no C compiler found: install gcc, or name one in the variable CC"
    if named := os.environ.get("CXX", "").strip():
        return None if shutil.which(named.split()[0]) else f"no C++ compiler found: the variable CXX names {named}"
    name = "clang++" if sys.platform == "darwin" else "g++"
    return None if shutil.which(name) else f"no C++ compiler found: install {name}, or name one in the variable CXX"


def process_seconds() -> float:
    """Seconds since this process began, imports included, waits in `alone` not; 0 where the system will not say."""
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") - sum(_waited))
    return 0.0


def memory_total(device: torch.device) -> int:
    """Bytes of memory of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):            # a container's own limit; "max" where it has none
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def refuse_beyond_memory(needed: int, device: torch.device, what: str = "") -> None:
    """Raise MemoryError where a CPU's memory does not hold `needed` bytes: Linux would kill the process instead."""
    total = memory_total(device)
    if device.type == "cpu" and needed > total:
        raise MemoryError(f"{what}about {needed / 2**30:,.0f} GiB needed, this machine has {total / 2**30:.0f}")


def memory_peak(device: torch.device) -> int:
    """Bytes at the peak: of tensors on the GPU since the last reset, or of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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


def _git_commit() -> str | None:
    """The commit these files are at; where code has been changed since, "+" and a digest of how. GIT_COMMIT where there
    is no git.
    """
    root = Path(__file__).resolve().parents[1]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        def git(*arguments):
            command = ["git", "-c", "safe.directory=*", "-C", root, *arguments]      # a mount may be another user's
            return subprocess.run(command, capture_output=True, check=True, timeout=10).stdout
        # Not what runs write: a second process would be of other code than the first, whose records it finds there.
        changes = git("diff", "--no-ext-diff", "--binary", "HEAD", "--", ".", ":!benchmarks/results", ":!README.md")
        return git("rev-parse", "--short", "HEAD").decode().strip() + (f"+{zlib.crc32(changes):08x}" if changes else "")
    return os.environ.get("GIT_COMMIT")
