"""The file of records: appended to by whole lines, mended where a full disk left half of one, no other file touched."""
import errno
import fcntl
import json
import os
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from common.report import record_file
from common.report.record_file import RecordFile, WriteError

pytestmark = pytest.mark.unit


def test_records_are_appended_to_what_is_there(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"benchmark": 0}\n')
    file = RecordFile(str(path))
    file.write([{"benchmark": 1}, {"benchmark": 2}])
    file.write([{"benchmark": 3}])
    assert file.count == 3
    assert [json.loads(line)["benchmark"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


def test_no_file_asked_for_is_no_file_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = RecordFile(None)
    file.write([{"n": 1}])
    assert file.count == 0 and not list(tmp_path.iterdir())


def test_writers_side_by_side_leave_whole_lines(tmp_path):
    """Four files opened on one path, 100 records each of about 20 kB: many pages, and still never a torn line."""
    path = tmp_path / "runs.jsonl"

    def write(name):
        lines = [{"benchmark": 0, "name": name, "n": n, "samples": [0.123456789] * 1500} for n in range(100)]
        RecordFile(str(path)).write(lines)
    writers = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(line["name"] for line in lines) == dict.fromkeys("abcd", 100)
    for name in "abcd":
        assert [line["n"] for line in lines if line["name"] == name] == list(range(100))


@pytest.mark.parametrize("path", ["", "missing/out", "file/out"], ids=["a folder", "in no folder", "below a file"])
def test_a_path_that_cannot_be_written_raises_at_once(path, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        RecordFile(str(tmp_path / path))


def test_a_value_that_is_no_json_is_not_written(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(ValueError):
        RecordFile(str(path)).write([{"value": float("nan")}])
    assert path.read_text() == ""


# ------------------------------------------------------------------------------------------------------ what is mended


def test_half_a_record_is_cut_off_before_the_next_one(tmp_path):
    """A full disk left it: the next record would be glued to it, and the file unreadable from then on."""
    path = tmp_path / "records"
    path.write_text('{"benchmark": 1}\n{"benchmark": {"na')
    RecordFile(str(path)).write([{"benchmark": 2}])
    assert path.read_text() == '{"benchmark": 1}\n{"benchmark": 2}\n'


@pytest.mark.parametrize("half", ["{", '{"bench', '{"benchmark": {"samples": [' + 2**20 * "1.5, "],
                         ids=["one character", "less than it begins with", "a megabyte"])
def test_half_a_record_of_any_length_is_cut_off(tmp_path, half):
    path = tmp_path / "records"
    path.write_text('{"benchmark": 1}\n' + half)
    RecordFile(str(path))
    assert path.read_text() == '{"benchmark": 1}\n'


def test_a_whole_last_record_without_an_end_stays(tmp_path):
    path = tmp_path / "records"
    path.write_text('{"benchmark": 1}\n{"benchmark": 2}')
    RecordFile(str(path)).write([{"benchmark": 3}])
    assert path.read_text() == '{"benchmark": 1}\n{"benchmark": 2}\n{"benchmark": 3}\n'


OTHER = ["a note without an end", "one\ntwo", '{"mine": 1}']


@pytest.mark.parametrize("text", OTHER)
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "records"
    path.write_text(text)
    with pytest.raises(OSError, match="no file of records"):
        RecordFile(str(path))
    assert path.read_text() == text


@pytest.mark.parametrize("text", OTHER)
def test_text_behind_records_is_never_cut(tmp_path, text):
    """It gets its end, or the next record would be glued to it."""
    path = tmp_path / "records"
    path.write_text('{"benchmark": 1}\n' + text)
    RecordFile(str(path))
    assert path.read_text() == '{"benchmark": 1}\n' + text + "\n"


# ---------------------------------------------------------------------------------------------------- one at the file


def test_nobody_else_is_at_the_file_while_it_is_written_or_mended(tmp_path, monkeypatch):
    """Half a line that another run is still writing is no half line that a full disk left."""
    path, seen = tmp_path / "records", []
    path.write_text('{"benchmark": 1}')
    write = os.write

    def spy(*arguments):
        with open(path) as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                seen.append("locked")
        return write(*arguments)
    monkeypatch.setattr(record_file.os, "write", spy)
    RecordFile(str(path)).write([{"benchmark": 2}])
    assert seen == ["locked", "locked"] and path.read_text() == '{"benchmark": 1}\n{"benchmark": 2}\n'


def test_half_a_record_is_cut_off_by_who_is_alone_at_the_file(tmp_path, monkeypatch):
    path = tmp_path / "records"
    path.write_text('{"benchmark": ')
    truncate, seen = os.ftruncate, []

    def spy(*arguments):
        with open(path) as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                seen.append("locked")
        return truncate(*arguments)
    monkeypatch.setattr(record_file.os, "ftruncate", spy)
    RecordFile(str(path))
    assert seen == ["locked"] and path.read_text() == ""


def test_a_file_is_locked_for_a_moment_alone(tmp_path):
    """Two runs that have it open both write; neither waits for the other to end."""
    path = tmp_path / "records"
    first, second = RecordFile(str(path)), RecordFile(str(path))
    first.write([{"benchmark": 1}])
    second.write([{"benchmark": 2}])
    first.write([{"benchmark": 3}])
    assert path.read_text() == '{"benchmark": 1}\n{"benchmark": 2}\n{"benchmark": 3}\n'


def test_a_file_that_somebody_keeps_locked_is_written_to_all_the_same(tmp_path, monkeypatch):
    """As by `flock FILE command`; what is half a record then may be one that is being written, and stays."""
    slept = []
    monkeypatch.setattr(record_file.time, "sleep", slept.append)
    path = tmp_path / "records"
    path.write_text('{"benchmark": ')
    with open(path) as kept:
        fcntl.flock(kept, fcntl.LOCK_EX)
        RecordFile(str(path)).write([{"benchmark": 2}, {"benchmark": 3}])
    assert path.read_text() == '{"benchmark": {"benchmark": 2}\n{"benchmark": 3}\n'
    assert slept.count(1) == 1                               # it is waited for once, not at every record


# ---------------------------------------------------------------------------------------------------------- full disks


def test_a_full_disk_raises_at_the_first_record(tmp_path, full_disk):
    file = RecordFile(str(tmp_path / "records"))
    with pytest.raises(WriteError, match="No space left"):
        file.write([{"n": 1}])
    assert file.count == 0


def test_a_disk_that_is_nearly_full_is_refused_at_once(tmp_path, monkeypatch):
    """Rather than after an hour of timing."""
    monkeypatch.setattr(record_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20 - 1))
    with pytest.raises(OSError) as error:
        RecordFile(str(tmp_path / "records"))
    assert error.value.errno == errno.ENOSPC


def test_a_record_that_was_written_in_part_raises(tmp_path, monkeypatch):
    """The last bytes of a disk take a part of a line, and say so by its length alone."""
    write = os.write
    monkeypatch.setattr(record_file.os, "write", lambda file, data: write(file, data[:5]))
    file = RecordFile(str(tmp_path / "records"))
    with pytest.raises(WriteError, match="no space left for a whole record"):
        file.write([{"benchmark": 1}])
    assert file.count == 0
