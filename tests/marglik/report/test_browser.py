"""The page in a real browser, without a network: it draws, answers, and asks for nothing."""

import re
import shutil

import pytest

from marglik.report import write_report
from tests.marglik.report.fabricate import CONFIG, EVIL, NUM_DATA, inject, write_run
from tests.marglik.report.visits import Visit, curve_point, swipe_up, visiting

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested in a browser through playwright"
)

NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
STORAGE_FORBIDDEN = """
Object.defineProperty(window, "localStorage", { get() { throw new Error("forbidden"); } });
"""


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
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    one = write_run(root / "one", layers=14)
    reduce = {"curvature": CONFIG["curvature"] | {"kfac_approx": "reduce"}}
    two = write_run(root / "two", seed=1, config=reduce, layers=50)
    evil = inject(write_run(root / "evil", evaluation=None))
    return {
        "one": write_report([one]),
        "two": write_report([one, two], root / "two.html"),
        "evil": write_report([evil]),
    }


@pytest.fixture(scope="module")
def one(browser, pages):
    """A visit to the page of one run on a desktop; tests leave it as they found it."""
    with visiting(browser, pages["one"], color_scheme="light") as visit:
        yield visit


@pytest.fixture(scope="module")
def evil(browser, pages):
    """A visit to a page of hostile names, by a browser that keeps nothing."""
    with visiting(browser, pages["evil"], STORAGE_FORBIDDEN, color_scheme="light") as visit:
        yield visit


def test_draws_every_chart_and_table(one):
    page = one.page
    assert page.title() == "LeNet on digits – marglik report"
    plots = page.locator(".chart-plot")
    assert plots.count() == 20
    for plot in plots.all():
        assert plot.locator(".trace, .scatterlayer .js-line").count() > 0
        assert plot.locator("svg.main-svg").first.get_attribute("aria-hidden") == "true"
    chart = page.get_by_role("group", name="Training loss per example over epochs")
    assert chart.count() == 1
    assert page.get_by_role("region", name="Metrics of every predictive").locator("tr").count() > 8
    assert page.locator("td.best").count() > 3
    assert page.locator(".gallery img").count() == 24
    assert one.style(".gallery img", "imageRendering") == "pixelated"
    loaded = "images => images.every(image => image.complete && image.naturalWidth === 8)"
    assert page.eval_on_selector_all(".gallery img", loaded)


def test_could_not_even_ask_if_it_wanted_to(browser, pages, tmp_path):
    """The control of `visiting`: a request is seen; and in our page the policy stops it."""
    ask = "() => { new Image().src = 'http://localhost:9/x.png' }"
    other = tmp_path / "other.html"
    other.write_text("<html data-drawn></html>")
    failures = []
    for path in (other, pages["evil"]):
        context = browser.new_context(offline=True)
        visit = Visit(context.new_page(), path)
        with visit.page.expect_event("requestfailed") as failed:
            visit.page.evaluate(ask)
        assert visit.requests_elsewhere() == ["http://localhost:9/x.png"]
        failures.append(failed.value.failure)
        context.close()
    assert failures == ["net::ERR_INTERNET_DISCONNECTED", "csp"]


def test_hovering_a_curve_shows_its_value(one):
    page = one.page
    plot = "curves-chart-1"
    assert page.locator(f"#{plot} .hoverlayer text").count() == 0
    x, y, value = curve_point(page, plot, 30)
    page.mouse.move(x, y)
    page.wait_for_selector(f"#{plot} .hoverlayer text")
    text = " ".join(page.locator(f"#{plot} .hoverlayer text").all_text_contents())
    assert "after the update" in text
    assert f"{value:.4f}" in text
    page.mouse.move(0, 0)


def test_whiskers_and_tints_are_drawn(one):
    """An interval for each point, each class; the more errors, the more colour."""
    page = one.page
    for chart, kind in (("reliability-chart-1", "y"), ("errors-chart-2", "x")):
        points = page.locator(f"#{chart} .scatterlayer .point").count()
        assert page.locator(f"#{chart} .errorbars .{kind}error").count() == points > 5
    hit, miss = (
        page.locator(f".confusion .{kind}[style]").first.evaluate(
            "cell => getComputedStyle(cell).backgroundColor"
        )
        for kind in ("hit", "miss")
    )
    empty = one.style(".confusion .miss:not([style])", "backgroundColor")
    assert len({hit, miss, empty}) == 3


def test_the_text_is_there_before_the_charts(browser, pages):
    """A browser without DecompressionStream, or with a damaged page, says so and has the rest."""
    old = "delete window.DecompressionStream"
    context = browser.new_context(offline=True)
    context.add_init_script(old)
    page = context.new_page()
    page.goto(pages["one"].as_uri())
    page.wait_for_selector("#no-charts", state="visible")
    assert page.locator(".js-line").count() == 0
    assert page.get_by_role("region", name="Metrics of every predictive").is_visible()
    context.close()


def test_a_layer_can_be_picked_out(one):
    page = one.page
    opacity = "plot => plot.data.map(trace => trace.opacity ?? 1)"
    assert set(page.eval_on_selector("#weight-decay-chart-1", opacity)) == {1}
    page.get_by_label("Highlight").select_option("stage1.block0.conv.bias")
    faded = page.eval_on_selector("#weight-decay-chart-1", opacity)
    assert faded[1] == 1 and max(faded[:1] + faded[2:]) < 0.5
    page.get_by_label("Highlight").select_option("")
    assert set(page.eval_on_selector("#weight-decay-chart-1", opacity)) == {1}


def colors_of(visit):
    """Of the page, of its text, of a curve and of a chart's text."""
    return (
        visit.style("body", "backgroundColor"),
        visit.style("h1", "color"),
        visit.style("#curves-chart-2 .scatterlayer .js-line", "stroke"),
        visit.style("#curves-chart-2 .xtick text", "fill"),
    )


def all_differ(first, second):
    return all(a != b for a, b in zip(first, second, strict=True))


def test_theme_follows_the_system_until_it_is_chosen(browser, pages):
    with visiting(browser, pages["evil"], color_scheme="light") as visit:
        page = visit.page
        light = colors_of(visit)
        page.emulate_media(color_scheme="dark")
        visit.wait("dark")
        dark = colors_of(visit)
        assert all_differ(light, dark)
        page.get_by_role("button", name="Light theme").click()
        visit.wait("light")
        assert colors_of(visit) == light
        page.reload()
        visit.wait("light")
        assert colors_of(visit) == light  # the choice is remembered
        page.emulate_media(color_scheme="light")
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(100)
        assert colors_of(visit) == light


def test_keyboard_reaches_all(evil):
    page = evil.page
    page.evaluate("document.activeElement.blur()")
    assert page.locator(".skip").bounding_box()["y"] < 0
    page.keyboard.press("Tab")
    skip = page.locator(".skip:focus")
    assert skip.inner_text() == "Skip to the content"
    assert skip.bounding_box()["y"] >= 0
    assert evil.style(".skip", "outlineStyle") == "solid"
    light = evil.style("body", "backgroundColor")
    page.keyboard.press("Tab")
    seen = [light]
    for key in ("Space", "Enter"):
        page.keyboard.press(key)
        seen.append(evil.style("body", "backgroundColor"))
    assert seen[1] != light and seen[2] == light
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.scroll')")
    closed = page.locator("details:not([open])").first.element_handle()
    closed.query_selector("summary").focus()
    page.keyboard.press("Enter")
    assert closed.evaluate("details => details.open")
    assert page.locator(".scroll:not([tabindex='0'])").count() == 0


def test_theme_without_storage(evil):
    for name, theme in (("Dark theme", "dark"), ("Light theme", "light")):
        evil.page.get_by_role("button", name=name).click()
        evil.wait(theme)


def test_paper_is_light(one):
    page = one.page
    page.emulate_media(color_scheme="dark")
    one.wait("dark")
    dark = colors_of(one)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    one.wait("light")
    assert all_differ(dark, colors_of(one))
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    one.wait("dark")
    assert colors_of(one) == dark
    assert len(page.pdf()) > 50_000
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible() and not page.locator("#theme").is_visible()
    assert one.style("thead th", "position") == "static"
    page.emulate_media(media="screen")
    assert page.locator("nav").is_visible()  # the control
    page.emulate_media(color_scheme="light")
    one.wait("light")


def test_a_phone_scrolls_in_one_direction_only(browser, pages):
    width = "document.documentElement.scrollWidth"
    with visiting(browser, pages["two"], **PHONE) as visit:
        page = visit.page
        for details in page.locator("details").all()[:4]:
            details.locator("summary").click()
        assert page.evaluate(width) == 375
        table = page.get_by_role("region", name="Metrics of every predictive")
        inside, outside = table.evaluate("box => [box.scrollWidth, box.clientWidth]")
        assert inside > outside > 300
        # A finger on a chart scrolls the page, unless it zooms (the control).
        assert swipe_up(page, "#curves-chart-2") > 100
        zoom = "{ dragmode: 'zoom', 'xaxis.fixedrange': false, 'yaxis.fixedrange': false }"
        page.evaluate(f"Plotly.relayout('curves-chart-2', {zoom})")
        assert swipe_up(page, "#curves-chart-2") == 0
        wide = "document.querySelector('main').append(Object.assign(document.createElement('div'), "
        page.evaluate(wide + "{ style: 'width: 900px; height: 1px' }))")
        assert page.evaluate(width) > 375  # the control


def test_several_runs_are_overlaid(browser, pages):
    with visiting(browser, pages["two"]) as visit:
        page = visit.page
        plot = page.locator("#curves-chart-1")
        assert plot.locator(".legendtext").all_text_contents() == ["expand", "reduce"]
        lines = plot.locator(".scatterlayer .js-line")
        strokes = {line.evaluate("line => line.style.stroke") for line in lines.all()}
        assert len(strokes) == 2
        x, y, value = curve_point(page, "curves-chart-1", 20)
        page.mouse.move(x, y)
        page.wait_for_selector("#curves-chart-1 .hoverlayer text")
        text = " ".join(page.locator("#curves-chart-1 .hoverlayer text").all_text_contents())
        values = re.findall(r"(expand|reduce) : (-\d\.\d{4})", text)
        assert [name for name, _ in values] == ["expand", "reduce"]
        assert values[1][1] == f"{value:.4f}"
        assert value * NUM_DATA < -1000
        rows = page.locator("#options details[open] tr.differs th").all_inner_texts()
        assert len(rows) == 1 and rows[0].startswith("curvature.kfac_approx")


def test_names_do_nothing(evil):
    page = evil.page
    assert page.locator("img:not([src^='data:'])").count() == 0
    assert page.get_by_role("heading", level=1).inner_text() == f"{EVIL} on {EVIL}"
    legend = page.locator("#weight-decay-chart-1 .legendtext").all_text_contents()
    assert legend == [EVIL, "%{y} <b>bold</b>"]
    x, y, _ = curve_point(page, "weight-decay-chart-1", 20)
    page.mouse.move(x, y)
    page.wait_for_selector("#weight-decay-chart-1 .hoverlayer text")
    hover = page.locator("#weight-decay-chart-1 .hoverlayer").text_content()
    assert "%{y} <b>bold</b>" in hover
    assert page.locator(".chart-plot svg a, .chart-plot :is(img, b)").count() == 0
