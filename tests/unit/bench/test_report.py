"""Reports as files: what was written is read, and nothing else is."""

from __future__ import annotations

import csv
import io
import json

import pytest

from orbit.bench.csv_file import COLUMNS, to_csv
from orbit.bench.report import Report, reports_from_json
from orbit.errors import UsageError
from tests.unit.bench.reports import SIZE, baseline, report, row


def test_a_report_survives_its_file() -> None:
    sent = report()
    assert Report.from_json(sent.to_json()) == sent


def test_a_file_has_one_report_after_the_other() -> None:
    sent = [report(), report(row(size=4096))]
    lines = "\n".join(json.dumps(one.to_mapping()) for one in sent)
    assert reports_from_json(f"{lines}\n") == tuple(sent)
    assert reports_from_json(sent[0].to_json()) == (sent[0],)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"schema": "orbit-bench/0"}'])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        reports_from_json(text)


@pytest.mark.parametrize("change", [{"ops": "many"}, {"seconds": None}, {"size": 1.5}])
def test_figures_that_are_no_numbers_are_refused(change: dict[str, object]) -> None:
    found = json.loads(report().to_json())
    found["rows"][0] |= change
    with pytest.raises(UsageError, match="no number"):
        Report.from_json(json.dumps(found))


def test_csv_has_a_line_for_each_row() -> None:
    written = to_csv([report(row(), baseline()), report(row(phases={"move": 0.5}))])
    lines = list(csv.DictReader(io.StringIO(written)))
    assert [line["source"] for line in lines] == ["orbit", "socket", "orbit"]
    assert set(COLUMNS) < set(lines[0])
    first = lines[0]
    assert (first["size_bytes"], first["ops"], first["path"]) == (str(SIZE), "100", "tcp")
    assert float(first["gb_per_s"]) == pytest.approx(SIZE * 100 / 0.1 / 1e9)
    assert float(first["p50_us"]) == pytest.approx(1000)
    assert float(lines[1]["orbit_over_this"]) == pytest.approx(0.5)
    assert first["client_crossings"] == first["phase_move_s"] == ""
    assert float(lines[2]["phase_move_s"]) == 0.5


def test_csv_names_every_path_that_ran() -> None:
    (line,) = csv.DictReader(io.StringIO(to_csv([report(row(paths={"rdma": 98, "tcp": 2}))])))
    assert line["path"] == "rdma x98 + tcp x2"
