"""The page in a real browser, without a network: it draws, answers, and asks for nothing."""

import re
import shutil
from contextlib import contextmanager

import pytest

from marglik.application.report import write_report
from tests.marglik.application.report.conftest import EVIL

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested in a browser through playwright"
)

NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
STORAGE_FORBIDDEN = """
Object.defineProperty(window, "localStorage", { get() { throw new Error("forbidden"); } });
"""
OLD = "delete window.DecompressionStream"
# A change of the system's theme reaches the page's listeners with the next frame.
NEXT_FRAME = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


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

    def colors(self):
        """Colours of the page and its text, and the filter that changes the charts' colours."""
        self.page.evaluate(NEXT_FRAME)
        page, text = self.style("body", "backgroundColor"), self.style("h1", "color")
        return page, text, self.style(".chart-plot", "filter")

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
def visiting(browser, path, script=None, **options):
    """A visit that must have gone without a request or a complaint."""
    context = browser.new_context(offline=True, **options)
    if script:
        context.add_init_script(script)
    context.set_default_timeout(120_000)  # milliseconds; other tests may take the cores
    visit = Visit(context.new_page(), path)
    yield visit
    assert visit.requests_elsewhere() == []
    assert visit.problems == []
    context.close()


@pytest.fixture(scope="module")
def one(browser, pages):
    """A visit to the page of one run on a desktop; tests leave it as they found it."""
    with visiting(browser, pages["one"], color_scheme="light") as visit:
        yield visit.wait()


@pytest.fixture(scope="module")
def hostile(browser, pages):
    """A visit to a page of hostile names, by a browser that keeps nothing."""
    with visiting(browser, pages["evil"], STORAGE_FORBIDDEN, color_scheme="light") as visit:
        yield visit.wait()


def test_draws_every_chart_and_table(one):
    page = one.page
    assert page.title() == "MLP on digits (0, 1, 2) – marglik report"
    plots = page.locator(".chart-plot")
    assert plots.count() == 8
    for plot in plots.all():
        assert plot.locator(".trace, .scatterlayer .js-line").count() > 0
        assert plot.locator("svg.main-svg").first.get_attribute("aria-hidden") == "true"
    assert page.get_by_role("group", name="Training loss: nats per example over epoch").count() == 1
    assert page.get_by_role("region", name="Metrics of every predictive").locator("tr").count() > 8
    loaded = "images => images.every(image => image.complete && image.naturalWidth === 8)"
    assert page.eval_on_selector_all(".gallery img", loaded)
    # A whisker for each point; the more errors, the more colour.
    points = page.locator("#reliability-chart-1 .scatterlayer .point").count()
    assert page.locator("#reliability-chart-1 .errorbars .yerror").count() >= points > 5
    cells = (".hit[style]", ".miss[style]", ".miss:not([style])")
    assert len({one.style(f".confusion {cell}", "backgroundColor") for cell in cells}) == 3


def test_the_summary_of_a_run_with_rivals_fits_a_desktop(browser, copied, change, tmp_path):
    """The seven columns of a table's run, at 1200 pixels, without being moved aside."""
    folder = copied("rivals")

    def add(results):
        scores = results["networks"]["plain"]["predictives"]["MAP"]
        trees = {"predictives": {"gradient-boosted trees": scores}, "differences": None}
        results["networks"]["scikit-learn"] = trees

    change(folder / "results.json", add)
    page = write_report([folder], tmp_path / "page.html")
    with visiting(browser, page, viewport={"width": 1200, "height": 900}) as visit:
        region = visit.wait().page.get_by_role("region", name="Metrics of every predictive")
        assert region.locator("thead th").count() == 8
        assert region.evaluate("table => table.scrollWidth <= table.clientWidth")


def test_the_text_is_there_before_the_charts_and_without_them(browser, pages, one):
    painted, drawn = one.page.evaluate(
        """() => [performance.getEntriesByName("first-contentful-paint")[0].startTime,
                  performance.getEntriesByName("drawn")[0].startTime]"""
    )
    assert painted < drawn
    # A browser that cannot unpack plotly says so, and has the rest.
    with visiting(browser, pages["one"], OLD) as visit:
        visit.page.wait_for_selector("#no-charts", state="visible")
        assert visit.page.locator(".js-line").count() == 0
        assert visit.page.get_by_role("region", name="Metrics of every predictive").is_visible()


def test_theme_follows_the_system_until_it_is_chosen_and_paper_is_light(hostile):
    """In a browser that keeps nothing, too."""
    page, light = hostile.page, hostile.colors()
    page.emulate_media(color_scheme="dark")
    dark = hostile.colors()
    assert all(a != b for a, b in zip(light, dark, strict=True)) and "invert" in dark[2]
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert hostile.colors() == light
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert hostile.colors() == dark
    page.get_by_role("button", name="Light theme").click()
    assert hostile.colors() == light  # chosen, though the system is dark
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible() and len(page.pdf()) > 50_000
    page.emulate_media(media="screen")


def test_keyboard_reaches_all(one):
    page = one.page
    page.keyboard.press("Tab")
    skip = page.locator(".skip:focus")
    assert skip.inner_text() == "Skip to the content" and skip.bounding_box()["y"] >= 0
    before = one.colors()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert one.colors() != before
    page.keyboard.press("Enter")
    assert one.colors() == before
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    closed = page.locator("details:not([open])").first.element_handle()
    closed.query_selector("summary").focus()
    page.keyboard.press("Enter")
    assert closed.evaluate("details => details.open")
    assert page.locator(".scroll:not([tabindex='0'])").count() == 0


def test_a_phone_scrolls_in_one_direction_only(browser, pages):
    width = "document.documentElement.scrollWidth"
    with visiting(browser, pages["two"], **PHONE) as visit:
        page = visit.wait().page
        for details in page.locator("details").all()[:4]:
            details.locator("summary").click()
        assert page.evaluate(width) == 375
        table = page.get_by_role("region", name="Metrics of every predictive")
        inside, outside = table.evaluate("box => [box.scrollWidth, box.clientWidth]")
        assert inside > outside > 300
        fixed = "plot => plot._fullLayout.xaxis.fixedrange"  # a finger scrolls the page
        assert page.eval_on_selector("#curves-chart-1", fixed)
        wide = "document.querySelector('main').append(Object.assign(document.createElement('div'), "
        page.evaluate(wide + "{ style: 'width: 900px; height: 1px' }))")
        assert page.evaluate(width) > 375  # the control


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


def test_names_do_nothing(hostile):
    page = hostile.page
    assert page.locator("img:not([src^='data:'])").count() == 0
    assert page.get_by_role("heading", level=1).inner_text() == f"{EVIL} on {EVIL}"
    legend = page.locator("#weight-decay-chart-1 .legendtext").all_text_contents()
    assert legend[0].startswith(EVIL[:30]) and legend[1] == "%{y} <b>bold</b>"
    shown, _ = hostile.hover("weight-decay-chart-1", 2)
    assert "%{y} <b>bold</b>" in shown
    assert page.locator(".chart-plot svg a, .chart-plot :is(img, b)").count() == 0
