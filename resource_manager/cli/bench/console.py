"""Console of a running service in Chromium: first paint, update of one lease, layout shift."""

from __future__ import annotations

import os
import shutil
import statistics
from collections.abc import Callable
from typing import Any

VISITS = 5
UPDATES = 10

WATCH = """
(() => {
  window.shift = 0;
  new PerformanceObserver(list => { for (const each of list.getEntries()) window.shift += each.value; })
    .observe({type: 'layout-shift', buffered: true});
  const add = EventSource.prototype.addEventListener;
  EventSource.prototype.addEventListener = function (name, listener) {
    return add.call(this, name, event => { window.told = performance.now(); listener(event); });
  };
  window.painted = id => new Promise(done => new MutationObserver((_, watcher) => {
    if (document.querySelector(`[data-task="${id}"]`)) return;
    watcher.disconnect();
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - window.told)));
  }).observe(document.getElementById('servers'), {childList: true}));
})();
"""
"""Script before the page's own that sums layout shifts and times an event until its row is painted."""

FIRST_PAINT = """() => new Promise(done => new PerformanceObserver(list => {
    for (const entry of list.getEntriesByName('first-contentful-paint')) done(entry.startTime);
}).observe({type: 'paint', buffered: true}))"""
# The page itself waits: Playwright's own waiting evaluates text, which the pages' content policy forbids.


def in_chromium(url: str, token: str, release: Callable[[str], None]) -> dict[str, float]:
    """Return the figures of the overview in milliseconds, medians; none without Chromium and Playwright.

    An update is the time from the event that tells of the end of a lease until its row is painted, with the
    request for the row. The leases `t0`, `t2`... are on the first page, on a server each, and are released.
    """
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return {}
    if chromium is None:
        return {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(extra_http_headers={"Authorization": f"Bearer {token}"})
        page.add_init_script(WATCH)
        paints, shifts = [], []
        for _ in range(VISITS):
            page.goto(f"{url}/")
            paints.append(page.evaluate(FIRST_PAINT))
            shifts.append(page.evaluate("window.shift"))
        updates = [_update(page, release, f"t{2 * number}") for number in range(UPDATES)]
        shifts.append(page.evaluate("window.shift"))
        browser.close()
    return {
        "console_first_paint_ms": float(round(statistics.median(paints))),
        "console_update_ms": round(statistics.median(updates), 1),
        "console_layout_shift": round(max(shifts), 4),
    }


def _update(page: Any, release: Callable[[str], None], task_id: str) -> float:
    """Release a lease and return the milliseconds from the event of its end until its row is painted."""
    page.wait_for_timeout(1_500)  # pages refresh at most once a second
    page.evaluate("id => { window.update = window.painted(id); }", task_id)
    release(task_id)
    return float(page.evaluate("() => window.update"))
