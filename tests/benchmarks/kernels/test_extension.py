"""The CUDA C++ kernels are compiled, built once for what they depend on, or there is a reason why not."""
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import cpp_extension

from benchmarks.kernels import cuda
from benchmarks.kernels.cuda import extension


@pytest.fixture(scope="module")
def nvcc():
    if reason := extension.compiler_missing():
        pytest.skip(reason)
    return extension.cuda_home() / "bin" / "nvcc"


@pytest.fixture(scope="module")
def compiled(nvcc, tmp_path_factory):
    """source -> its finished compilation, one on each core; unoptimized, as that finds nothing more."""
    folder = tmp_path_factory.mktemp("objects")
    macros = [flag for flag in cpp_extension.COMMON_NVCC_FLAGS if flag.startswith("-D")]

    def compile_one(source):
        return subprocess.run([nvcc, "-c", "-std=c++17", "-Xcicc", "-O0", "-Xptxas", "-O0", *macros, "-arch=sm_90",
                               source, "-o", folder / source.stem], capture_output=True, text=True, check=False)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(extension.SOURCES, pool.map(compile_one, extension.SOURCES), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize("source", extension.SOURCES, ids=lambda path: path.name)
def test_each_source_compiles(source, compiled):
    """For compute capability 9.0, without a warning, under the macros that torch's builder defines."""
    done = compiled[source]
    assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.unit
def test_there_is_a_source_for_each_kernel():
    operations = {name for name in cuda.__all__ if name != "extension"}
    assert {source.stem for source in extension.SOURCES} == operations


@pytest.mark.gpu
@pytest.mark.integration
def test_the_module_is_built_once():
    assert extension.missing() == ""
    assert extension.load() is extension.load()


@pytest.mark.unit
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_one_line():
    extension.missing.cache_clear()
    reason = extension.missing()
    assert reason and "\n" not in reason
    with pytest.raises(RuntimeError, match=f"CUDA kernels can't run here: {reason}"):
        extension.load()


@pytest.fixture
def a_gpu(monkeypatch):
    """a_gpu(9, 0): torch says that there is one of this compute capability."""
    def say(*capability):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    return say


@pytest.mark.unit
def test_what_a_machine_lacks_is_named(a_gpu, monkeypatch):
    missing = extension.missing.__wrapped__
    a_gpu(7, 5)
    assert missing() == "the GPU is older than compute capability 8.0"
    a_gpu(8, 0)
    monkeypatch.setattr(extension, "compiler_missing", lambda: "there is no ninja")
    assert missing() == "there is no ninja"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert missing() == "there is no GPU"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert missing() == "this torch is not built for CUDA"


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """toolkit(version): a CUDA toolkit whose nvcc says it is `version`, found through CUDA_HOME."""
    def make(version):
        (tmp_path / "bin").mkdir()
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        extension.cuda_home.cache_clear()
        return tmp_path
    find = extension.cuda_home
    yield make
    find.cache_clear()


@pytest.mark.unit
def test_what_the_toolkit_lacks_is_named(toolkit, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    home = toolkit("12.4")
    assert extension.cuda_home() == home
    assert extension.compiler_missing() == "nvcc is of CUDA 12.4, and torch of CUDA 13.2"
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: sys.executable)
    assert extension.compiler_missing() == "there is no ninja: pip install ninja"
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    assert extension.compiler_missing() == ""
    monkeypatch.setattr(cpp_extension, "get_cxx_compiler", lambda: "no-such-compiler")
    assert extension.compiler_missing() == "there is no C++ compiler (no-such-compiler)"
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho nothing\n")
    assert extension.compiler_missing() == f"{home}/bin/nvcc does not say its version"
    monkeypatch.setattr(extension, "cuda_home", lambda: None)
    assert extension.compiler_missing().startswith("there is no nvcc")


@pytest.mark.unit
@pytest.mark.skipif(os.name != "posix", reason="the wrapper is a shell script")
def test_an_nvcc_that_is_a_wrapper_leads_to_its_toolkit(tmp_path, monkeypatch):
    home, wrapper = tmp_path / "cuda", tmp_path / "path" / "nvcc"
    for script, body in ((home / "bin" / "nvcc", f'echo "#$ TOP={home}/bin/.." >&2'),
                         (wrapper, f'exec {home}/bin/nvcc "$@"')):
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
    assert extension.cuda_home.__wrapped__() == home


@pytest.mark.unit
def test_a_failed_build_says_its_first_error():
    log = "[1/2] nvcc a.cu\na.cu(3): warning: x\na.cu(7): error: y is undefined\na.cu(8): error: z\nninja: stopped"
    assert extension.first_error(log) == "a.cu(7): error: y is undefined"
    assert extension.first_error("In file x\nb.cpp:1:2: fatal error: no.h\n") == "b.cpp:1:2: fatal error: no.h"
    assert extension.first_error("Ninja is required\n") == "Ninja is required"
    assert extension.first_error("") == "no message"


@pytest.fixture
def builder(a_gpu, toolkit, tmp_path, monkeypatch):
    """builder(load): what the module is after a build by `load` in place of torch's, for an H200."""
    def build(load):
        a_gpu(9, 0)
        toolkit("13.0")
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "builds"))
        monkeypatch.setattr(extension, "missing", lambda: "")
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", "torch's guess")
        monkeypatch.setattr(cpp_extension, "load", load)
        return extension._built.__wrapped__()
    return build


@pytest.mark.unit
def test_a_build_is_for_this_gpu_by_this_toolkit(builder, tmp_path):
    asked = {}

    def load(name, sources, **options):
        asked.update(options, sources=sources, toolkit=cpp_extension.CUDA_HOME)
        return "the module"

    assert builder(load) == "the module"
    assert asked["toolkit"] == str(tmp_path) and cpp_extension.CUDA_HOME == "torch's guess"
    assert asked["extra_cuda_cflags"] == [*extension.NVCC_FLAGS, "-gencode=arch=compute_90,code=sm_90"]
    assert [*map(os.path.basename, asked["sources"])] == ["binding.cpp", *(path.name for path in extension.SOURCES)]
    assert asked["build_directory"] == str(tmp_path / "builds" / extension._key((9, 0)))
    assert os.path.isdir(asked["build_directory"])


@pytest.mark.unit
def test_a_build_that_failed_is_a_reason(builder, monkeypatch):
    def load(*arguments, **options):
        raise RuntimeError("a.cu(3): warning: x\na.cu(7): error: y is undefined")

    reason = builder(load)
    assert reason == "the CUDA kernels do not build: a.cu(7): error: y is undefined"
    assert cpp_extension.CUDA_HOME == "torch's guess"
    monkeypatch.setattr(extension, "_built", lambda: reason)
    with pytest.raises(RuntimeError, match="y is undefined"):
        extension.load()


@pytest.mark.unit
def test_a_build_is_of_one_torch_one_gpu_and_these_sources(toolkit, tmp_path, monkeypatch):
    home = toolkit("13.0")
    for path in extension.FOLDER.glob("*.c*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(extension, "FOLDER", tmp_path)
    names = [extension._key((9, 0)), extension._key((8, 0))]
    (tmp_path / "rows.cuh").write_text("edited")
    names.append(extension._key((9, 0)))
    monkeypatch.setattr(extension, "NVCC_FLAGS", ["-O1"])
    names.append(extension._key((9, 0)))
    monkeypatch.setattr(torch, "__version__", "0.0")
    names.append(extension._key((9, 0)))
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.1.1'\n")
    names.append(extension._key((9, 0)))
    assert len(set(names)) == len(names)
    assert extension._key((9, 0)) == names[-1]


@pytest.mark.unit
def test_builds_are_kept_where_the_user_wants_them(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert str(extension.cache_folder()) == "/somewhere"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(extension.cache_folder()) == "/caches/transformer-block"


@pytest.mark.unit
def test_two_builds_of_one_folder_wait_for_each_other_and_not_the_dead(tmp_path):
    (tmp_path / "lock").touch()                              # what a build that was killed leaves behind
    order = []

    def second():
        with extension.alone(tmp_path):
            order.append("second")

    with extension.alone(tmp_path):
        assert not (tmp_path / "lock").exists()
        other = threading.Thread(target=second)
        other.start()
        other.join(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
