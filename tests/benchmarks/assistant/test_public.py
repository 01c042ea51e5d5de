"""The public models of `examples/public.py`: each is a task, and its loss has gradients."""
import pytest
import torch

from benchmarks.assistant.task import Task
from benchmarks.examples import public

LIBRARY = {"gpt2": "transformers", "llama": "transformers", "bert": "transformers", "t5": "transformers",
           "whisper": "transformers", "mixtral": "transformers", "resnet50": "torchvision", "convnext": "torchvision",
           "vit": "torchvision", "swin": "torchvision", "unet": "torch", "lstm": "torch",
           "encoder": "torch", "compiled": "torch"}


@pytest.mark.integration
@pytest.mark.parametrize("name", LIBRARY)
def test_a_public_model_is_a_task_and_small_on_a_cpu(name, monkeypatch):
    pytest.importorskip(LIBRARY[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    task = Task.of(getattr(public, name)())
    if name == "compiled":
        task.model.compile(backend="eager")                            # no test of a builder waits for a compiler
    assert task.loss is not None
    loss = task.loss(task.model(**task.inputs))
    loss.backward()
    assert loss.isfinite() and any(p.grad is not None and p.grad.any() for p in task.model.parameters())
    assert sum(p.numel() for p in task.model.parameters()) < 30e6
