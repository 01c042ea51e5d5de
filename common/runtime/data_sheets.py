"""Peaks by the vendor's data sheets, of the GPUs that are named here."""
from .limit import Peaks

# Dense rates in TFLOP/s, half of what a data sheet gives with sparsity, and TB/s. By the name that torch gives the GPU.
_HOPPER_SXM = {"float32": 66.9, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9}
_AMPERE = {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_SHEETS: dict[str, tuple[dict[str, float], float, str]] = {
    "NVIDIA H200": (_HOPPER_SXM, 4.8, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
    "NVIDIA H100 80GB HBM3": (_HOPPER_SXM, 3.35, "NVIDIA H100 Tensor Core GPU data sheet, SXM"),
    "NVIDIA H100 PCIe": ({"float32": 51.2, "tf32": 378.0, "float16": 756.5, "bfloat16": 756.5, "float8": 1513.0}, 2.0,
                         "NVIDIA H100 Tensor Core GPU data sheet, PCIe"),
    "NVIDIA A100-SXM4-80GB": (_AMPERE, 2.039, "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM"),
    "NVIDIA A100-SXM4-40GB": (_AMPERE, 1.555, "NVIDIA A100 Tensor Core GPU data sheet, 40 GB SXM"),
    "NVIDIA A100 80GB PCIe": (_AMPERE, 1.935, "NVIDIA A100 Tensor Core GPU data sheet, 80 GB PCIe"),
    "NVIDIA L40S": ({"float32": 91.6, "tf32": 183.0, "float16": 362.0, "bfloat16": 362.0, "float8": 733.0}, 0.864,
                    "NVIDIA L40S data sheet"),
    "NVIDIA L4": ({"float32": 30.3, "tf32": 60.0, "float16": 121.0, "bfloat16": 121.0, "float8": 242.5}, 0.3,
                  "NVIDIA L4 Tensor Core GPU data sheet"),
}


def data_sheet(name: str) -> tuple[Peaks, str] | None:
    """(dense peaks, the source) of the GPU that torch gives that name; None for one that is not known here."""
    if name not in _SHEETS:
        return None
    rates, terabytes, source = _SHEETS[name]
    return Peaks({dtype: 1e12 * rate for dtype, rate in rates.items()}, 1e12 * terabytes), source
