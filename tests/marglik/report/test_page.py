"""The page as text: whole, closed off from the network, and deaf to what names say."""

import base64
import hashlib
import json
import re
import zlib
from html.parser import HTMLParser

import pytest

from marglik.report import write_report
from tests.marglik.report.fabricate import EVIL, SHOWN, changed, inject, write_fit, write_run

WITH_ADDRESS = {"src", "href", "action", "data", "poster", "srcset", "formaction"}
MEBIBYTE = 2**20


class Page(HTMLParser):
    """Elements with their attributes, scripts by their type, and the text of the rest."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.words = [], [], []
        self.inside = ""
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

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

    def figures(self):
        found = [json.loads(text) for kind, text in self.scripts if kind == "application/json"]
        return [figure for figure in found if "data" in figure]


def page_of(*folders, output=None):
    return Page(write_report(folders, output).read_text(encoding="utf-8"))


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
    (other / "report.html").write_text("old")
    (other / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json"):
        write_report([other])
    assert (other / "report.html").read_text() == "old"


def test_the_page_is_small_and_fetches_nothing(page, folder):
    assert (folder / "report.html").stat().st_size < 0.75 * MEBIBYTE
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
    assert (policy["default-src"], policy["img-src"]) == ("'none'", "data: blob:")
    packed = [text for kind, text in page.scripts if kind == "application/octet-stream"]
    plotly = zlib.decompress(base64.b64decode(packed[0])).decode()
    assert plotly.startswith("/**\n* plotly.js (basic") and "MIT license" in plotly[:200]
    scripts = [text for kind, text in page.scripts if kind is None] + [plotly]
    digests = [hashlib.sha256(text.encode()).digest() for text in scripts]
    allowed = {f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests}
    assert set(policy["script-src"].split()) == allowed and len(allowed) == 3


def test_every_chart_has_a_name_its_data_and_a_table(page):
    plots = [attrs for attrs in page.having("div") if attrs.get("class") == "chart-plot"]
    data = {a["id"] for a in page.having("script") if a.get("type") == "application/json"}
    assert len(plots) == len(page.figures()) > 15
    assert {f"{plot['id']}-data" for plot in plots} == data
    assert all(plot["aria-label"].strip() for plot in plots)


def test_what_a_page_says(page):
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
        "95 % confidence intervals over the choice of test examples",
        "Confusion matrix: MAP; Laplace, probit",
        "Confusion matrix: Laplace, mc",
        "2 of 1,438 labels have a score above 1. The network predicted 97.5 % of the labels",
        "label 0 predicted 9 score 4.50 example 0",
        "curvature.kfac_approx",
        "cpu (x86_64)",
    ):
        assert text in page.text, text
    images = page.having("img")
    assert len(images) == 24 + 2
    assert images[-1]["alt"] == "Training image 1: labelled 1, predicted as 9"
    assert re.fullmatch(r"Test image 0: 0, predicted as \d", images[0]["alt"])


def test_a_fitted_posterior_has_a_page(tmp_path):
    page = page_of(write_fit(tmp_path / "fit"))
    assert "marglik evaluate" in page.text
    assert "fit has no evidence over epochs" in page.text
    assert len(page.figures()) == 2  # weight decay at the end, effective parameters
    assert "covariances times 0.25, outputs divided by 0.5" in page.text


def test_suspicious_labels_of_other_data_are_a_table(tmp_path):
    folder = write_run(tmp_path / "run", model="MLP")
    page = page_of(folder)
    assert len(page.having("img")) == 24 and "1 1 9 3.50" in page.text
    changed(folder / "results.json", lambda r: r["suspicious_labels"].update(number=0, examples=[]))
    assert "0 of 1,438 labels have" in page_of(folder).text
    changed(folder / "results.json", lambda r: r.update(suspicious_labels={"unknown": "A list."}))
    assert "A list." in page_of(folder).text


def test_what_differs_stands_out(folder, tmp_path):
    other = write_run(tmp_path / "other", config={"seed": 1})
    page = page_of(folder, other, output=tmp_path / "page.html")
    rows = [attrs for attrs in page.having("tr") if attrs.get("class") == "differs"]
    assert len(rows) == 2  # once among those that differ, once among all
    assert "2 runs: seed 0 , seed 1" in page.text
    assert [a for a in page_of(folder).having("tr") if a.get("class") == "differs"] == []


def test_names_are_text_everywhere(tmp_path):
    injected = page_of(inject(write_run(tmp_path / "run")))
    assert [a for a in injected.having("img") if not a["src"].startswith("data:")] == []
    assert not any("onerror" in attrs for _, attrs in injected.elements)
    assert len(injected.figures()) > 10  # whole, not ended by a name
    assert injected.text.count(SHOWN) > 30
    source = (tmp_path / "run" / "report.html").read_text()
    assert EVIL not in source and EVIL[:20] not in source
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", source)  # nor for a terminal
