"""Training that can be interrupted: each rank writes its shards by torch.distributed.checkpoint, other meshes read it.

A folder holds one folder for each step that is kept. Beside torch's own files lies `about.json`: what was trained, and
the norm of every tensor, so that what is loaded can be held against what was saved.
"""
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from benchmarks.studies.distributed import proof
from benchmarks.studies.distributed.layout import Layout
from common.block.config import BlockConfig
from common.outcome import Failed

ABOUT, COMPLETE = "about.json", ".metadata"        # the second is torch's, and written last
KEPT = 2                                   # the newest: one stays whole while the next is written
_NAME = re.compile(r"step-(\d+)")
About = dict[str, Any]


def about(config: BlockConfig, layers: int, number: int, layout: Layout, seed: int) -> About:
    """What two runs must have in common for one to go on with the other. The mesh is no part of it."""
    shape = config.replace(batch_size=config.batch_size * layout.batches)
    return {"blocks": f"step {number}, {layers} layers", "global shape": str(shape), "seed": seed,
            "autocast": str(config.amp_dtype),
            "ranks that split a layer": layout.tensor}     # its rows are dealt out to them


def latest(folder: str, wanted: About) -> tuple[int, Path] | None:
    """(steps, path) of the newest whole checkpoint in there; None where there is none.

    Raises ValueError for a folder of something else, and for a checkpoint that can't be read or is of another training.
    """
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise ValueError(f"--checkpoint {folder}: it is no folder")
    entries = list(root.iterdir()) if root.exists() else []
    whole = {int(found[1]): path for path in entries if (found := _NAME.fullmatch(path.name))
             and (path / COMPLETE).exists()}
    if entries and not any(_NAME.fullmatch(path.name) for path in entries):
        raise ValueError(f"--checkpoint {folder}: it holds something else; give a new folder, or one that this wrote")
    if not whole:
        return None
    steps = max(whole)
    try:
        said = json.loads((whole[steps] / ABOUT).read_text())
        other = {what: said["about"][what] for what, value in wanted.items() if said["about"][what] != value}
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"--checkpoint {whole[steps]}: it can't be read; remove it to go on with the one before"
                         ) from None
    if other:
        what, value = next(iter(other.items()))
        raise ValueError(f"--checkpoint {folder}: it is of {what} {value}, not {wanted[what]}")
    return steps, whole[steps]


def save(folder: str, steps: int, stack: nn.Module, optimizer: torch.optim.Optimizer, own: About) -> None:
    """Behind so many steps. Every rank must call it."""
    path = Path(folder) / f"step-{steps}"
    norms = norms_of(stack, optimizer)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)            # what an interrupted run left of it
        path.mkdir(parents=True)
        (path / ABOUT).write_text(json.dumps({"about": own, "norms": norms}))
    dist.barrier()
    dcp.save(_state(stack, optimizer), checkpoint_id=path)
    if dist.get_rank() == 0:
        every = sorted((int(found[1]), old) for old in Path(folder).iterdir() if (found := _NAME.fullmatch(old.name)))
        for _, old in every[:-KEPT]:
            shutil.rmtree(old)


def load(path: Path, stack: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the stack and its optimizer what was saved, on whatever mesh. Every rank must call it.

    Raises Failed where a tensor is not what was saved: a shard that was left out, or read from elsewhere.
    """
    state = _state(stack, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(stack, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    saved = json.loads((path / ABOUT).read_text())["norms"]
    norms = norms_of(stack, optimizer)
    with proof.failing_together():
        for name, norm in norms.items():
            if not abs(norm - saved[name]) <= 1e-12 * saved[name]:
                raise Failed(f"{path}: {name} is not what was saved")


def norms_of(stack: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Of every parameter and of what AdamW keeps of it, in FP64. Every rank must call it."""
    norms = {}
    for name, parameter in stack.named_parameters():
        norms[name] = proof.full(parameter).norm().item()
        for what, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor) and value.ndim:
                norms[f"{what} of {name}"] = proof.full(value).norm().item()
    return norms


def _state(stack: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, of_optimizer = get_state_dict(stack, optimizer)
    return {"model": model, "optimizer": of_optimizer}


def trained(stack: nn.Module, optimizer: torch.optim.Optimizer, config: BlockConfig, layout: Layout, seed: int,
            first: int, last: int) -> Iterator[tuple[int, float]]:
    """(step, loss over the global batch) of each step from `first` on up to `last`. Every step has a batch of its own,
    the same on every mesh.
    """
    rank = dist.get_rank()
    device = next(stack.parameters()).device
    for step in range(first, last + 1):
        whole = proof.global_batch(config, layout, seed + step)
        x, target = (proof.own_part(each, config, layout, rank).to(device) for each in whole)
        loss = proof.loss_of(stack(x), target)
        proof.backward(loss, stack, x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield step, proof.mean_over_ranks(loss)
