"""Visits of a page by a browser, and what a reader does there."""

from contextlib import contextmanager


class Visit:
    """An open page, the requests that it made, and what went wrong in it."""

    def __init__(self, page, path):
        self.page, self.own, self.requests, self.problems = page, path.as_uri(), [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(dialog.message) or dialog.dismiss())
        page.goto(self.own)
        self.wait()

    def wait(self, theme=None):
        """Until all charts are drawn, in this theme if one is given."""
        selector = f"html[data-drawn={theme}]" if theme else "html[data-drawn]"
        self.page.wait_for_selector(selector, state="attached")

    def style(self, selector, name):
        return self.page.eval_on_selector(
            selector, "(element, name) => getComputedStyle(element)[name]", name
        )

    def requests_elsewhere(self):
        kept = ("data:", "blob:", self.own)
        return [url for url in self.requests if not url.startswith(kept)]


@contextmanager
def visiting(browser, path, script=None, **options):
    """A visit that must have gone without a request or a complaint."""
    context = browser.new_context(offline=True, **options)
    if script:
        context.add_init_script(script)
    context.set_default_navigation_timeout(120_000)  # milliseconds; other tests may take the cores
    visit = Visit(context.new_page(), path)
    yield visit
    assert visit.requests_elsewhere() == []
    assert visit.problems == []
    context.close()


def curve_point(page, plot, epoch):
    """Where in the window a curve's point is, and its value."""
    page.locator(f"#{plot}").scroll_into_view_if_needed()
    return page.evaluate(
        """([id, epoch]) => {
            const plot = document.getElementById(id), { xaxis, yaxis } = plot._fullLayout;
            const trace = plot.data.at(-1), value = trace.y[trace.x.indexOf(epoch)];
            const box = plot.getBoundingClientRect();
            return [box.left + xaxis._offset + xaxis.d2p(epoch),
                    box.top + yaxis._offset + yaxis.d2p(value), value];
        }""",
        [plot, epoch],
    )


def swipe_up(page, selector):
    """By how many pixels the page scrolls when a finger moves up from the middle of an element."""
    centre = "element => element.scrollIntoView({ block: 'center', behavior: 'instant' })"
    page.eval_on_selector(selector, centre)
    before, box = _resting_place(page), page.locator(selector).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    session = page.context.new_cdp_session(page)

    def touch(kind, points):
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", [{"x": x, "y": y}])
    for moved in range(0, 220, 20):
        touch("touchMove", [{"x": x, "y": y - moved}])
    touch("touchEnd", [])
    return _resting_place(page) - before


def _resting_place(page):
    """Where the page is once it scrolls no further, which takes a while on a busy machine."""
    place = None
    while place != (place := page.evaluate("scrollY")):
        page.wait_for_timeout(200)
    return place
