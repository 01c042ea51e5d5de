"""Attention in generated spellings: nearly all are rewritten, and whatever is rewritten or written is right."""
import pytest

from benchmarks.studies import spellings


@pytest.mark.stress
def test_generated_spellings_are_rewritten_and_written(study_main, tmp_path):
    file = tmp_path / "records.jsonl"
    status, out, err = study_main("spellings", "--count", "16", "--json", file)
    assert status == 0, out + err
    [row] = [line.split() for line in out.splitlines() if line.startswith("all ")]
    count, rewritten, written, wrong = map(int, row[1:])
    assert (count, wrong) == (16, 0) and rewritten >= 15 and written >= 15, out


@pytest.mark.unit
@pytest.mark.parametrize("count", [-1, 0, 100_000])
def test_a_count_that_can_not_be_drawn_is_a_line(count, study_main):
    status, _, err = study_main("spellings", "--count", count)
    assert status == 2 and "--count" in err and err.count("\n") == 1


@pytest.mark.unit
def test_outcomes_and_their_reasons_are_counted(monkeypatch):
    """One reason that keeps a spelling from both counts once for it."""
    monkeypatch.setattr(spellings, "_outcome", lambda run: run)
    outcomes = [spellings.Outcome(), spellings.Outcome("no batch", "no batch"), spellings.Outcome("", "no batch"),
                spellings.Outcome(wrong="off")]
    assert spellings._counts(outcomes) == ["4", "3", "2", "1"]
    assert spellings._reasons(outcomes) == {"no batch": 2, "off": 1}
