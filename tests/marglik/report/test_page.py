"""The page as text: whole, closed off from the network, and deaf to what names say."""

import base64
import hashlib
import json
import os
import re
import stat
import zlib
from html.parser import HTMLParser

import pytest

from marglik.report import write_report
from tests.marglik.report.fabricate import EVIL, changed, inject, write_fit, write_run

WITH_ADDRESS = {"src", "href", "action", "data", "poster", "srcset", "formaction"}


class Page(HTMLParser):
    """Elements with their attributes, scripts by their type, and the text of the rest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.words = [], [], []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self.inside != "style":
            self.words.append(data)

    def having(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def page_of(*folders, output=None):
    path = write_report(folders, output)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def page(folder):
    return page_of(folder)


def test_written_to_the_first_folder_or_where_told(folder, tmp_path):
    other = write_run(tmp_path / "other", seed=1)
    assert write_report([str(folder), other]) == folder / "report.html"
    assert write_report([folder], str(tmp_path / "new" / "page.html")).is_file()
    assert not (other / "report.html").exists()
    with pytest.raises(ValueError, match="is a folder; pass a file such as"):
        write_report([folder], tmp_path)


def test_a_failure_leaves_the_old_page(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "report.html").write_text("old")
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match="results.json is not as marglik wrote it"):
        write_report([folder])
    assert (folder / "report.html").read_text() == "old"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path):
    folder = write_run(tmp_path / "run")
    folder.chmod(stat.S_IREAD | stat.S_IEXEC)
    with pytest.raises(PermissionError):
        write_report([folder])


def test_nothing_is_fetched(page):
    addresses = {
        value
        for _, attrs in page.elements
        for name, value in attrs.items()
        if name in WITH_ADDRESS and value is not None
    }
    assert len(addresses) > 30  # the images and the table of contents
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert [attrs for attrs in page.having("link") if attrs["rel"] != "icon"] == []


def test_only_the_pages_own_scripts_may_run(page):
    policies = [a for a in page.having("meta") if "http-equiv" in a]
    policy = dict(part.split(" ", 1) for part in policies[0]["content"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["img-src"] == "data: blob:"
    packed = [text for kind, text in page.scripts if kind == "application/octet-stream"]
    plotly = zlib.decompress(base64.b64decode(packed[0])).decode()
    assert plotly.startswith("/**\n* plotly.js (basic") and "MIT license" in plotly[:200]
    scripts = [text for kind, text in page.scripts if kind is None] + [plotly]
    digests = [hashlib.sha256(text.encode()).digest() for text in scripts]
    assert len(scripts) == 3
    assert policy["script-src"].split() == [
        f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests
    ]


def test_the_page_is_small(folder):
    """With plotly's whole bundle it would be 4.9 MB."""
    assert (folder / "report.html").stat().st_size < 750_000


def test_every_chart_has_a_name_its_data_and_a_table(page):
    plots = [attrs for attrs in page.having("div") if attrs.get("class") == "chart-plot"]
    data = {a["id"] for a in page.having("script") if a.get("type") == "application/json"}
    assert len(plots) > 15
    assert {f"{plot['id']}-data" for plot in plots} == data
    assert all(plot["aria-label"].strip() for plot in plots)
    assert len(page.having("figure")) == len(plots) <= len(page.having("details"))
    for kind, text in page.scripts:
        if kind == "application/json":
            assert {"data", "layout", "height"} <= json.loads(text).keys()


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    targets = [a["href"][1:] for a in page.having("a")]
    assert len(targets) == 13 and set(targets) <= set(ids)


def test_headings_are_nested(page):
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False))


def test_summary_and_facts_are_there(page):
    for text in (
        "LeNet on digits",
        "Negative log-likelihood nats per example, lower is better",
        "noise (1,000 examples), resized from 28x28x1 to 8x8x1, detected by entropy",
        "40 (kept: 40)",
        "94.32–98.14",  # an interval
        "0.0012–0.0345",  # of AURC
        "5.67–34.56",  # of FPR95
        "The ECE has none",
        "Differences from MAP, on the same test examples",
        "Learned minus initial weight decay, on the same test examples",
        "−0.0400 to 0.0010",
        "+0.28",
        "95 % confidence intervals over the choice of test examples",
        "Confusion matrix: MAP; Laplace, probit",
        "Confusion matrix: Laplace, mc",
        "curvature.kfac_approx",
        "cpu (x86_64)",
    ):
        assert text in page.text, text
    images = page.having("img")
    assert len(images) == 24
    assert re.fullmatch(r"Test image 0: 0, predicted as \d", images[0]["alt"])


def test_a_fitted_posterior_has_a_page(tmp_path):
    page = page_of(write_fit(tmp_path / "fit"))
    assert "marglik evaluate" in page.text
    assert "a posterior that was fitted to a trained network has no epochs" in page.text
    titles = [t for kind, t in page.scripts if kind == "application/json"]
    assert len(titles) == 2  # weight decay at the end, effective parameters
    assert "covariances times 0.25, outputs divided by 0.5" in page.text


def test_evaluations_of_before_have_a_page(tmp_path):
    """They have neither intervals nor curves of errors."""
    folder = write_run(tmp_path / "run")
    new = ("intervals", "against", "risk_coverage", "roc", "classes")

    def age(evaluation):
        for entry in evaluation["predictives"].values():
            for name in new:
                entry.pop(name, None)

    changed(folder / "evaluation.json", age)
    newer = ("intervals", "differences", "seconds_beside")
    changed(folder / "results.json", lambda r: [r.pop(name) for name in newer])
    page = page_of(folder)
    assert "has no errors by class." in page.text
    assert "intervals over the choice" not in page.text and "Confusion" not in page.text


def test_what_differs_stands_out(folder, tmp_path):
    other = write_run(tmp_path / "other", config={"seed": 1})
    page = page_of(folder, other, output=tmp_path / "page.html")
    rows = [attrs for attrs in page.having("tr") if attrs.get("class") == "differs"]
    assert len(rows) == 2  # once among those that differ, once among all
    assert "2 runs: seed 0 , seed 1" in page.text
    assert [a for a in page_of(folder).having("tr") if a.get("class") == "differs"] == []


def test_names_are_text_everywhere(page, tmp_path):
    injected = page_of(inject(write_run(tmp_path / "run")))
    assert [a for a in injected.having("img") if not a["src"].startswith("data:")] == []
    assert not any("onerror" in attrs for _, attrs in injected.elements)
    assert len(injected.having("script")) > 10
    assert injected.text.count(EVIL) > 30
    source = (tmp_path / "run" / "report.html").read_text()
    assert EVIL not in source and EVIL[:20] not in source
    for kind, text in injected.scripts:
        if kind == "application/json":
            json.loads(text)  # whole, not ended by a name
