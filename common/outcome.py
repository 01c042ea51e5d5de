"""How a run can end: its statuses, its exit statuses, and the errors that become one."""
import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

EXIT = {"ok": 0, "failed": 1, "usage": 2, "oom": 3, "skipped": 4}


class Failed(Exception):
    """A check failed: the run ends with status `failed` and this reason, and what was wrong is not timed."""


class UserError(ValueError):
    """A mistake of the user, in a line. The process ends with it, as failed."""


class Outcome(Protocol):
    """Whatever has a status and a reason."""
    status: str                # "ok", "failed", "skipped" or "oom"
    reason: str


@contextlib.contextmanager
def judged(outcome: Outcome, out_of_memory: Callable[[BaseException], str], foreign: bool = False) -> Iterator[None]:
    """Turn what a block can fail by into the status and reason of `outcome`.

    Any other error passes; where the block is `foreign`, another library's or a user's, it is a failure like the rest.
    """
    try:
        yield
    except Failed as error:
        outcome.status, outcome.reason = "failed", str(error)
    except NotImplementedError as error:
        outcome.status, outcome.reason = "skipped", str(error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        outcome.status, outcome.reason = "oom", out_of_memory(error)
    except RuntimeError as error:
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):    # in a clause above, Ctrl-C would import it too
            outcome.status, outcome.reason = "failed", _of_the_compiler(error)
        elif is_out_of_memory(error):
            outcome.status, outcome.reason = "oom", out_of_memory(error)
        elif foreign:
            outcome.status, outcome.reason = "failed", in_a_line(error)
        else:
            raise
    except Exception as error:
        if not foreign:
            raise
        outcome.status, outcome.reason = "failed", in_a_line(error)


def _of_the_compiler(error: RuntimeError) -> str:
    """What torch.compile failed by, in a line. A full disk hides somewhere in what its C++ compiler printed."""
    message = str(error).strip() or "no message"
    if re.search("no space left on device", message, re.IGNORECASE):
        return (f"torch.compile: no space left on device: its files are under {tempfile.gettempdir()}, "
                "set TMPDIR to a folder with room")
    return f"torch.compile: {_first_line(message)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is why it was raised: the CPU's allocator and cuBLAS have no exception of their own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return re.search("can't allocate memory|out of memory|ALLOC_FAILED", str(error)) is not None


def in_a_line(error: BaseException) -> str:
    """Kind and first line of an error of another library, with the lines after it that finish what it opens."""
    return f"{type(error).__name__}: {_first_line(str(error))}"


def _first_line(text: str) -> str:
    """The first line of a message, with those after it that finish what it opens."""
    line, *others = (text.strip() or "no message").splitlines()
    for other in others:
        if not line.endswith(("(", "[", ":", ",")):
            break
        line = f"{line} {other.strip()}"
    return line
