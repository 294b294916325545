"""Tables for people and the JSON line for everything else."""

import io
import json
from pathlib import Path

import pytest

from benchmarks.report import Report, Table, format_table, show, show_progress, significant

TABLE = Table("Speeds", ("loop", "us"), [("asyncio", 12.5), ("trio", 1234.5), ("uvloop", None)])
REPORT = Report("control_plane", [TABLE], [{"loop": "trio", "us": 1234.5}], ["uvloop is left out"])


def test_columns_line_up_texts_left_and_numbers_right() -> None:
    """Numbers are compared by their length before they are read."""
    assert format_table(TABLE).splitlines() == [
        "Speeds",
        "loop        us",
        "-------  -----",
        "asyncio  12.50",
        "trio     1,234",
        "uvloop       -",
    ]


def test_a_number_shows_three_digits_or_so() -> None:
    """More would be noise, fewer would hide a difference."""
    row = (0.1234, 1.234, 12.34, 123.4, 12345.6, 12345)
    last = format_table(Table("", tuple("abcdef"), [row])).splitlines()[-1]
    assert last.split() == ["0.123", "1.23", "12.34", "123.4", "12,346", "12,345"]


def test_a_table_without_rows_is_its_heading() -> None:
    """A suite whose every row was left out still says which."""
    assert format_table(Table("None", ("loop", "us"), [])).splitlines() == ["None", "loop  us", "----  --"]


def test_the_last_line_of_stdout_is_one_json_object() -> None:
    """Whoever collects figures reads that line and nothing else."""
    stdout = io.StringIO()
    show(REPORT, {"cores": 2}, stdout=stdout)
    *_, note, last = stdout.getvalue().splitlines()
    assert note == "note: uvloop is left out"
    assert json.loads(last) == {"suite": "control_plane", "machine": {"cores": 2}, "results": REPORT.results}


def test_the_line_is_appended_to_the_file_of_earlier_ones(tmp_path: Path) -> None:
    """A kept file is a history: a run adds to it and takes nothing away."""
    stdout, out = io.StringIO(), tmp_path / "kept.jsonl"
    for _ in range(2):
        show(REPORT, {}, stdout=stdout, out=out)
    lines = out.read_text().splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1] == stdout.getvalue().splitlines()[-1]


def test_a_kept_number_has_no_more_digits_than_were_measured() -> None:
    """A figure with ten digits reads as if it were that sure."""
    assert (significant(123456.7), significant(0.00123456), significant(0.0)) == (123500.0, 0.001235, 0.0)


def test_progress_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """A line among the figures would be read as one of them."""
    show_progress("a suite: its second turn")
    assert capsys.readouterr() == ("", "a suite: its second turn\n")
