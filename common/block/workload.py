"""What is timed, as a value: its unavoidable operations, what it multiplies in, its tokens, the memory it needs.

A block derives it from its config (`block_work`), any other model from the graph of its operations.
"""
from collections.abc import Iterator
from dataclasses import dataclass, replace

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"        # the passes
MATMUL, ATTENTION, MEMORY = KINDS = ("matmul", "attention", "memory")
COPY = "copy"                          # the rate of what moves bytes alone


# Of each pair of positions, products of a query's width and of a value's. A fused backward computes the scores again.
_ATTENTION_PRODUCTS = {FORWARD: (1, 1), BACKWARD: (3, 2), BOTH: (4, 3)}


def attention_flops(pairs: int, width: int, width_of_values: int, mode: str = FORWARD) -> int:
    """Of so many pairs of a query and a key: 2 for a multiplication and its addition."""
    of_queries, of_values = _ATTENTION_PRODUCTS[mode]
    return 2 * pairs * (of_queries * width + of_values * width_of_values)


def causal_attention_flops(length: int, width: int, width_of_values: int, mode: str = FORWARD) -> int:
    """Of one head: half of what all its pairs need."""
    return attention_flops(length**2, width, width_of_values, mode) // 2


@dataclass(frozen=True)
class Operation:
    """One unavoidable operation: its FLOPs, and the bytes it reads and writes at the least."""
    name: str
    kind: str                          # one of KINDS
    flops: float
    bytes: float
    arithmetic: str = ""               # what its FLOPs are in: "float32", "tf32", "float16", "bfloat16", "float8"
    shape: tuple[int, ...] = ()        # m, k, n of a matmul [m, k] x [k, n]; B, S, H, D of causal attention
    layout: str = "forward"            # or "input gradient", "weight gradient"; "backward" of attention

    @property
    def rate(self) -> str:
        """What its time goes by, as `limit.Peaks` names it: "float16", "float16 attention backward", "copy"."""
        if self.kind == MEMORY:
            return COPY
        if self.kind == MATMUL:
            return self.arithmetic
        return f"{self.arithmetic} attention" + (" backward" if self.layout == "backward" else "")


@dataclass(frozen=True)
class Workload:
    """The work of a call, and of its backward. Without operations it has no limit."""
    matmul: str                                        # what most of its matmuls multiply in
    forward: tuple[Operation, ...] = ()
    backward: tuple[Operation, ...] = ()               # what a backward adds
    tokens: int = 0                                    # that one call takes in
    bytes_needed: int = 0                              # by a checked and timed run, estimated on the high side

    def operations(self, mode: str) -> Iterator[Operation]:
        """Those of a pass."""
        if mode != BACKWARD:
            yield from self.forward
        if mode != FORWARD:
            yield from self.backward

    def flops(self, mode: str) -> float:
        """Of matmuls and attention in a pass: 2 for a multiplication and its addition."""
        return sum(operation.flops for operation in self.operations(mode))

    def part(self, names: tuple[str, ...], share: float = 1.0) -> "Workload":
        """That share of the operations whose names begin so."""
        def taken(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
            return tuple(replace(operation, flops=share * operation.flops, bytes=share * operation.bytes)
                         for operation in operations if operation.name.startswith(names))
        return replace(self, forward=taken(self.forward), backward=taken(self.backward))
