"""Files of records: large ones are compressed, and read as the others are."""
import json

import pytest

from benchmarks.records import RESULTS
from benchmarks.records import files as kept
from benchmarks.records.files import compress_large, file_of, files, stem_of, text_of
from benchmarks.records.read import BadRecords, read
from tests.helpers.made_records import made

pytestmark = pytest.mark.unit
LINES_AS_TEXT = [json.dumps(line) for line in made("2_sdpa", {})]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small file, and one that is just large enough."""
    (tmp_path / "h200").mkdir()
    text = "".join(f"{line}\n" for line in LINES_AS_TEXT)
    (tmp_path / "h200" / "large-a.jsonl").write_text(text)
    (tmp_path / "small-a.jsonl").write_text(LINES_AS_TEXT[0] + "\n")
    monkeypatch.setattr(kept, "LARGE", len(text))
    return tmp_path


def test_a_large_file_is_compressed_and_read_as_before(folder):
    before = {path.name: read(path) for path in files(folder, "**/*")}
    compress_large(folder)
    large = folder / "h200" / "large-a.jsonl.gz"
    assert files(folder, "**/*") == [large, folder / "small-a.jsonl"]
    assert read(large) == before["large-a.jsonl"] and read(folder / "h200") == read(large)
    assert read(folder / "small-a.jsonl") == before["small-a.jsonl"]
    first = large.read_bytes()
    large.with_suffix("").write_text(text_of(large))
    compress_large(folder)
    assert large.read_bytes() == first and not large.with_suffix("").exists()


def test_new_records_replace_those_that_were_compressed(folder):
    """Also where there are so few that they would stay plain."""
    compress_large(folder)
    (folder / "h200" / "large-a.jsonl").write_text(LINES_AS_TEXT[0] + "\n")
    compress_large(folder)
    assert files(folder / "h200") == [folder / "h200" / "large-a.jsonl.gz"]
    assert read(folder / "h200") == [json.loads(LINES_AS_TEXT[0])]


def test_a_name_stands_for_the_file_that_is_there(folder):
    assert file_of(folder / "h200" / "large-a").name == "large-a.jsonl"
    compress_large(folder)
    assert file_of(folder / "h200" / "large-a").name == "large-a.jsonl.gz"
    assert file_of(folder / "none").name == "none.jsonl"
    assert [stem_of(path).name for path in (*files(folder, "**/*"), folder / "h200")] == ["large-a", "small-a", "h200"]


def test_what_is_no_whole_compressed_file_is_refused(folder):
    compress_large(folder)
    path = folder / "h200" / "large-a.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadRecords, match=r"large-a\.jsonl\.gz: cut off: its last bytes are missing"):
        read(path)
    path.write_bytes(b"{}")
    with pytest.raises(BadRecords, match=r"large-a\.jsonl\.gz: not compressed by gzip"):
        read(path)


def test_what_was_recorded_is_small():
    sizes = {path: path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()}
    assert max(sizes.values()) <= 2e6 and sum(sizes.values()) <= 45e6
