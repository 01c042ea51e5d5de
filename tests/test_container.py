"""The container's build, and what the requirements ask for: the image's own torch stays."""
import os
import re
import shutil
import subprocess

import pytest
from packaging.requirements import Requirement

from common.block.steps import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture
def dockerfile():
    """Its instructions: comments left out, continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    return [line for line in re.sub(r" *\\\n *", " ", "\n".join(lines)).splitlines() if line]


def test_the_container_starts_from_the_known_image_and_keeps_it(dockerfile):
    """Its constraints of pip stay on, and no user is set: --user is the caller's."""
    assert dockerfile[0] == "FROM nvcr.io/nvidia/pytorch:25.11-py3" and dockerfile[-1].startswith("CMD")
    assert not re.search(r"PIP_CONSTRAINT|--no-deps|--force-reinstall|--upgrade|(^|\n)USER", "\n".join(dockerfile))


IMAGE = ["torch==2.10.0a0+nv25.11", "pytorch-triton==3.5.0", "transformer_engine==2.9.0+70f53666", "numpy==2.1.0"]


@pytest.mark.parametrize("before, after, builds", [
    pytest.param(IMAGE, IMAGE, True, id="nothing changed"),
    pytest.param(IMAGE, [*IMAGE, "tabulate==0.9.0"], True, id="a new package"),
    pytest.param(IMAGE, ["torch==2.15.0", *IMAGE[1:]], False, id="another torch"),
    pytest.param(IMAGE, [*IMAGE[:2], "transformer_engine==2.20.2"], False, id="another engine"),
    pytest.param(IMAGE, [*IMAGE, "triton==3.9.0"], False, id="a second triton"),
    pytest.param(IMAGE[:2], IMAGE[:2], False, id="no engine"),
    pytest.param(IMAGE[1:], IMAGE[1:], False, id="no torch"),
])
def test_no_container_is_built_where_pip_changed_its_torch(dockerfile, tmp_path, before, after, builds):
    """The build's own shell lines, run with a pip that installs what is given."""
    command = next(line for line in dockerfile if line.startswith("RUN") and "pip install" in line).removeprefix("RUN ")
    (tmp_path / "before").write_text("\n".join(before) + "\n")
    (tmp_path / "after").write_text("\n".join(after) + "\n")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\nif [ "$1" = list ]; then cat before; else cp rest.txt asked; mv after before; fi\n')
    pip.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    built = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (built.returncode == 0) == builds, built.stdout + built.stderr
    if builds:
        asked = [line for line in (tmp_path / "asked").read_text().splitlines() if line[:1].isalpha()]
        assert "numpy" in asked and not [line for line in asked if line.startswith(("torch", "triton"))]


def test_requirements_allow_the_containers_torch():
    """The image's torch is an alpha of 2.10: at least 2.9, but not at least 2.10. The engine is no requirement."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    every = [Requirement(line.split("#")[0]) for line in lines if line[:1].isalpha()]
    requirements = {requirement.name: requirement for requirement in every}
    torch_versions = requirements["torch"].specifier
    assert torch_versions.contains("2.10.0a0+nv25.11", prereleases=True) and torch_versions.contains("2.9.0")
    assert not torch_versions.contains("2.8.0") and not requirements["numpy"].specifier
    assert not requirements["triton"].marker.evaluate({"sys_platform": "darwin"})
    assert not [name for name in requirements if "transformer" in name]
