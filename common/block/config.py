"""The one model configuration that every step shares, and the named shapes."""
import dataclasses
import math
from dataclasses import dataclass

import torch

DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
LAYER_NORM_EPS = 1e-5
NARROWEST = 32              # E in TF32 or 16 bits: over fewer elements roundings average out so little that a right
                            # block can fail the check
LARGEST = 2**24             # of a size: more is taken for a typing error
FP8_WEIGHTS = ("per-call", "cached", "kept")
SDPA, SERIES = ATTENTIONS = ("sdpa", "series")      # PyTorch's fused kernels, or benchmarks/kernels/cuda/attention
SERIES_WIDTHS = (64, 128)   # of a head


def dtype_name(dtype: torch.dtype | None) -> str:
    """torch.float16 -> "float16"; None (no autocast) -> "none"."""
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class BlockConfig:
    """The shape and the arithmetic of one transformer block.

    Sizes are counts: B = batch_size, S = seq_len, E = hidden_size, H = num_heads, D = E / H,
    F = ffn_hidden_size (4 E where it is None). Raises ValueError, naming the value and the fix.
    """
    batch_size: int
    seq_len: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int = None                       # type: ignore[assignment]  # None becomes 4 E
    dropout: float = 0.0                              # probability, on the attention weights, in training only
    amp_dtype: torch.dtype | None = torch.float16     # autocast's dtype; None: no autocast, and no FP8 in step 4
    fp8_weights: str = "per-call"                     # step 4: when weights are quantized, one of FP8_WEIGHTS
    fp8_attention: bool = False                       # step 4: attention in FP8 too
    attention: str = SDPA                             # steps 2 and 3: whose kernels, one of ATTENTIONS

    def __post_init__(self):
        if self.ffn_hidden_size is None:
            object.__setattr__(self, "ffn_hidden_size", 4 * self.hidden_size)
        for name in ("batch_size", "seq_len", "hidden_size", "num_heads", "ffn_hidden_size"):
            value, least = getattr(self, name), 3 if name == "hidden_size" else 1     # LayerNorm makes two values +-1
            if type(value) is not int or not least <= value <= LARGEST:
                raise ValueError(f"{name} is {value}: give a whole number from {least} to {LARGEST}")
        if self.hidden_size % self.num_heads:
            heads = min((n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0),
                        key=lambda n: abs(n - self.num_heads))
            unit = math.lcm(self.num_heads, 16)                # FP8 takes multiples of 16 alone
            width = max(math.ceil(NARROWEST / unit), round(self.hidden_size / unit)) * unit
            tries = [f"hidden_size {width}"] if width <= LARGEST else []
            if self.hidden_size >= NARROWEST or not tries:
                tries.append(f"num_heads {heads}")
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}: "
                             f"try {' or '.join(tries)}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: give a probability in [0, 1)")
        if self.amp_dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(f"amp_dtype is {self.amp_dtype}: give torch.float16, torch.bfloat16 or None")
        if self.fp8_weights not in FP8_WEIGHTS:
            raise ValueError(f"fp8_weights is {self.fp8_weights!r}: give one of {', '.join(FP8_WEIGHTS)}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention is {self.attention!r}: give one of {', '.join(ATTENTIONS)}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len

    def replace(self, **changes) -> "BlockConfig":
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def check_width(self) -> None:
        """Raise ValueError where the errors of TF32 or 16-bit matmuls average too few roundings to be judged by a gate.
        """
        if self.hidden_size < NARROWEST:
            raise ValueError(f"hidden_size {self.hidden_size}: too narrow to tell a wrong block from the rounding of "
                             f"TF32 or 16 bits, try {NARROWEST} or more")

    def check_fp8(self) -> None:
        """Raise ValueError unless FP8 GEMMs can run this shape, forward and backward.

        cuBLAS wants every GEMM dimension divisible by 16, and B * S is the reduced one in the weight gradient.
        """
        for name, value in {"batch_size * seq_len": self.tokens, "hidden_size": self.hidden_size,
                            "ffn_hidden_size": self.ffn_hidden_size}.items():
            if value % 16:
                raise ValueError(f"FP8 needs {name} divisible by 16, not {value}: try {value + 16 - value % 16}, "
                                 "or, in a script, run without FP8 by --amp-dtype none")

    def check_series(self, dtype: str) -> None:
        """Raise ValueError unless the series' kernels take this shape and `dtype`, what attention computes in."""
        if dtype not in ("float16", "bfloat16"):
            raise ValueError(f"attention by the series is in 16 bits, not {dtype}: leave out --amp-dtype none")
        if self.head_dim not in SERIES_WIDTHS:
            widths = " or ".join(map(str, SERIES_WIDTHS))
            fitting = [str(self.hidden_size // width) for width in SERIES_WIDTHS if self.hidden_size % width == 0]
            fix = f"num_heads {' or '.join(fitting)}" if fitting else f"a hidden_size divisible by {SERIES_WIDTHS[0]}"
            raise ValueError(f"attention by the series has heads of {widths}, not {self.head_dim}: try {fix}")
        if self.dropout:
            raise ValueError("attention by the series has no dropout: leave out --dropout")

    @property
    def dimensions(self) -> dict[str, int]:
        """Letter -> size, in the order in which a shape is written."""
        return {"B": self.batch_size, "S": self.seq_len, "E": self.hidden_size, "H": self.num_heads,
                "D": self.head_dim, "F": self.ffn_hidden_size}

    def __str__(self) -> str:
        return " ".join(f"{letter}{size}" for letter, size in self.dimensions.items())


# Widths and heads as published: GPT-2 (Radford et al. 2019, table 2), GPT-3 (Brown et al. 2020, table 2.1),
# Llama 3 8B (Dubey et al. 2024, table 3; its FFN is gated and its attention grouped, only the widths are taken).
# te-tutorial has the widths and the sequence of Transformer Engine's "Getting Started", at batch 8 in place of its 4.
PRESETS = {
    "te-tutorial": BlockConfig(batch_size=8, seq_len=2048, hidden_size=4096, num_heads=32, ffn_hidden_size=16384),
    "gpt2": BlockConfig(batch_size=32, seq_len=1024, hidden_size=768, num_heads=12),
    "gpt2-xl": BlockConfig(batch_size=16, seq_len=1024, hidden_size=1600, num_heads=25),
    "llama-8b": BlockConfig(batch_size=2, seq_len=8192, hidden_size=4096, num_heads=32, ffn_hidden_size=14336),
    "gpt3-175b": BlockConfig(batch_size=2, seq_len=2048, hidden_size=12288, num_heads=96),
    "cpu": BlockConfig(batch_size=4, seq_len=512, hidden_size=768, num_heads=12),
    "tiny": BlockConfig(batch_size=2, seq_len=64, hidden_size=64, num_heads=4),
}


def default_preset(device_type: str) -> str:
    """The named shape a run takes when none is asked for: the largest that shows the steps and still runs there."""
    return "te-tutorial" if device_type == "cuda" else "cpu"
