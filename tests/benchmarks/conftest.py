"""What the tests of the studies and of the assistant share."""
import functools
import gc

import pytest
import torch
import torch._inductor.config

from common.runtime import peaks

_of_square, _of_copy = functools.cache(peaks._matmul_rate), functools.cache(peaks._copy_rate)


def _of_any_shape(shape, name, device):
    small = 64, 64, 64                                           # a CPU multiplies FP8 one number after the other
    return _of_square(small if name == "float8" else peaks.square(device), name, device)


@pytest.fixture(scope="module", autouse=True)
def a_machine_that_is_measured_once():
    """A CPU's rate of a large square stands for all shapes, and is measured once, as is that of a copy."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(peaks, "_matmul_rate", _of_any_shape)
            patch.setattr(peaks, "_copy_rate", _of_copy)
        yield


@pytest.fixture(scope="module", autouse=True)
def loops_without_vector_instructions(request):
    """Inductor's loops for a CPU compile sooner without them. Tests of the steps keep them, and so does a module that
    says VECTORS = True: FlexAttention does not compile without.
    """
    length = None if getattr(request.module, "VECTORS", False) else 1                    # None: what the machine has
    with torch._inductor.config.patch({"cpp.simdlen": length}):
        yield


@pytest.fixture(autouse=True)
def quick_collections_in_each_test(quick_collections):
    """What earlier tests left, as what a compiler keeps, is looked at once."""
    gc.collect()
    gc.freeze()
