"""The command line that all studies share."""
import argparse

import pytest
import torch

from benchmarks.measure import options
from common import PRESETS

pytestmark = pytest.mark.unit
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without a GPU says")
TINY = ["--preset", "tiny", "--device", "cpu"]


def parsed(*argv, refine=lambda chosen: None):
    words = [str(word) for word in argv]
    return options.parse(options.parser("ladder", "A question?\n\nMore of it."), words, refine)


def refused(capsys, *argv) -> str:
    """The one line of a mistake, without the study's name."""
    with pytest.raises(SystemExit) as ended:
        parsed(*argv)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and err.count("\n") == 1 and err.startswith("ladder: error: ")
    return err.removeprefix("ladder: error: ").strip()


def test_what_is_not_asked_for_has_its_default():
    chosen = parsed(*TINY)
    assert chosen.config == PRESETS["tiny"].replace(amp_dtype=torch.bfloat16)
    assert (chosen.device, chosen.rounds, chosen.launches, chosen.seed) == (torch.device("cpu"), 12, ("eager",), 0)
    assert chosen.argv == TINY and chosen.file.path is None and not chosen.quick and chosen.chart is None


@pytest.mark.parametrize("argv, rounds", [([], 20), (["--quick"], 6), (["--rounds", "9"], 9),
                                          (["--quick", "--rounds", "9"], 9)])
def test_how_many_rounds_there_are_on_a_gpu(argv, rounds, monkeypatch):
    monkeypatch.setattr(options, "device_of", lambda name: torch.device("cuda"))
    chosen = parsed("--preset", "tiny", *argv)
    assert chosen.rounds == rounds and chosen.launches == ("eager", "graph")
    assert chosen.config.amp_dtype == torch.float16


def test_without_16_bit_matmuls_there_is_no_autocast(a_cpu_without_bfloat16):
    """And no width is then too narrow for the gate."""
    assert parsed(*TINY, "--hidden-size", "16").config.amp_dtype is None


@pytest.mark.parametrize("argv, words", [
    (["--rounds", "5"], "--rounds 5: give at least 6, fewer bound no median"),
    (["--rounds", "0"], "--rounds 0: give at least 6"), (["--rounds", "many"], "invalid int"),
    (["--what"], "unrecognized arguments: --what"), (["--preset", "huge"], "invalid choice"),
    (["--hidden-size", "65"], "hidden_size 65 is not divisible by num_heads 4"),
    (["--hidden-size", "16"], "try 32 or more"),
    (["--seed", str(10**30)], "give a number of at most 18 digits"),
    (["--json", "/nowhere/at/all"], "--json /nowhere/at/all: No such file or directory"),
    (["--chart", "a.png"], "give what the charts' names begin with, no .png or .svg"),
    (["--chart", "a.svg"], "no .png or .svg"),
    (["--chart", "/nowhere/at/all"], "No such file or directory; give a folder that can be written"),
    (["--chart", f"{__file__}/x"], "give a folder that can be written"),
])
def test_a_mistake_is_one_line_and_status_2(capsys, argv, words):
    assert words in refused(capsys, *TINY, *argv)


@no_gpu
def test_no_gpu_is_a_mistake_where_one_is_asked_for(capsys):
    assert "no GPU is available" in refused(capsys, "--device", "cuda")


def test_where_a_chart_may_go_nothing_is_left(tmp_path):
    assert parsed(*TINY, "--chart", tmp_path / "stem").chart == str(tmp_path / "stem")
    assert list(tmp_path.iterdir()) == []
    assert parsed(*TINY, "--chart", "").chart == ""


def test_what_a_study_refuses_opens_no_file(capsys, tmp_path):
    def refine(chosen):
        chosen.rounds = 7
        if chosen.seed:
            raise ValueError("--seed is fixed here")
    assert parsed(*TINY, refine=refine).rounds == 7
    with pytest.raises(SystemExit):
        parsed(*TINY, "--seed", 1, "--json", tmp_path / "out", refine=refine)
    assert capsys.readouterr().err == "ladder: error: --seed is fixed here\n" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text, value", [("1", 1), ("999", 999)])
def test_a_count_is_a_whole_number_that_a_run_can_do(text, value):
    assert options.count(text) == value


@pytest.mark.parametrize("text", ["0", "1000", "-1", "two", "1.5", ""])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give a whole number from 1 to 999"):
        options.count(text)


@pytest.mark.parametrize("text, value", [("8", (8,)), ("1,2,4", (1, 2, 4)), (" 4, 2", (4, 2))])
def test_numbers_are_a_list_of_sizes(text, value):
    assert options.numbers(text) == value


@pytest.mark.parametrize("text", ["", "0", "1,-2", "1,,2", "two"])
def test_what_are_no_numbers_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="give whole numbers such as 1,2,4"):
        options.numbers(text)


def test_lengths_go_up_to_what_a_block_takes():
    assert options.lengths("1,16777216") == (1, 2**24) and options.numbers("16777217") == (2**24 + 1,)
    with pytest.raises(argparse.ArgumentTypeError, match="give numbers up to 16777216"):
        options.lengths("1,16777217")
