"""What spread blocks must compute: one process in FP64 says it, on the same global batch.

The loss is the mean of (y - target)^2 over the global batch. Each rank takes the mean of its own batch, so the mean of
the ranks' losses and gradients is the whole one's.
"""
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.studies.distributed.account import Counting, Moved, state_of
from benchmarks.studies.distributed.layout import Layout
from benchmarks.studies.distributed.parallel import Stack, gathered, joined, share_scales, values_of
from common import parameters
from common.block import oracle
from common.block.config import BlockConfig
from common.measure.subject import CALLS_TO_CALIBRATE, check_scales
from common.outcome import Failed

LOSS, BRANCH, INPUT, GRADIENT, UPDATE = "loss", "branch", "input gradient", "parameter gradient", "optimizer step"
MEANING = 1e-12                            # what any of them may be off by in FP64, relative L2
SCORES_AT_ONCE = 2**27                     # of attention, a GiB in FP64
FP32_UPDATE = 1e-3                         # an update is a thousandth of its parameter, whose rounding it carries


@dataclass(frozen=True)
class Truth:
    """What one process computes in FP64."""
    loss: float
    branch: Tensor                         # y - x, [global B, S, E]
    x_gradient: Tensor
    gradients: list[dict[str, Tensor]]     # of each layer, by canonical name


@dataclass
class Found:
    """The errors of a run, what its forward and backward moved, and the bytes that this rank keeps."""
    errors: dict[str, float] = field(default_factory=dict)
    worst_parameter: str = ""
    moved: dict[str, Moved] = field(default_factory=dict)
    state_bytes: int = 0

    def see(self, what: str, error: float, name: str = "") -> None:
        """Keep the worst of each kind."""
        error = math.inf if math.isnan(error) else error
        if error > self.errors.get(what, -1.0):
            self.errors[what] = error
            if what == GRADIENT:
                self.worst_parameter = name


def global_batch(config: BlockConfig, layout: Layout, seed: int) -> tuple[Tensor, Tensor]:
    """(x, target), [batches * B, S, E] each, FP32 on the CPU: the same on every rank."""
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    shape = layout.batches * config.batch_size, config.seq_len, config.hidden_size
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def own_part(whole: Tensor, config: BlockConfig, layout: Layout, rank: int) -> Tensor:
    """The sequences of that rank's batch."""
    first = layout.batch_of(rank) * config.batch_size
    return whole[first:first + config.batch_size]


def adamw(every: Sequence[Tensor]) -> torch.optim.Optimizer:
    """As it is used to train such blocks."""
    return torch.optim.AdamW(every, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def backward(loss: Tensor, module: nn.Module, x: Tensor) -> None:
    """Of `loss_of(module(x), target)`, into .grad of the parameters and of x, by way of a larger loss.

    What a single element adds to such a mean has gradients too small for FP16: they become about 1/16, so that sums
    over many tokens still fit. A power of two rounds nothing.
    """
    scale = 2.0 ** (math.floor(math.log2(x.numel())) - 4)
    (scale * loss).backward()
    for leaf in (x, *module.parameters()):                 # the parameters are shards again, now at the latest
        if leaf.grad is not None:
            leaf.grad.div_(scale)


def mean_over_ranks(loss: Tensor) -> float:
    """Of the ranks' losses: that over the global batch. Every rank must call it."""
    mean = loss.detach().double() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def truth_of(config: BlockConfig, layers: int, layout: Layout, seed: int, device: torch.device) -> Truth:
    """One process in FP64, a few sequences at a time: it writes out whole matrices of scores, which are large."""
    whole, targets = global_batch(config, layout, seed)
    every = []
    for number in range(layers):
        values = values_of(config, number, seed, torch.float32)
        every.append({name: value.to(device, torch.float64).requires_grad_() for name, value in values.items()})
    loss, branches, x_gradients = 0.0, [], []
    at_once = max(1, SCORES_AT_ONCE // (config.num_heads * config.seq_len**2))
    for x, target in zip(whole.split(at_once), targets.split(at_once), strict=True):
        x, target = x.to(device, torch.float64).requires_grad_(), target.to(device, torch.float64)
        y = x
        for values in every:
            y = oracle.block(y, values, config)
        share = loss_of(y, target) * (len(x) / len(whole))
        share.backward()
        loss += share.item()
        branches.append(y.detach() - x.detach())
        x_gradients.append(_there(x.grad))
    gradients = [{name: _there(value.grad) for name, value in values.items()} for values in every]
    return Truth(loss, torch.cat(branches), torch.cat(x_gradients), gradients)


def found_by(stack: Stack, config: BlockConfig, layout: Layout, seed: int, dtype: torch.dtype, device: torch.device,
             truth: Truth | None, reached: Callable[[str], None] = lambda phase: None, divided: float = 1.0,
             calibrated: bool = False) -> Found:
    """The errors of one forward, backward and optimizer step of spread blocks; rank 0, which has the truth, knows them.

    Every rank must call it. `reached` hears of each phase. `divided` is how many times smaller than the mean over the
    batches the gradients were asked to be. `calibrated` is for FP8, whose scales must first see some calls.
    """
    rank = dist.get_rank()
    batch = [own_part(whole, config, layout, rank).to(device, dtype) for whole in global_batch(config, layout, seed)]
    x, target = batch[0].requires_grad_(), batch[1]
    if calibrated:
        reached("calibrating")
        _calibrate(stack, x, target)
    reached("forward")
    y = stack(x)
    loss = loss_of(y, target)
    reached("backward")
    backward(loss, stack, x)
    reached("comparing")
    found = Found()
    mean = mean_over_ranks(loss)
    if truth:
        found.see(LOSS, abs(mean - truth.loss) / truth.loss)
    _compare_batches(found, x, y, config, layout, truth)
    gradients = _compare_gradients(found, stack, layout, truth, divided)
    reached("optimizer step")
    _compare_update(found, stack, layout, gradients)
    reached("counting")
    stack.zero_grad(set_to_none=True)
    share_scales(stack, False)                             # no formula has what Transformer Engine moves for that
    # Apart, and as it is uncompiled: torch.compile refuses such a mode.
    with torch.compiler.set_stance("force_eager"), Counting() as counting:
        loss_of(stack(x), target).backward()
    share_scales(stack, True)
    found.moved = counting.moved
    return found


def _calibrate(stack: Stack, x: Tensor, target: Tensor) -> None:
    """Let FP8 scales see what is checked, as one process has it. Raises Failed if they don't move."""
    for _ in range(CALLS_TO_CALIBRATE):
        again = x.detach().clone().requires_grad_()
        backward(loss_of(stack(again), target), stack, again)
    stack.zero_grad(set_to_none=True)
    with failing_together():
        for block in stack.blocks:
            check_scales(block)


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Where a check of one rank fails, all ranks raise Failed, which names it. Every rank must enter it.

    A rank that failed alone would go on to other collectives than the rest, and be taken for one that mismatches.
    """
    own = ""
    try:
        yield
    except Failed as error:
        own = str(error)
    every = [""] * dist.get_world_size()
    dist.all_gather_object(every, own)
    failed = {rank: reason for rank, reason in enumerate(every) if reason}
    if failed:
        rank, reason = next(iter(failed.items()))
        raise Failed(reason if len(failed) == len(every) else f"rank {rank}: {reason}")


def _compare_gradients(found: Found, stack: Stack, layout: Layout, truth: Truth | None, divided: float
                       ) -> list[dict[str, Tensor]]:
    """Those of every layer, whole and in FP64, by canonical name."""
    every: list[dict[str, Tensor]] = []
    for number, block in enumerate(stack.blocks):
        every.append({})
        for name, value in parameters.gradients(block).items():
            gradient = None if value is None else whole_of(name, value, block, layout)
            if gradient is not None:
                every[-1][name] = gradient
            if truth:
                error = oracle.relative_error(gradient, truth.gradients[number][name] / divided)
                found.see(GRADIENT, error, f"layer {number}, {name}")
    return every


def _compare_update(found: Found, stack: Stack, layout: Layout, gradients: list[dict[str, Tensor]]) -> None:
    """One step of AdamW on shards against one in FP64 on whole parameters and the same gradients.

    They are those that were found: AdamW divides a gradient by its own size, so of one that is mere rounding, as the
    keys' bias has, no two runs make the same.
    """
    before = [parameters_of(block, layout) for block in stack.blocks]
    optimizer = adamw(list(stack.parameters()))
    optimizer.step()
    found.state_bytes = state_of(stack, optimizer)
    for block, old, of_layer in zip(stack.blocks, before, gradients, strict=True):
        new = parameters_of(block, layout)
        for name, gradient in of_layer.items():
            expected = old[name].clone()
            expected.grad = gradient
            adamw([expected]).step()
            found.see(UPDATE, oracle.relative_error(new[name] - old[name], expected.detach() - old[name]))


def _compare_batches(found: Found, x: Tensor, y: Tensor, config: BlockConfig, layout: Layout, truth: Truth | None
                     ) -> None:
    """Outputs and input gradients of all ranks, those that share a batch too, on rank 0."""
    gradient = _there(x.grad).double() / layout.batches
    branches, gradients = (_on_first(each) for each in (y.detach().double() - x.detach().double(), gradient))
    if not truth:
        return
    for rank, (branch, of_input) in enumerate(zip(branches, gradients, strict=True)):
        found.see(INPUT, oracle.relative_error(of_input, own_part(truth.x_gradient, config, layout, rank)))
        found.see(BRANCH, oracle.relative_error(branch, own_part(truth.branch, config, layout, rank)))


def _on_first(own: Tensor) -> list[Tensor]:
    """All ranks' on rank 0, nothing on the others."""
    is_first = dist.get_rank() == 0
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())] if is_first else None
    dist.gather(own.contiguous(), parts)
    return parts or []


def full(value: Tensor) -> Tensor:
    """The whole tensor of which each rank holds a shard. Every rank must call it."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().double()


def whole_of(name: str, value: Tensor, block: nn.Module, layout: Layout) -> Tensor:
    """A block's parameter or its gradient in FP64, rows in canonical order. Every rank must call it."""
    return gathered(name, joined(name, full(value), block), layout.tensor)


def parameters_of(block: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """Copies of its parameters in FP64, by canonical name."""
    return {name: whole_of(name, parameter, block, layout).clone()
            for name, parameter in parameters.named(block).items()}


def gates(kind: str, layers: int) -> dict[str, float]:
    """What each may be off by where matmuls multiply in `kind`. Every layer rounds by itself: errors add as squares do.
    """
    if kind == "float64":
        return dict.fromkeys((LOSS, BRANCH, INPUT, GRADIENT, UPDATE), MEANING)
    branch, gradient = (gate * math.sqrt(layers) for gate in oracle.GATES[kind])
    return {LOSS: branch, BRANCH: branch, INPUT: gradient, GRADIENT: gradient, UPDATE: FP32_UPDATE}


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
