"""What a compiler made of a fusion: taken from sources, saved, told; what is not there is one line."""
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.kernels import captured, operations
from benchmarks.records import RESULTS
from benchmarks.studies import fusions
from common.runtime import compiler
from common.runtime.iteration import BACKWARD, FORWARD
from tests.helpers.said import one_line

unit, integration = pytest.mark.unit, pytest.mark.integration
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

# As torch 2.11 writes one for a GPU, and torch 2.15 for a CPU.
GPU_SOURCE = '''
def call(args):
    primals_1, primals_2 = args
    args.clear()
    assert_size_stride(primals_1, (16, 64), (64, 1), 'torch.ops')
    assert_size_stride(primals_2, (64, ), (1, ), 'torch.ops')
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((16, 1), (1, 16), torch.float32)
        buf1 = reinterpret_tensor(buf0, (16, 1), (1, 1), 0); del buf0  # reuse
        buf2 = empty_strided_cuda((16, 64), (64, 1), torch.bfloat16)
        stream0 = get_raw_stream(0)
        triton_red_fused_gelu_native_layer_norm_0.run(buf1, primals_1, primals_2, buf2, 16, 64, stream=stream0)
        triton_poi_fused_add_1.run(buf2, primals_1, 1024, stream=stream0)
        extern_kernels.mm(primals_1, primals_2, out=buf2)
        del primals_2
    return (buf2, primals_1, buf1, )
'''
CPU_SOURCE = '''
def call(self, args):
    primals_1, primals_2 = args
    assert_size_stride_grouped((primals_1, primals_2), ((8, 4), (4, )), ((4, 1), (1, )), 'input')
    buf4 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
    buf5 = buf4; del buf4  # reuse
    cpp_fused_silu_0(buf5, primals_1, primals_2)
    return (buf5, )
'''


@unit
@pytest.mark.parametrize("source, itemsize, expected", [
    (GPU_SOURCE, 2, [("triton_red_fused_gelu_native_layer_norm_0", 64 + 2048 + 128 + 2048),
                     ("triton_poi_fused_add_1", 2048 + 2048), ("extern_kernels.mm", None)]),
    (CPU_SOURCE, 4, [("cpp_fused_silu_0", 128 + 128 + 16)]),
    ("x = 1", 4, []),
])
def test_kernels_and_their_bytes_are_read_from_a_source(source, itemsize, expected):
    assert captured.kernels_of(source, itemsize) == expected


@unit
def test_traffic_counts_what_operators_read_and_write():
    x = torch.randn(8, 4)
    with captured.Traffic() as traffic:
        y = x.t().relu() + 1.0                                            # a view moves nothing
    assert traffic.bytes == 4 * x.nbytes and y.shape == (4, 8)


@unit
def test_traffic_of_a_write_in_place_counts_what_it_reads_and_writes():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with captured.Traffic() as traffic:
        x.add_(y)
    assert traffic.bytes == 3 * x.nbytes                                  # x, y, and x again as the result


@unit
def test_statistics_of_compiled_kernels():
    compiled = SimpleNamespace(n_regs=40, n_spills=0, metadata=SimpleNamespace(shared=1024, num_warps=4), asm={})
    module = SimpleNamespace(_forward=SimpleNamespace(device_caches={0: ({"key": compiled}, None)}), other=3)
    ((name, kernel),) = captured.triton_kernels(module).values()
    assert (name, captured.statistics(kernel)) == (
        "forward", {"registers": 40, "spills": 0, "shared bytes": 1024, "warps": 4})
    assert captured.triton_kernels(None) == {}
    assert set(captured.statistics(object()).values()) == {None}


@unit
@pytest.mark.parametrize("experiment, folder", [("LayerNorm+GELU", "layernorm-gelu"), ("SiLU", "silu"),
                                                ("LayerNorm to FP8", "layernorm-to-fp8")])
def test_an_experiment_has_a_folder_of_its_name(experiment, folder, tmp_path):
    assert captured.folder_of(tmp_path, experiment) == tmp_path / folder


# ------------------------------------------------------------------------------------------------ saved and explained


@pytest.fixture
def sources(monkeypatch):
    """In place of what the compiler makes: a source for each pass."""
    monkeypatch.setattr(captured, "inductor_sources", lambda call, given: {FORWARD: GPU_SOURCE, BACKWARD: CPU_SOURCE})


def saved(folder, **more) -> dict:
    """The metadata of SwiGLU of 4 x 8 in FP32, of which two levels were timed."""
    inputs = operations.tensors(operations.EXPERIMENTS["SwiGLU"], (4, 8), torch.float32, torch.device("cpu"), 0)
    passes = {mode: {"ms": {"eager": 0.5}, "rate": 1.0, "kernels": 2.0} for mode in (FORWARD, BACKWARD)}
    measured = {"device": "a GPU", "versions": {"torch": "2.9"}, "bytes at the least": {FORWARD: 384, BACKWARD: 640},
                "levels": {"eager": passes, "torch.compile": passes, "Liger": {FORWARD: passes[FORWARD]}}}
    compiled = SimpleNamespace(n_regs=40, n_spills=0, metadata=SimpleNamespace(shared=1024, num_warps=4),
                               asm={"ptx": "the code"})
    captured.save(folder, "SwiGLU", operations.swiglu, inputs, measured | more, [("forward", compiled)])
    return json.loads((folder / "swiglu" / "metadata.json").read_text())


@unit
def test_everything_of_an_experiment_is_saved(sources, tmp_path):
    metadata = saved(tmp_path)
    assert {path.name for path in (tmp_path / "swiglu").iterdir()} == {
        "metadata.json", "inductor_forward.py", "inductor_backward.py", "triton_forward_0.ptx"}
    assert (tmp_path / "swiglu" / "inductor_forward.py").read_text() == GPU_SOURCE
    assert (tmp_path / "swiglu" / "triton_forward_0.ptx").read_text() == "the code"
    assert (metadata["experiment"], metadata["dtype"], metadata["shapes"]) == ("SwiGLU", "torch.float32", [[4, 8]] * 2)
    assert metadata["kernels"] == [{"name": "forward", "registers": 40, "spills": 0, "shared bytes": 1024, "warps": 4}]
    assert metadata["eager bytes"][FORWARD] == 5 * 4 * 32                 # silu reads one and writes one, times b three
    assert metadata["inductor"][BACKWARD] == [{"name": "cpp_fused_silu_0", "bytes": 128 + 128 + 16}]


@unit
def test_what_was_saved_is_reported(sources, tmp_path):
    saved(tmp_path)
    told = captured.explain(tmp_path)
    assert told.startswith("SwiGLU of 4 x 8 and 4 x 8, float32, a GPU\n")
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in told.splitlines() if "ward " in line}
    assert rows["forward", "eager"] == ["2", "20.0", "12.0", "500", "n/a"]
    assert rows["forward", "Liger"] == ["2", "n/a", "12.0", "500", "n/a"] and ("backward", "Liger") not in rows
    assert rows["forward", "torch.compile"][1] == "n/a"                   # one of its kernels is a library's
    assert "  forward, kernel 1: gelu_native_layer_norm\n" in told
    assert "  forward, kernel 3: extern_kernels.mm\n" in told
    assert told.splitlines()[-1].split() == ["forward", "40", "0", "1024", "4"]
    assert captured.explain(tmp_path / "swiglu") == told                  # of one experiment alone


@integration
def test_an_experiment_is_saved_and_explained(study_main, tmp_path, fresh_dynamo, monkeypatch):
    if reason := compiler.missing(torch.device("cpu")):
        pytest.skip(reason)
    plain = operations.swiglu                                                # timed as it is: capturing compiles, once
    monkeypatch.setattr(fusions, "levels", lambda *_: {"eager": plain, "torch.compile": plain})
    folder = tmp_path / "captured"
    status, _, err = study_main("fusions", "--experiment", "SwiGLU", "--rows", 4, "--rounds", 6, "--capture", folder)
    assert status == 0, err
    place = folder / "swiglu"
    assert {path.name for path in place.iterdir()} == {"metadata.json", "inductor_forward.py", "inductor_backward.py"}
    metadata = json.loads((place / "metadata.json").read_text())
    assert metadata["shapes"] == [[4, 256], [4, 256]] and metadata["levels"]["eager"]["forward"]["rate"] > 0
    assert metadata["levels"].keys() == {"eager", "torch.compile", "copy"}
    status, out, _ = study_main("fusions", "--explain", folder)
    rows = {tuple(line.split()[:2]): line.split()[2:5] for line in out.splitlines() if "ward " in line}
    assert status == 0 and rows["forward", "eager"] == ["2", "20.0", "12.0"]         # silu, then times b
    assert study_main("fusions", "--explain", place) == (0, out, "")
    assert rows["forward", "torch.compile"][1:] == ["12.0", "12.0"] and "forward, kernel 1: mul_silu" in out
    assert rows["backward", "torch.compile"][1:] == ["20.0", "20.0"]


@unit
def test_a_kernel_that_was_compiled_twice_is_told_once(tmp_path):
    recorded = RESULTS / "h200" / "captured" / "layernorm-gelu" / "metadata.json"
    kernel = {"name": "add_up", "registers": 32, "spills": 0, "shared bytes": 512, "warps": 4}
    metadata = json.loads(recorded.read_text()) | {"kernels": [kernel, kernel, kernel | {"registers": 40}]}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    told = [line.split() for line in captured.explain(tmp_path).splitlines() if line.startswith("add_up ")]
    assert told == [["add_up", "32", "0", "512", "4"], ["add_up", "40", "0", "512", "4"]]


@unit
@pytest.mark.parametrize("text, said", [
    (None, "holds no metadata.json: give a folder that --capture wrote"),
    ("{", "is not what --capture writes"),
    ("[]", "is not what --capture writes"),
    ("{}", "is not what --capture writes: KeyError: 'shapes'"),
])
def test_what_can_not_be_explained_is_one_line(study_main, tmp_path, text, said):
    if text is not None:
        (tmp_path / "swiglu").mkdir()
        (tmp_path / "swiglu" / "metadata.json").write_text(text)
    status, out, err = study_main("fusions", "--explain", tmp_path)
    assert status == 2 and not out and said in one_line(err)


@unit
def test_a_folder_that_can_not_be_made_is_one_line(study_main, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = study_main("fusions", "--capture", tmp_path / "file" / "folder")
    assert status == 2 and "give a folder that can be written" in one_line(err)


@unit
def test_to_capture_and_to_explain_are_two_things(study_main, tmp_path):
    status, _, err = study_main("fusions", "--capture", tmp_path, "--explain", tmp_path)
    assert status == 2 and one_line(err) == "fusions: error: --capture and --explain: give one of them"
