"""Figures hold the data that they are given."""

import pytest

from marglik.report.figures import (
    effective_parameters_plot,
    entropy_histogram,
    reliability_diagram,
    save_figure,
    shift_curves,
    shift_plot,
)

BINS = {
    "edges": [0.0, 0.25, 0.5, 0.75, 1.0],
    "counts": [0, 2, 0, 8],
    "confidence": [None, 0.4, None, 0.9],
    "accuracy": [None, 0.5, None, 0.875],
}
LEVELS = {"levels": [0.5, 0.9], "coverage": [0.4, 0.8]}
SHIFTED = {
    "test/cls/NLL": 0.1,
    "shift/noise/2/cls/NLL": 0.3,
    "shift/noise/1/cls/NLL": 0.2,
    "shift/blur/1/cls/NLL": 0.4,
    "shift/noise/1/cal/ECE": 0.05,
}


def curves(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.lines}


def test_reliability_of_classes_leaves_empty_bins_out():
    (axes,) = reliability_diagram(BINS, "title").axes
    drawn = curves(axes)
    assert drawn.pop("calibrated") == [[0, 0], [1, 1]]
    assert list(drawn.values()) == [[[0.4, 0.5], [0.9, 0.875]]]
    assert (axes.get_xlabel(), axes.get_title()) == ("confidence", "title")
    assert axes.get_legend() is None


def test_reliability_of_several_and_of_intervals():
    (axes,) = reliability_diagram({"MAP": LEVELS, "Laplace": LEVELS}).axes
    drawn = curves(axes)
    assert drawn["MAP"] == drawn["Laplace"] == [[0.5, 0.4], [0.9, 0.8]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "calibrated",
        "MAP",
        "Laplace",
    ]
    assert axes.get_xlabel() == "nominal level of the interval"


@pytest.mark.parametrize("several", [{}, {"a": BINS, "b": LEVELS}])
def test_reliability_needs_predictives_of_one_kind(several):
    with pytest.raises(ValueError, match="predictives of one kind"):
        reliability_diagram(several)


def test_entropy_is_shown_as_shares():
    entropy = {"edges": [0.0, 1.0, 2.0], "test": [3, 1], "ood": [10, 30]}
    (axes,) = entropy_histogram(entropy).axes
    stairs = {patch.get_label(): patch.get_data().values.tolist() for patch in axes.patches}
    assert stairs == {"test set": [0.75, 0.25], "out of distribution": [0.25, 0.75]}
    del entropy["ood"]
    (axes,) = entropy_histogram(entropy).axes
    assert [patch.get_label() for patch in axes.patches] == ["test set"]


def test_effective_parameters_beside_all():
    figure = effective_parameters_plot({"b": 2.0, "w": 30.0}, {"w": 100, "b": 10})
    (axes,) = figure.axes
    drawn = curves(axes)
    assert drawn["effective parameters"] == [[30, 0], [2, 1]]
    assert drawn["parameters"] == [[100, 0], [10, 1]]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["w", "b"]


def test_shift_curves_are_in_order_of_severity():
    assert shift_curves(SHIFTED, "cls/NLL") == {
        "noise": [(1, 0.2), (2, 0.3)],
        "blur": [(1, 0.4)],
    }
    assert shift_curves(SHIFTED, "cls/accuracy") == {}


def test_shift_plot_starts_at_the_test_set():
    nll, ece = shift_plot(SHIFTED, title="shift").axes
    assert curves(nll) == {
        "noise": [[0, 0.1], [1, 0.2], [2, 0.3]],
        "blur": [[0, 0.1], [1, 0.4]],
    }
    assert curves(ece) == {"noise": [[1, 0.05]]}  # no "test/cal/ECE" to start from
    assert nll.get_ylabel() == "NLL (nats per example)"


def test_shift_plot_without_shift():
    with pytest.raises(ValueError, match="'shift/noise/1/cls/NLL' are needed"):
        shift_plot({"test/cls/NLL": 0.1})


def test_figures_are_saved_whole(tmp_path):
    save_figure(reliability_diagram(BINS), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1
