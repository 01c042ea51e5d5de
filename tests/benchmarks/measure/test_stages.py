"""What each stage of the compiler made of a function, and what a program prints in a process of its own."""
import pytest
import torch

from benchmarks.measure.logged import logged, shortened
from benchmarks.measure.stages import stages


@pytest.mark.integration
def test_each_stage_is_shown(fresh_dynamo, monkeypatch):
    monkeypatch.setattr("benchmarks.measure.stages.run_and_get_code", lambda call, *inputs: (None, [CODE]))
    monkeypatch.setattr(torch, "compile", as_captured(torch.compile))
    x = torch.randn(4, 8, requires_grad=True)
    made = stages(lambda x: torch.sin(x) * 2, x)
    assert "torch.sin" in made.dynamo and "aten.sin" in made.forward and "aten.cos" in made.backward
    assert made.kernels == ["int kernel;", "def triton_():"]
    assert set(made.seconds) == {"Dynamo", "AOTAutograd", "Inductor", "the kernels' compiler", "the rest"}
    assert made.later_s > 0


CODE = """
a = async_compile.cpp_pybinding(['float*'], r'''
int kernel;
''')
b = async_compile.triton('triton_', '''
def triton_():
''', device_str='cuda')
"""


def as_captured(compile_it):
    """torch.compile, but what Inductor would compile runs as it was captured."""
    return lambda function, backend="eager": compile_it(function, backend=backend)


@pytest.mark.integration
def test_a_program_in_a_process_of_its_own():
    program = "import os\nprint('seen', os.environ['A'])\nopen(os.environ['B'] + '/x.txt', 'w')\n1 / 0\n"
    text = logged(program, A="1", B="FOLDER", like="seen|File|Error")
    assert text.splitlines() == ["seen 1", '  File "program.py", line 4, in <module>',
                                 "ZeroDivisionError: division by zero", "wrote x.txt"]
    assert logged("print(1)\nprint(2)\nprint(3)", most=1).splitlines() == ["1", "... and 2 lines more"]


@pytest.mark.unit
def test_time_stamps_and_folders_are_left_out():
    line = 'V1125 12:28:00.664000 15797 torch/_dynamo/guards.py:5014] [0/0_1] [__guards] in "/tmp/x/program.py", line 4'
    assert shortened(line, "/tmp/x") == 'guards.py: [__guards] in "program.py", line 4'
