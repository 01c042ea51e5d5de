"""Input that a kernel can't take is named in one line."""
import pytest
import torch

from benchmarks.kernels.inputs import FLOATS, described, require_dtype, require_like

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("given, said", [
    (torch.ones(2, 3), "(2, 3) torch.float32 on cpu"),
    (torch.ones((), dtype=torch.int32, device="meta"), "() torch.int32 on meta"),
    (2.5, "2.5"),
    (None, "None"),
    ("x", "'x'"),
])
def test_what_is_given_is_described(given, said):
    assert described(given) == said


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_right_passes(dtype):
    x = torch.ones(4, 8, dtype=dtype)
    require_dtype("x", x)
    require_like("y", x.clone(), x)
    require_like("weight", x[0], x, (8,))
    require_like("weight", x[0], x, x.shape[-1:])


@pytest.mark.parametrize("given, dtypes, said", [
    (torch.ones(2).double(), FLOATS, "x is torch.float64: give float16, bfloat16 or float32"),
    (torch.ones(2), FLOATS[:2], "x is torch.float32: give float16 or bfloat16"),
    (torch.ones(2).long(), FLOATS, "x is torch.int64: give float16, bfloat16 or float32"),
    ([1.0, 2.0], FLOATS, "x is [1.0, 2.0]: give a tensor"),
    (None, FLOATS, "x is None: give a tensor"),
])
def test_another_dtype_is_named(given, dtypes, said):
    with pytest.raises(ValueError) as error:
        require_dtype("x", given, dtypes)
    assert str(error.value) == said


@pytest.mark.parametrize("given, shape, said", [
    (torch.ones(2, 8), None, "b is (2, 8) torch.float32 on cpu: give (4, 8) torch.float32 on cpu, as a has it"),
    (torch.ones(4, 8).half(), None, "b is (4, 8) torch.float16 on cpu: give (4, 8) torch.float32 on cpu, as a has it"),
    (torch.ones(7), (8,), "b is (7,) torch.float32 on cpu: give (8,) torch.float32 on cpu, as a has it"),
    (torch.ones(8, device="meta"), (8,),
     "b is (8,) torch.float32 on meta: give (8,) torch.float32 on cpu, as a has it"),
    (None, (8,), "b is None: give (8,) torch.float32 on cpu, as a has it"),
])
def test_what_is_not_alike_is_named(given, shape, said):
    with pytest.raises(ValueError) as error:
        require_like("b", given, torch.ones(4, 8), shape, name_of_x="a")
    assert str(error.value) == said
