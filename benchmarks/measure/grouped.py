"""The matmul of a mixture of experts, whose kernels take no FP64, by torch's own matmuls."""
import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def by_matmuls(a: Tensor, b: Tensor, offs: Tensor | None = None) -> Tensor:
    """`torch._grouped_mm`: each group's rows, columns or products by a matmul of their own.

    `offs` [G] has the ends of the groups: of the rows of `a` [M, K] beside `b` [G, K, N], of the columns of `b` [K, N]
    beside `a` [G, M, K], of K where both have two dimensions. Rows and columns beyond the last end are zero.
    """
    if offs is None:
        return a @ b
    ends = offs.tolist()
    groups = list(zip([0, *ends], ends, strict=False))
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, begin:end] @ b[begin:end] for begin, end in groups])
    if b.dim() == 3:
        rows = [a[begin:end] @ b[group] for group, (begin, end) in enumerate(groups)]
        return torch.cat([*rows, a.new_zeros(a.size(0) - ends[-1], b.size(2))])
    columns = [a[group] @ b[:, begin:end] for group, (begin, end) in enumerate(groups)]
    return torch.cat([*columns, a.new_zeros(a.size(1), b.size(1) - ends[-1])], dim=1)


@contextlib.contextmanager
def grouped_in_fp64() -> Iterator[None]:
    """Meanwhile `torch._grouped_mm`, which `torch.nn.functional.grouped_mm` calls, takes FP64, too."""
    kernel: Any = getattr(torch, "_grouped_mm", None)
    if kernel is None:
        yield
        return

    def grouped(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if mat_a.dtype == mat_b.dtype == torch.float64 and not args and not any(
                value is not None for value in kwargs.values()):
            return by_matmuls(mat_a, mat_b, offs)
        return kernel(mat_a, mat_b, offs, *args, **kwargs)
    with mock.patch.object(torch, "_grouped_mm", grouped):
        yield
