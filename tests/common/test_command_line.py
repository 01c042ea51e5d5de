"""What every command line shares: mistakes in one line, shapes, early ends, quiet libraries."""
import argparse
import contextlib
import errno
import logging
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from common import PRESETS, command_line
from common.outcome import UserError
from common.report.record_file import RecordFile, WriteError

pytestmark = pytest.mark.unit
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without a GPU says")


def status_of(call, *arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        call(*arguments)
    return ended.value.code


@contextlib.contextmanager
def closed_stdout():
    """Meanwhile what is printed finds that nobody reads it any more."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, contextlib.redirect_stdout(closed):
        yield


# ----------------------------------------------------------------------------------------------------------- mistakes


def test_a_mistake_on_a_command_line_is_one_line_and_status_2(capsys):
    parser = command_line.Parser("ladder", prog="python -m benchmarks ladder")
    parser.add_argument("--rounds", type=int)
    assert status_of(parser.parse_args, ["--rounds", "many"]) == 2
    assert capsys.readouterr() == ("", "ladder: error: argument --rounds: invalid int value: 'many'\n")


def test_a_value_error_is_a_mistake_and_any_other_error_is_not(capsys):
    def raising(error):
        with command_line.mistakes("ladder"):
            raise error
    assert status_of(raising, ValueError("--rounds 5: give at least 6")) == 2
    assert capsys.readouterr().err == "ladder: error: --rounds 5: give at least 6\n"
    with pytest.raises(TypeError):
        raising(TypeError())


@pytest.mark.parametrize("seed", [10**18, -10**18])
def test_a_seed_that_generators_do_not_take_is_refused(seed):
    with pytest.raises(ValueError, match=f"--seed {seed}: give a number of at most 18 digits"):
        command_line.check_seed(seed)
    command_line.check_seed(seed // 10)


@no_gpu
def test_a_device_is_the_one_that_is_there():
    assert command_line.device_of("auto") == command_line.device_of("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda: no GPU is available to torch; run without it for the CPU"):
        command_line.device_of("cuda")


def test_records_that_cannot_be_written_are_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="out: No such file or directory; give a file that can be written"):
        command_line.open_records(str(tmp_path / "missing" / "out"))
    assert command_line.open_records(None).path is None


# ------------------------------------------------------------------------------------------------------------- shapes


def config_of(*argv: str, device: str = "cpu"):
    parser = argparse.ArgumentParser()
    command_line.shape_arguments(parser)
    options = parser.parse_args(argv)
    options.device = torch.device(device)
    return command_line.config_of(options)


def test_a_shape_is_the_presets_with_what_is_given_in_its_place():
    assert config_of() == PRESETS["cpu"] and config_of(device="cuda") == PRESETS["te-tutorial"]
    changed = config_of("--preset", "llama-8b", "--batch-size", "3", "--seq-len", "5", "--num-heads", "8")
    assert changed == PRESETS["llama-8b"].replace(batch_size=3, seq_len=5, num_heads=8)


def test_another_width_has_an_ffn_of_four_times_itself():
    assert config_of("--preset", "llama-8b", "--hidden-size", "64").ffn_hidden_size == 256
    assert config_of("--preset", "llama-8b", "--hidden-size", "64", "--ffn-hidden-size", "96").ffn_hidden_size == 96


# --------------------------------------------------------------------------------------------------------- early ends


@pytest.mark.parametrize("error, status, said", [
    (KeyboardInterrupt(), 130, "\nladder: interrupted; 2 finished records kept"),
    (WriteError("No space left on device"), 1, "ladder: error: --json PATH: No space left on device; 2 records were "
                                               "written, give a file with room for more"),
    (torch.OutOfMemoryError("no room\nand more"), 3, "ladder: out of memory: no room; give a smaller shape"),
    (MemoryError(), 3, "ladder: out of memory: no message; give a smaller shape"),
    (UserError("a.jsonl, line 2: no record"), 1, "ladder: error: a.jsonl, line 2: no record"),
], ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "")
def test_what_ends_a_command_early_is_one_line(error, status, said, capsys, tmp_path):
    file = RecordFile(str(tmp_path / "out"))
    file.count = 2

    def command():
        with command_line.early_ends("ladder", file):
            raise error
    with closed_stdout():
        assert status_of(command) == status
    assert capsys.readouterr() == ("", said.replace("PATH", file.path) + "\n")


def test_where_no_records_are_kept_none_are_spoken_of(capsys):
    def command():
        with command_line.early_ends("ladder", RecordFile(None)):
            raise KeyboardInterrupt
    assert status_of(command) == 130
    assert capsys.readouterr().err == "\nladder: interrupted\n"


def test_a_full_disk_under_what_is_printed_is_one_line(capsys):
    def command():
        with command_line.early_ends("ladder"):
            raise OSError(errno.ENOSPC, "No space left on device", "/caches")
    with closed_stdout():
        assert status_of(command) == 1
        print("goes nowhere", flush=True)
    assert capsys.readouterr().err == "ladder: error: [Errno 28] No space left on device: '/caches'\n"


def test_an_error_of_ours_is_no_early_end():
    with pytest.raises(ValueError, match="ours"), command_line.early_ends("ladder"):
        raise ValueError("ours")


def test_who_has_seen_enough_ends_nothing():
    """As `| head`: neither the study nor its charts."""
    with closed_stdout():
        command_line.tell("a table")
        command_line.tell("and another")


def test_what_is_told_is_printed_at_once(capsys, monkeypatch):
    flushed = []
    monkeypatch.setattr(command_line, "print", lambda text, flush: flushed.append((text, flush)), raising=False)
    command_line.tell("a table")
    assert flushed == [("a table", True)]


# ------------------------------------------------------------------------------------------------------ quiet libraries


def test_what_no_reader_can_act_on_is_not_said(monkeypatch):
    names = ("torch.utils.cpp_extension", "DotProductAttention", "torch.utils._pytree")
    for name in names:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        command_line.hush()
        warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context", stacklevel=1)
        warnings.warn("Error detected in MulBackward0. Traceback of forward call that caused it", stacklevel=1)
        warnings.warn("Warning: Profiler clears events at the end of each cycle.Only events from", stacklevel=1)
        warnings.warn("Error detected in a cable", stacklevel=1)
    assert [str(warning.message) for warning in said] == ["Error detected in a cable"]
    assert not any(logging.getLogger(name).isEnabledFor(logging.WARNING) for name in names)


def test_a_closed_stderr_goes_nowhere(monkeypatch, capsys):
    """`print` would take stdout in its place."""
    monkeypatch.setattr(sys, "stderr", None)
    command_line.hush()
    print("progress", file=sys.stderr)
    sys.stderr.close()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(open="as it was"))
    command_line.hush()
    assert sys.stderr.open == "as it was"
