"""Which engine step 4 runs on and why, when Transformer Engine is imported, and beside which cuDNN."""
import contextlib
import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from common import BlockConfig, parameters, steps
from common.block import emulation, oracle
from common.runtime import engine, machine
from tests.helpers.blocks import case, results

CONFIG = BlockConfig(batch_size=2, seq_len=32, hidden_size=32, num_heads=4)
GPU = torch.device("cuda")


# -------------------------------------------------------------------------------------------------------- when imported


PACKAGE = """
import os
from common.runtime import machine
found = machine.cudnn_libraries()
names = {path.name.partition(".")[0] for path in found}
print("imported beside", os.environ["CUDNN_HOME"], *{str(path.parent) for path in found},
      {"libcudnn", "libcudnn_graph", "libcudnn_ops"} <= names)
__version__ = "0.1"
"""
MODULE = """
def is_fp8_available(return_reason):
    return False, "a stub has no FP8"
"""
LOOK = """
import os, sys
import torch
import common.run
from common import BlockConfig, parameters, steps
from common.runtime import engine
config = BlockConfig(2, 32, 32, 4)
values = parameters.seeded(config)
for step in steps.ALL:
    step.module.Block
    if not step.traits.compiled:                 # to build it imports the compiler, which takes seconds
        step.build(config, values, "cpu")
    assert "transformer_engine" not in sys.modules, step.name
print("built")
print(engine.why_not(config, torch.float32, torch.device("cuda")))
print(engine.version(), "transformer_engine.pytorch" in sys.modules, os.environ["CUDNN_HOME"])
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[str]:
    """What a process prints that has a package in the place of Transformer Engine's, and another cuDNN at hand."""
    folder = tmp_path_factory.mktemp("stub")
    (folder / "transformer_engine").mkdir()
    (folder / "transformer_engine" / "__init__.py").write_text(PACKAGE)
    (folder / "transformer_engine" / "pytorch.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "CUDNN_HOME": "/elsewhere"}
    done = subprocess.run([sys.executable, "-c", LOOK], cwd=steps.ROOT, env=environment, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.integration
def test_transformer_engine_is_imported_when_it_is_asked_for(told):
    """Steps 0 to 3 do without it, and so does step 4 on a CPU: its import takes seconds, and may fail in any way."""
    built, imported, *after = told
    assert built == "built" and imported.startswith("imported beside ")
    assert after == ["a stub has no FP8", "0.1 True /elsewhere"]


@pytest.mark.integration
def test_transformer_engine_is_imported_beside_torchs_cudnn_alone(told):
    """The package says what it finds."""
    if not machine.cudnn_libraries():
        pytest.skip("this torch has loaded no cuDNN, or the system does not say")
    home, folder, whole = told[1].removeprefix("imported beside ").split()
    assert home == folder and whole == "True", told


@pytest.fixture
def asked(monkeypatch):
    """Counts how often somebody wants Transformer Engine, which here does not import."""
    calls = []

    def imported():
        calls.append(1)
        return None, "ImportError: no such thing"
    monkeypatch.setattr(engine, "_imported", imported)
    return calls


@pytest.mark.unit
@pytest.mark.parametrize("step", steps.ALL, ids=lambda step: step.name)
def test_only_step_4_chooses_an_engine(step, asked, monkeypatch):
    """When it is built. On a CPU it asks for none; where there is a GPU it asks once."""
    chosen = []
    choose = engine.choose

    def watched(config, values, device):
        chosen.append(device)
        return choose(config, values, device)
    monkeypatch.setattr(engine, "choose", watched)
    block = step.build(CONFIG, case(CONFIG)[0], "cpu")
    assert chosen == (["cpu"] if step.number == 4 else []) and asked == []
    assert hasattr(block, "engine") == (step.number == 4)
    assert engine.choose(CONFIG, case(CONFIG)[0], "cuda") == (
        emulation, engine.emulation_because("Transformer Engine does not import: ImportError: no such thing"))
    assert len(asked) == 1


@pytest.fixture
def not_imported_yet():
    """What this process knows of Transformer Engine is forgotten, before this test and behind it."""
    engine._imported.cache_clear()
    yield
    engine._imported.cache_clear()


IMPORT_ERRORS = [ImportError("no module"), RuntimeError("empty meta package"), FileNotFoundError(2, "no extension"),
                 OSError("libcuda.so.1: cannot open\nand more"), AssertionError()]


@pytest.mark.unit
@pytest.mark.parametrize("error", IMPORT_ERRORS, ids=lambda error: type(error).__name__)
def test_what_does_not_import_is_a_reason_and_no_crash(error, not_imported_yet, monkeypatch):
    """Whatever an incomplete installation raises, with or without a message: one line that names it."""
    tried = []
    import_module = importlib.import_module

    def refuse(name, *arguments):
        if not name.startswith("transformer_engine"):
            return import_module(name, *arguments)
        tried.append(name)
        raise error
    monkeypatch.setattr(importlib, "import_module", refuse)
    reason = engine.why_not(CONFIG, torch.float32, GPU)
    assert reason.startswith(f"Transformer Engine does not import: {type(error).__name__}") and "\n" not in reason
    assert engine.import_error() in reason
    with pytest.raises(ImportError, match=type(error).__name__):
        engine.transformer_engine()
    assert tried == ["transformer_engine"]                                  # once in a process


@pytest.mark.unit
def test_filters_of_warnings_survive_the_import(not_imported_yet, monkeypatch):
    """Transformer Engine sets some of its own, in front of those that keep stderr quiet."""
    import_module = importlib.import_module

    def imported(name, *arguments):
        if not name.startswith("transformer_engine"):
            return import_module(name, *arguments)
        warnings.filterwarnings("module", category=DeprecationWarning)
        return SimpleNamespace()
    monkeypatch.setattr(importlib, "import_module", imported)
    before = list(warnings.filters)
    engine.transformer_engine()
    assert warnings.filters == before


# -------------------------------------------------------------------------------------------------------- which and why


@pytest.fixture
def hopper(monkeypatch):
    """hopper(**changes): a Transformer Engine that can do it all, on an H200, in an environment that says nothing."""
    def set_up(fp8=(True, ""), capability=(9, 0), **environment):
        te = SimpleNamespace(is_fp8_available=lambda return_reason: fp8)
        monkeypatch.setattr(engine, "_imported", lambda: (te, None))
        monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(__version__="2.20.2"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(os, "environ", dict(environment))
        return te
    return set_up


@pytest.mark.unit
def test_where_transformer_engine_can_run_a_block_it_does(hopper):
    te = hopper()
    assert engine.choose(CONFIG, case(CONFIG)[0], "cuda") == (te, engine.Engine(engine.TRANSFORMER_ENGINE, "2.20.2"))
    assert engine.transformer_engine() is te and engine.import_error() is None


@pytest.mark.unit
def test_a_gpu_without_fp8_is_a_reason_where_fp8_is_asked_for(hopper):
    te = hopper(fp8=(False, "Device compute capability 8.9 or higher required for FP8 execution."))
    reason = engine.why_not(CONFIG, torch.float32, GPU)
    assert reason == "Device compute capability 8.9 or higher required for FP8 execution."
    assert engine.choose(CONFIG, case(CONFIG)[0], "cuda") == (emulation, engine.emulation_because(reason))
    assert engine.choose(CONFIG.replace(amp_dtype=None), case(CONFIG)[0], "cuda")[0] is te


@pytest.mark.unit
def test_float64_is_emulated_on_a_gpu_too(hopper):
    hopper()
    assert engine.why_not(CONFIG, torch.float64, GPU) == "Transformer Engine has no float64"
    values = case(CONFIG, dtype=torch.float64)[0]
    assert engine.choose(CONFIG, values, "cuda") == (
        emulation, engine.emulation_because("Transformer Engine has no float64"))


@pytest.mark.unit
def test_a_block_says_that_it_is_emulated_and_why():
    block = steps.load(4).build(CONFIG, case(CONFIG)[0], "cpu")
    assert block.engine == engine.emulation_because("Transformer Engine needs a GPU, this is a CPU")


@pytest.mark.unit
@pytest.mark.parametrize("capability, environment, expected", [
    ((9, 0), {}, {"NVTE_NORM_FWD_USE_CUDNN": "1", "NVTE_NORM_BWD_USE_CUDNN": "1"}),
    ((9, 0), {"NVTE_NORM_FWD_USE_CUDNN": "0"}, {"NVTE_NORM_FWD_USE_CUDNN": "0", "NVTE_NORM_BWD_USE_CUDNN": "1"}),
    ((10, 0), {}, {}),
    ((8, 9), {}, {}),
])
def test_on_hopper_cudnn_normalises_unless_told_otherwise(capability, environment, expected, hopper):
    hopper(capability=capability, **environment)
    engine.choose(CONFIG, case(CONFIG)[0], "cuda")
    assert os.environ == expected


@pytest.mark.unit
def test_an_emulation_asks_for_no_layer_norm(hopper):
    hopper(fp8=(False, "no FP8"))
    engine.choose(CONFIG, case(CONFIG)[0], "cuda")
    assert os.environ == {}


@pytest.mark.unit
@pytest.mark.parametrize("changes, value", [({"seq_len": 9}, r"batch_size \* seq_len .* not 18"),
                                            ({"hidden_size": 24}, "hidden_size .* not 24"),
                                            ({"ffn_hidden_size": 100}, "ffn_hidden_size .* not 100")])
def test_shapes_that_fp8_cannot_multiply_are_refused(changes, value):
    """Also by the emulation: a shape that runs here must run on the hardware. Without FP8 any shape does."""
    config = CONFIG.replace(**{"ffn_hidden_size": None, **changes})
    with pytest.raises(ValueError, match=value):
        steps.load(4).build(config, case(config)[0], "cpu")
    steps.load(4).build(config.replace(amp_dtype=None), case(config)[0], "cpu")


# ----------------------------------------------------------------------------------------------- what both engines have


@pytest.mark.unit
def test_the_fp8_state_is_that_of_every_fp8_module():
    """Forward and backward of QKV, of attention's projection and of the MLP; none before the first call."""
    values, x, dy = case(CONFIG)
    block = steps.load(4).build(CONFIG, values, "cpu")
    assert engine.fp8_state(block) == []
    results(block, x, dy)
    state = engine.fp8_state(block)
    assert [tuple(scale.shape) for scale, _ in state] == [(3,), (2,), (3,), (2,), (6,), (4,)]
    assert all(amax_history.shape == (1024, len(scale)) for scale, amax_history in state)
    assert all((amax_history.amax(0) > 0).any() for _, amax_history in state)
    assert engine.fp8_state(steps.load(2).build(CONFIG, values, "cpu")) == []


@pytest.mark.unit
def test_modules_there_have_been_are_forgotten_where_there_is_an_engine(hopper, monkeypatch):
    """It is not imported for that."""
    calls = []
    te = hopper()
    te.quantization = SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(reset=lambda: calls.append("reset")))
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch", raising=False)
    engine.forget_modules()
    assert calls == []
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
    engine.forget_modules()
    assert calls == ["reset"]


# ------------------------------------------------------------------------------------------------------------ one cuDNN


@pytest.mark.unit
@pytest.mark.parametrize("home", [None, "", "/elsewhere"])
@pytest.mark.parametrize("loaded, installed, imported", [
    (True, True, False), (False, True, False), (True, False, False), (True, True, True)])
def test_all_of_the_cudnn_of_torch_is_loaded_and_named(loaded, installed, imported, home, tmp_path, monkeypatch):
    """Named for a while, and first the parts that others ask for; one that can't be loaded is passed over.

    Only where there is a cuDNN, and a Transformer Engine to be imported yet.
    """
    for part in ("", "_adv", "_cnn", "_graph", "_ops"):
        (tmp_path / f"libcudnn{part}.so.9.19.0").touch()
        (tmp_path / f"libcudnn{part}.so").symlink_to(f"libcudnn{part}.so.9.19.0")
    tried = []

    def load(path, mode):
        assert mode == ctypes.RTLD_GLOBAL
        tried.append(Path(path).name)
        if "graph" in path:
            raise OSError("it can't be loaded")
    libraries = [tmp_path / "libcudnn_heuristic.so.9.19.0", tmp_path / "libcudnn.so.9.19.0"] if loaded else []
    monkeypatch.setattr(machine, "cudnn_libraries", lambda: libraries)
    monkeypatch.setattr(engine.ctypes, "CDLL", load)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(sys, "modules", {"transformer_engine": None} if imported else {})
    before = {} if home is None else {"CUDNN_HOME": home}
    monkeypatch.setattr(os, "environ", dict(before))
    with pytest.raises(ImportError), engine.one_cudnn():
        within = dict(os.environ)
        raise ImportError
    assert os.environ == before
    if loaded and installed and not imported:
        assert within == {"CUDNN_HOME": str(tmp_path)}
        assert tried == [f"libcudnn_{part}.so.9.19.0" for part in ("graph", "ops", "adv", "cnn")]
    else:
        assert within == before and tried == []


TE_CONFIG = BlockConfig(batch_size=2, seq_len=128, hidden_size=256, num_heads=4, amp_dtype=torch.float16)


@pytest.mark.integration
@pytest.mark.transformer_engine
def test_torch_and_transformer_engine_share_one_cudnn():
    values, x, dy = case(TE_CONFIG, "cuda")
    steps.load(4).build(TE_CONFIG, values, "cuda")(x).backward(dy)
    F.scaled_dot_product_attention(*[torch.ones(1, 1, 8, 64, device="cuda", dtype=torch.float16)] * 3)
    loaded = machine.cudnn_libraries()
    assert len({path.resolve().parent for path in loaded}) == 1, loaded
    assert torch.backends.cudnn.version()                        # raises where it is not the one of this torch


@pytest.mark.integration
@pytest.mark.transformer_engine
def test_on_a_gpu_step_4_runs_on_transformer_engine():
    block = steps.load(4).build(TE_CONFIG, case(TE_CONFIG, "cuda")[0], "cuda")
    assert str(block.engine) == f"Transformer Engine {engine.version()}"
    assert type(block.mlp).__module__.startswith("transformer_engine.")


# ------------------------------------------------------------------------------------------------- what records name


TE_2_9 = engine.Engine(engine.TRANSFORMER_ENGINE, "2.9.0")


@pytest.mark.unit
@pytest.mark.parametrize("text, which", [
    ("PyTorch", engine.PYTORCH), ("Transformer Engine 2.9.0", TE_2_9),
    ("torchao 0.18.0", engine.Engine("torchao", "0.18.0")),
    ("emulated (there is no GPU (yet))", engine.emulation_because("there is no GPU (yet)"))])
def test_a_record_names_an_engine(text, which):
    assert engine.Engine.of_record(text) == which and str(which) == text
    assert which.is_emulated == text.startswith("emulated")


@pytest.mark.unit
def test_an_engine_brings_its_libraries(monkeypatch):
    assert engine.libraries_of(engine.Engine("torchao", "0.18.0")) == {"torchao": "0.18.0"}
    assert engine.libraries_of(engine.PYTORCH) == engine.libraries_of(engine.emulation_because("there is no GPU")) == {}
    seen = SimpleNamespace(get_cudnn_version=lambda: 91900)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", seen)
    assert engine.libraries_of(TE_2_9) == {"transformer_engine_cudnn": "91900"}


@pytest.mark.unit
@pytest.mark.parametrize("seen", [SimpleNamespace(), None])
def test_a_transformer_engine_that_does_not_say_its_cudnn_is_no_error(monkeypatch, seen):
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", seen)          # None: its import fails
    assert engine.libraries_of(TE_2_9) == {}


@pytest.mark.unit
@pytest.mark.transformer_engine
def test_transformer_engine_sees_the_cudnn_of_torch():
    engine.transformer_engine()
    own = engine.Engine(engine.TRANSFORMER_ENGINE, engine.version())
    assert engine.libraries_of(own) == {"transformer_engine_cudnn": str(torch.backends.cudnn.version())}


# ---------------------------------------------------------------------------------------------------- parts of a block


@contextlib.contextmanager
def group_of_one(backend):
    """A process group of this process alone."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.unit
def test_parts_are_asked_for_by_each_modules_own_words():
    def told(*sizes, **words):
        return sizes, words
    modules = SimpleNamespace(autocast=1, LayerNormLinear=told, Linear=told, LayerNormMLP=told,
                              DotProductAttention=told)
    split = engine.Split(modules, "group")
    group = {"tp_group": "group"}
    assert split.autocast == 1
    assert split.LayerNormLinear(8, 24) == ((8, 24), group | {"parallel_mode": "column"})
    assert split.Linear(8, 8) == ((8, 8), group | {"parallel_mode": "row"})
    assert split.LayerNormMLP(8, 32) == ((8, 32), group | {"set_parallel_mode": True})
    assert split.DotProductAttention(4, 2) == ((4, 2), group)


@pytest.mark.unit
def test_only_blocks_that_are_built_meanwhile_are_parts():
    values = parameters.seeded(CONFIG)
    with group_of_one("gloo") as group, engine.split_over(group):
        modules, which = engine.choose(CONFIG, values, "cpu")
    assert isinstance(modules, engine.Split) and which.is_emulated
    assert engine.choose(CONFIG, values, "cpu")[0] is emulation


@pytest.mark.integration
@pytest.mark.transformer_engine
def test_transformer_engines_part_of_one_is_the_whole():
    """Its modules take these words, and multiply as they do without."""
    values, x, dy = case(CONFIG, "cuda", torch.float32)
    whole = steps.load(4).build(CONFIG, values, "cuda")
    with group_of_one("nccl") as group:
        with engine.split_over(group):
            part = steps.load(4).build(CONFIG, values, "cuda")
        assert not part.engine.is_emulated
        for block in (whole, part):
            block.recipe.reduce_amax = False
        of_whole, of_part = results(whole, x, dy), results(part, x, dy)
    for what in ("branch", "input gradient"):
        assert oracle.relative_error(of_part[what], of_whole[what]) < 1e-2, what
