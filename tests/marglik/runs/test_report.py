"""`marglik report`: a page about what the other commands left."""

import pytest

from marglik.cli import main
from tests.marglik.runs.command_line import DATA, MODEL, UNCALIBRATED, refusal


@pytest.fixture
def fitted(checkpoint, tmp_path):
    arguments = ["fit", *DATA, *MODEL, "--checkpoint", str(checkpoint), "--no_progress"]
    assert main([*arguments, *UNCALIBRATED, "--output", str(tmp_path / "fitted")]) == 0
    return tmp_path / "fitted"


def test_one_run(run, capsys):
    written = (run / "report.html").read_text()
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"Written to {run / 'report.html'}\n"
    page = (run / "report.html").read_text()
    assert "MLP on digits (0, 1, 2, 3, 4, 5, 6, 7)" in page
    assert len(page) == pytest.approx(len(written), rel=0.01)  # as marglik train wrote it
    for name in ("layers.1.weight", "Laplace, probit"):
        assert name in page


def test_a_fitted_posterior_before_it_is_evaluated(fitted):
    assert main(["report", str(fitted)]) == 0
    page = (fitted / "report.html").read_text()
    assert "layers.1.weight" in page and "Metrics of every predictive" not in page
    assert main(["evaluate", str(fitted), "--progress", "false"]) == 0  # writes it anew
    assert "Metrics of every predictive" in (fitted / "report.html").read_text()


def test_runs_side_by_side(run, fitted, tmp_path):
    page = tmp_path / "pages" / "both.html"
    assert main(["report", str(run), str(fitted), "--output", str(page)]) == 0
    assert str(run) in page.read_text() and str(fitted) in page.read_text()
    assert not (fitted / "report.html").exists()


def test_refused(run, tmp_path, capsys):
    """Each reason has its test beside the code that reads runs and writes pages."""
    (run / "report.html").unlink()
    assert "is not the folder of a run" in refusal(capsys, "report", str(run), str(tmp_path))
    assert not (run / "report.html").exists()


def test_a_config_that_was_edited_says_how_to_change_options(run, capsys):
    with (run / "config.yaml").open("a") as file:
        file.write("epochs: 5\n")
    message = refusal(capsys, "report", str(run))
    assert "config.yaml is not as marglik wrote it" in message
    assert "pass an edited copy from elsewhere as --config" in message
