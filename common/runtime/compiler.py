"""What torch.compile needs and costs: a compiler on the host, caches of one's own, and no compiling while timing."""
import atexit
import contextlib
import getpass
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import torch

from .. import signals
from ..outcome import Failed

SHARED_KERNELS = "KERNELS_OF_ANOTHER_PROCESS"              # a variable: the Triton folder of whoever started us
RECOMPILE_LIMIT = 1024                     # torch's 8 count over all blocks of a process, its 256 over all their shapes


def missing(device: torch.device) -> str | None:
    """Why torch.compile can't generate code for `device`, or None. Both backends need a compiler on the host.

    Inductor compiles C++ for a CPU; Triton compiles a small C launcher for each GPU kernel.
    """
    if device.type == "cuda":
        names = [os.environ["CC"].split()[0]] if os.environ.get("CC", "").strip() else ["gcc", "clang"]
        present = any(shutil.which(name) for name in names)
        return None if present else "no C compiler found: install gcc, or name one in the variable CC"
    if named := os.environ.get("CXX", "").strip():
        return None if shutil.which(named.split()[0]) else f"no C++ compiler found: the variable CXX names {named}"
    name = "clang++" if sys.platform == "darwin" else "g++"
    return None if shutil.which(name) else f"no C++ compiler found: install {name}, or name one in the variable CXX"


def compile_in_place(block: torch.nn.Module) -> None:
    """As step 3 does it: the whole graph, static shapes."""
    allow_many_graphs()
    block.compile(fullgraph=True, dynamic=False)


def allow_many_graphs() -> None:
    """Beyond its limit Dynamo runs code as it is, and says so in a warning alone."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit,
                                                           RECOMPILE_LIMIT)


def is_compiled(module: Callable) -> bool:
    """Whether a module or function went through torch.compile, in place or not."""
    return (getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_torchdynamo_orig_callable")
            or isinstance(module, torch._dynamo.eval_frame.OptimizedModule))


def holds_compiled(module: Callable, depth: int = 2) -> bool:
    """Whether it was compiled, or a module in it was, as of a model that is compiled block by block, or it has a
    compiled function among its attributes, as step 4 has, or among theirs."""
    if is_compiled(module):
        return True
    if isinstance(module, torch.nn.Module) and any(map(is_compiled, module.modules())):
        return True
    inside = getattr(module, "__dict__", {}).values() if depth else ()
    return any(holds_compiled(value, depth - 1) for value in inside if callable(value))


@contextlib.contextmanager
def compiled_for_good(*blocks: Callable) -> Iterator[None]:
    """Raise Failed where one of these is compiled again meanwhile: what was timed would hold a compilation."""
    stance: contextlib.AbstractContextManager = contextlib.nullcontext()
    if any(map(holds_compiled, blocks)):
        stance = torch.compiler.set_stance("fail_on_recompile")
    with stance:
        try:
            yield
        except RuntimeError as error:
            if "recompile" in str(error):
                guard = guard_in(str(error))
                why = f" ({guard})" if guard else ""
                raise Failed(f"it was compiled again after warm-up{why}: its timings are void") from None
            raise


def guard_in(message: str) -> str:
    """Which guard failed first, and its line, as far as Dynamo's message has them; "" where it has none."""
    guard = re.search(r"\b\d+/\d+: (.+?)(?=\s+#|\s*\n|$)", message)
    if not guard:
        return ""
    place = re.search(r"([^/\s]+\.py):(\d+) in ", message)
    failed = guard[1].strip()
    words = failed if "mismatch" in failed else f"{failed} no longer holds"
    return f"{words}, {place[1]}:{place[2]}" if place else words


_private_caches: list[str] = []            # the folders of this process


def use_private_caches() -> None:
    """Point Inductor and Triton at a new, empty folder that this process removes when it ends.

    Their default is a predictable path that all users share, and what lies in it gets executed. One thing stays there:
    the C++ headers that Inductor precompiles for a CPU, once for each user and compiler. Where somebody else could have
    put them, it does without. Triton's folder is another process's where that has set `SHARED_KERNELS`.
    """
    signals.end_in_order()
    caches = tempfile.mkdtemp(prefix="inductor-")          # mode 0700
    if not _private_caches:
        atexit.register(remove_private_caches)
    _private_caches.append(caches)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    os.environ["TRITON_CACHE_DIR"] = os.environ.get(SHARED_KERNELS) or os.path.join(caches, "triton")
    folder = _inductor_folder()
    if not (own_folder(folder) and own_folder(os.path.join(folder, "precompiled_headers"))):
        torch._inductor.config.cpp_cache_precompile_headers = False


@contextlib.contextmanager
def sharing_kernels() -> Iterator[None]:
    """Processes that are started meanwhile find what Triton has compiled for this one, and for each other."""
    os.environ[SHARED_KERNELS] = os.environ.get("TRITON_CACHE_DIR", "")
    try:
        yield
    finally:
        del os.environ[SHARED_KERNELS]


def remove_private_caches() -> None:
    """At the end of the process. Who is told to end once more meanwhile ends a moment later.

    A compiler that was told to end with this process may still write into the folder while it is removed.
    """
    if threading.current_thread() is threading.main_thread():              # Python lets no other set them
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    for _ in range(20):
        for folder in _private_caches:
            shutil.rmtree(folder, ignore_errors=True)
        if not any(map(os.path.exists, _private_caches)):
            break
        time.sleep(0.1)


def _inductor_folder() -> str:
    """Where Inductor keeps its files unless told otherwise; asking it would take the seconds of its import."""
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, ModuleNotFoundError, OSError):          # a container's user without a name
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")


def own_folder(path: str) -> bool:
    """Whether `path` is a folder that nobody else can write to; it is made where there is none."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    except (OSError, AttributeError):              # it can't be made; or this system has no such owners
        return False
