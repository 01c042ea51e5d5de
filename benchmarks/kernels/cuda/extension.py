"""The CUDA C++ kernels of this folder as a Python module, built at first use for the GPU at hand.

The .cu files know nothing of PyTorch, so that they compile in seconds; binding.cpp alone includes it. A build is kept
in TORCH_EXTENSIONS_DIR, or in the user's cache folder, under a name that depends on everything that went into it:
another torch, CUDA or GPU, or an edited source, is another build.
"""
import functools
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.cu"))
NVCC_FLAGS = ["-O3", "-lineinfo"]
OLDEST_GPU = (8, 0)                       # the first with cp.async and 16-bit tensor-core products that sum in FP32


def load():
    """The built module (see binding.cpp), from the cache where it is there.

    Raises RuntimeError with the reason where CUDA kernels can't run (see `missing`), or with the first error of a build
    that failed; it is not tried again.
    """
    built = _built()
    if isinstance(built, str):
        raise RuntimeError(built)
    return built


@functools.cache
def _built():
    """The module, or why there is none."""
    if reason := missing():
        return f"CUDA kernels can't run here: {reason}"
    from torch.utils import cpp_extension  # here, as it warns where there is no GPU
    major, minor = torch.cuda.get_device_capability()
    folder = cache_folder() / _key((major, minor))
    folder.mkdir(parents=True, exist_ok=True)
    before = cpp_extension.CUDA_HOME
    with alone(folder):
        try:
            cpp_extension.CUDA_HOME = str(cuda_home())       # torch guesses it when imported, and a wrapper misleads it
            return cpp_extension.load(
                "transformer_block_cuda", [str(FOLDER / "binding.cpp"), *map(str, SOURCES)],
                extra_cflags=["-O2"], build_directory=str(folder), with_cuda=True,
                extra_cuda_cflags=[*NVCC_FLAGS, f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"])
        except RuntimeError as error:
            return f"the CUDA kernels do not build: {first_error(str(error))}"
        finally:
            cpp_extension.CUDA_HOME = before


@functools.cache
def missing() -> str:
    """Why CUDA kernels can't be built and run here, in one line; empty where they can."""
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.get_device_capability() < OLDEST_GPU:
        return "the GPU is older than compute capability {}.{}".format(*OLDEST_GPU)
    return compiler_missing()


def compiler_missing() -> str:
    """Why CUDA C++ can't be compiled for this torch, in one line; empty where it can."""
    if (home := cuda_home()) is None:
        return "there is no nvcc: install CUDA's toolkit, or set CUDA_HOME"
    version = re.search(r"release (\d+)\.(\d+)", nvcc_version())
    wanted = (torch.version.cuda or "").partition(".")[0]
    if not version:
        return f"{home}/bin/nvcc does not say its version"
    if wanted and version[1] != wanted:
        return f"nvcc is of CUDA {version[1]}.{version[2]}, and torch of CUDA {torch.version.cuda}"
    from torch.utils import cpp_extension
    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(compiler):
        return f"there is no C++ compiler ({compiler})"
    return "" if cpp_extension.is_ninja_available() else "there is no ninja: pip install ninja"


@functools.cache
def cuda_home() -> Path | None:
    """The CUDA toolkit's folder, the one with bin/nvcc and include, or None."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):      # it may be a link or a script: nvcc itself says where it is
        top = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull), re.MULTILINE)
        named.append(top[1].strip() if top else None)
    for home in filter(None, [*named, "/usr/local/cuda"]):
        if os.access(os.path.join(home, "bin", "nvcc"), os.X_OK):
            return Path(home).resolve()
    return None


def nvcc_version() -> str:
    """All that nvcc says of itself; nothing where there is none."""
    home = cuda_home()
    return _output(str(home / "bin" / "nvcc"), "--version") if home else ""


def first_error(log: str) -> str:
    """The first line of a compiler's output that is an error, else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"\b(fatal )?error\s*:|: error\b|undefined reference", line)]
    return (wrong or lines[-1:] or ["no message"])[0]


def _output(*command: str) -> str:
    """All that a command prints; nothing where it can't be started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def cache_folder() -> Path:
    """Where builds are kept: a folder of this user's own, since what is in it gets executed."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transformer-block"


def _key(capability: tuple[int, int]) -> str:
    """A folder's name for all that a build depends on."""
    content = hashlib.sha256(repr((NVCC_FLAGS, nvcc_version())).encode())
    for path in sorted(path for end in ("cu", "cuh", "h", "cpp") for path in FOLDER.glob(f"*.{end}")):
        content.update(path.name.encode() + path.read_bytes())
    return "torch{}-cuda{}-sm{}{}-{}".format(torch.__version__, torch.version.cuda, *capability,
                                             content.hexdigest()[:16])


class alone:
    """While it lasts, no other process builds in `folder`: a second one waits, and finds the build done.

    The operating system forgets this lock when its process dies. torch's own is a file that stays and would be waited
    for without end: inside this lock nobody can hold it, so one that is there is a dead process's.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self):
        import fcntl
        self.file = open(self.folder / "alone", "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        (self.folder / "lock").unlink(missing_ok=True)

    def __exit__(self, *_):
        self.file.close()
