"""Pages in a real browser. Screenshots stay in the directory that SHOAL_SCREENSHOTS names, for people to look at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.browser import DESK, PHONE, OpenPage, address, chromium, drawn
from tests.report.made_runs import HOSTILE, made_run
from tests.report.test_watch import append, going_on

from shoal.plan.landscape import landscape
from shoal.plan.report import plan
from shoal.report.plan.plan_page import plan_page
from shoal.report.run.write import write_report
from shoal.report.watch.follow import RunFollower
from shoal.report.watch.web import WatchServer

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def shown(browser: Any, width: int, scheme: str = "light") -> OpenPage:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    return OpenPage(context.new_page())


def kept(opened: OpenPage, name: str) -> None:
    if folder := os.environ.get("SHOAL_SCREENSHOTS"):
        opened.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    page, _ = write_report([made_run(tmp_path / "run", experts=8, hostile=HOSTILE)])
    opened = shown(browser, width, scheme).open(address(page))
    opened.check(address(page))
    opened.check_fits()
    assert drawn(opened) == 8
    assert opened.page.locator(".tile").count() == 8
    kept(opened, f"report-{width}-{scheme}")


def test_a_reports_controls(browser: Any, tmp_path: Path) -> None:
    page, _ = write_report([made_run(tmp_path / "run")])
    opened = shown(browser, DESK).open(address(page))
    chart = opened.page.locator("[data-chart=loss] canvas")
    before = chart.evaluate("canvas => canvas.toDataURL()")
    for control in ("[data-x=tokens]", "[data-x=hours]", "[data-log]"):
        opened.page.click(control)
        assert opened.page.get_attribute(control, "aria-pressed") == "true"
        after = chart.evaluate("canvas => canvas.toDataURL()")
        assert after != before
        before = after
    # What happened is told where the pointer is near its mark.
    opened.page.click("[data-x=step]")
    over = opened.page.locator("[data-chart=loss] .u-over")
    box = over.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * (20 - 1) / (40 - 1), box["y"] + 100)
    assert "killed" in opened.page.locator("[data-chart=loss] .tip").inner_text()
    opened.page.emulate_media(media="print")
    opened.page.wait_for_timeout(100)
    assert not opened.page.locator("nav").is_visible() and drawn(opened) == 7
    opened.check(address(page))


def test_reports_of_two_runs(browser: Any, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "one"), made_run(tmp_path / "other", steps=60, layout="dp=2", faults=False)]
    page, _ = write_report(runs, tmp_path / "both.html")
    for width in (DESK, PHONE):
        opened = shown(browser, width).open(address(page))
        opened.check(address(page))
        opened.check_fits()
        assert drawn(opened) == 5
        opened.page.click("details.run summary")
        opened.check_fits()
        kept(opened, f"runs-{width}")


def test_a_long_and_wide_run_opens_at_once(browser: Any, tmp_path: Path) -> None:
    page, _ = write_report([made_run(tmp_path / "run", steps=100_000, ranks=64, experts=64)])
    assert page.stat().st_size < 3_000_000
    took = []
    for _ in range(3):  # on a machine that is busy, one of them is
        opened = shown(browser, DESK).open(address(page))
        opened.check(address(page))
        took.append(opened.opened_in())
    assert min(took) < 2.0, took
    opened.check_fits()
    kept(opened, "report-long")


def test_the_live_page_updates_itself(browser: Any, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", finished=False, hostile=HOSTILE)
    going_on(run)
    with WatchServer(RunFollower(run)) as server:
        opened = shown(browser, DESK, "dark").open(server.address)
        page = opened.page
        page.wait_for_selector("html[data-looked]", state="attached")
        assert page.inner_text("#state") == "running" and drawn(opened) == 5
        append(run, 41, 42)
        page.wait_for_selector("#numbers .tile:first-child dd:has-text('42of 80')")
        page.select_option("#rank", "1")
        page.wait_for_selector("#log-text:has-text('rank 1 began')")
        assert HOSTILE in page.inner_text("#log-text") and HOSTILE in page.inner_text("#event-rows")
        opened.check_fits()
        kept(opened, "watch-1280")
        opened.check(server.address)
        phone = shown(browser, PHONE).open(server.address)
        phone.page.wait_for_selector("html[data-looked]", state="attached")
        phone.check_fits()
        kept(phone, "watch-390")


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_a_plans_controls_show_what_the_planner_computed(browser: Any, tmp_path: Path, width: int) -> None:
    found = plan("llama3.2-1b", "16xH100", seq=2048, batch=64, tokens="10B", price=2.0)
    cells = {cell.key: cell for cell in landscape(found)}
    path = tmp_path / "plan.html"
    path.write_text(plan_page(found, list(cells.values())))
    opened = shown(browser, width, "dark" if width == PHONE else "light").open(address(path))
    page = opened.page
    assert (
        page.locator("#points circle.fit").count() > 20 and page.locator("#points path.frontier").count() == 1
    )
    assert drawn(opened) == 2
    kept(opened, f"plan-{width}")
    opened.check_fits()
    for name, value, key in (
        ("devices", "8", "8|64|2048"),
        ("batch", "128", "8|128|2048"),
        ("seq", "4096", "8|128|4096"),
    ):
        page.click(f'[data-set={name}][data-value="{value}"]')
        first = cells[key].content["best"]["any"][0]
        assert page.inner_text("#tiles .tile:first-child dd").startswith(first["layout"])
        assert page.inner_text("#command").strip() == first["command"]
        assert page.locator("#map .device").count() == 8
    page.click('[data-set=recompute][data-value="full"]')
    assert page.locator("#points circle.r0").count() == 0 and page.locator("#points circle.r2").count() > 0
    page.locator("#points circle.r2").first.dispatch_event("click")
    assert "recompute=full" in page.inner_text("#told")
    opened.check(address(path))
    opened.check_fits()
