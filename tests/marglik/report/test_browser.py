"""The page in a real browser, without a network: it draws, answers, and asks for nothing."""

import re
import shutil
from contextlib import contextmanager

import pytest

from marglik.report import write_report
from tests.marglik.report.conftest import EVIL

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested in a browser through playwright"
)

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"no browser to test the page in: none of {', '.join(NAMES)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(evaluated, copied, evil, tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    others = [copied(k, k={"kfac_approx": k}) for k in ("expand", "reduce")]
    return {
        "one": write_report([evaluated], root / "one.html"),
        "two": write_report(others, root / "two.html"),
        "evil": write_report([evil], root / "evil.html"),
    }


class Visit:
    """An open page, the requests that it made, and what went wrong in it."""

    def __init__(self, page, path):
        self.page, self.own, self.requests, self.problems = page, path.as_uri(), [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message) or dialog.dismiss())
        page.goto(self.own)

    def wait(self):
        """Until all charts are drawn."""
        self.page.wait_for_selector("html[data-drawn]", state="attached")
        return self

    def style(self, selector, name):
        return self.page.eval_on_selector(
            selector, "(element, name) => getComputedStyle(element)[name]", name
        )

    def hover(self, plot, epoch):
        """What is shown when the mouse is on a chart's last curve, and the value there."""
        self.page.locator(f"#{plot}").scroll_into_view_if_needed()
        x, y, value = self.page.evaluate(
            """([id, epoch]) => {
                const plot = document.getElementById(id), { xaxis, yaxis } = plot._fullLayout;
                const trace = plot.data.at(-1), value = trace.y[trace.x.indexOf(epoch)];
                const box = plot.getBoundingClientRect();
                return [box.left + xaxis._offset + xaxis.d2p(epoch),
                        box.top + yaxis._offset + yaxis.d2p(value), value];
            }""",
            [plot, epoch],
        )
        self.page.mouse.move(x, y)
        texts = self.page.locator(f"#{plot} .hoverlayer text")
        texts.first.wait_for()
        shown = " ".join(texts.all_text_contents())
        self.page.mouse.move(0, 0)
        return shown, value

    def requests_elsewhere(self):
        kept = ("data:", "blob:", self.own)
        return [url for url in self.requests if not url.startswith(kept)]


@contextmanager
def visiting(browser, path):
    """A visit that must have gone without a request or a complaint."""
    context = browser.new_context(offline=True)
    context.set_default_timeout(120_000)  # milliseconds; other tests may take the cores
    visit = Visit(context.new_page(), path)
    yield visit
    assert visit.requests_elsewhere() == []
    assert visit.problems == []
    context.close()


def test_draws_every_chart_and_table(browser, pages):
    with visiting(browser, pages["one"]) as visit:
        page = visit.wait().page
        assert page.title() == "MLP on digits (0, 1, 2) – marglik report"
        plots = page.locator(".chart-plot")
        assert plots.count() == 6
        for plot in plots.all():
            assert plot.locator(".trace, .scatterlayer .js-line").count() > 0
            assert plot.locator("svg.main-svg").first.get_attribute("aria-hidden") == "true"
        loss = page.get_by_role("group", name="Training loss: nats per example over epoch")
        assert loss.count() == 1
        metrics = page.get_by_role("region", name="Metrics of every predictive")
        assert metrics.locator("tr").count() > 8
        loaded = "images => images.every(image => image.complete && image.naturalWidth === 8)"
        assert page.eval_on_selector_all(".gallery img", loaded)
        # A whisker for each point; the more errors, the more colour.
        points = page.locator("#reliability-chart-1 .scatterlayer .point").count()
        assert page.locator("#reliability-chart-1 .errorbars .yerror").count() >= points > 5
        cells = (".hit[style]", ".miss[style]", ".miss:not([style])")
        assert len({visit.style(f".confusion {cell}", "backgroundColor") for cell in cells}) == 3


def test_several_runs_are_overlaid(browser, pages):
    with visiting(browser, pages["two"]) as visit:
        page = visit.wait().page
        plot = page.locator("#curves-chart-1")
        assert plot.locator(".legendtext").all_text_contents() == ["expand", "reduce"]
        text, value = visit.hover("curves-chart-1", 2)
        values = re.findall(r"(expand|reduce) : (-\d\.\d{4})", text)
        assert values == [(name, f"{value:.4f}") for name in ("expand", "reduce")]
        # A double click on a name of the legend shows it alone.
        layers = page.locator("#weight-decay-chart-1 .legendtoggle")
        assert layers.count() == 4
        layers.nth(1).dblclick()
        page.wait_for_timeout(500)
        shown = "plot => plot.data.filter(trace => trace.visible !== 'legendonly').length"
        assert page.eval_on_selector("#weight-decay-chart-1", shown) == 1
        rows = page.locator("#options details[open] tr.differs th").all_inner_texts()
        assert len(rows) == 1 and rows[0].startswith("k.kfac_approx")


def test_names_do_nothing(browser, pages):
    with visiting(browser, pages["evil"]) as visit:
        page = visit.wait().page
        assert page.locator("img:not([src^='data:'])").count() == 0
        assert page.get_by_role("heading", level=1).inner_text() == f"{EVIL} on {EVIL}"
        legend = page.locator("#weight-decay-chart-1 .legendtext").all_text_contents()
        assert legend[0].startswith(EVIL[:30]) and legend[1] == "%{y} <b>bold</b>"
        shown, _ = visit.hover("weight-decay-chart-1", 2)
        assert "%{y} <b>bold</b>" in shown
        assert page.locator(".chart-plot svg a, .chart-plot :is(img, b)").count() == 0
