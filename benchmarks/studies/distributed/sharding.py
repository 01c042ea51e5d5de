"""The settings of FSDP."""
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from common.block.config import DTYPES, BlockConfig, dtype_name

AUTOCAST, POLICY = "autocast", "policy"                    # who casts to 16 bits: the block itself, or FSDP


@dataclass(frozen=True)
class Sharding:
    """The settings of FSDP. Each is set explicitly: some defaults differ from version to version of torch."""
    precision: str = AUTOCAST
    reshard: bool = True                   # free the gathered parameters behind a layer's forward
    prefetch: int = 1                      # layers whose parameters are gathered ahead, either way
    reduce_dtype: torch.dtype = torch.float32              # that gradients are summed in
    divide_by: float | None = None         # gradients are; None: by the number of batches, which gives their mean

    @property
    def variant(self) -> dict[str, Any]:
        """Of a record's variant: who casts, and what is not as it is by default."""
        usual = Sharding()
        words: dict[str, Any] = {"precision": self.precision}
        if self.reshard != usual.reshard:
            words["gathered"] = "kept"
        if self.prefetch != usual.prefetch:
            words["prefetch"] = self.prefetch
        if self.reduce_dtype != usual.reduce_dtype:
            words["reduced in"] = dtype_name(self.reduce_dtype)
        if self.divide_by:
            words["divided by"] = self.divide_by
        return words

    @classmethod
    def of_variant(cls, variant: dict[str, Any]) -> "Sharding":
        """The settings that a record names."""
        reduced_in = variant.get("reduced in", dtype_name(cls.reduce_dtype))
        return cls(variant["precision"], "gathered" not in variant, variant.get("prefetch", cls.prefetch),
                   DTYPES[reduced_in], variant.get("divided by"))

    def divided(self, batches: int) -> float:
        """How many times smaller than the mean over the batches gradients are."""
        return (self.divide_by or batches) / batches

    def policy(self, config: BlockConfig, dtype: torch.dtype) -> MixedPrecisionPolicy:
        """Of a layer with parameters of that dtype."""
        cast_to = config.amp_dtype if self.precision == POLICY and dtype == torch.float32 else None
        reduce_in = torch.float64 if dtype == torch.float64 else self.reduce_dtype
        return MixedPrecisionPolicy(param_dtype=cast_to, reduce_dtype=reduce_in, output_dtype=None,
                                    cast_forward_inputs=True)
