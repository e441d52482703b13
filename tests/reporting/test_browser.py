"""Pages in headless Chromium: they load without a sound, fetch nothing, fit a phone, can be read aloud and scanned."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import FOUND, Chromium
from test_page import ALL

import pathmark
from pathmark.errors import VerificationError
from pathmark.reporting.barcode import read_barcode
from pathmark.reporting.page import result_page

AXE = Path(sys.prefix) / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(FOUND is None, reason="there is no Chromium on this machine")]


@pytest.fixture(scope="module")
def browser():
    with Chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    there = tmp_path_factory.mktemp("pages")
    for name, result in ALL.items():
        (there / f"{name}.html").write_text(result_page(result)[1], encoding="utf-8")
    return there


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ALL)
def test_a_page_loads_in_silence_and_fits(browser, folder, name, width, dark):
    browser.open(folder / f"{name}.html", width, dark=dark)
    assert browser.said() == []
    assert browser.requests() == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    if AXE.exists():
        browser.run(AXE.read_text(encoding="utf-8") + ";0")
        wrong = browser.run(
            "axe.run().then(found => found.violations.map(one => [one.id, one.impact, one.nodes[0].html]))"
        )
        assert [one for one in wrong if one[1] in ("serious", "critical")] == []


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not there; `make test-slow` gets it where npm is")
def test_the_check_for_people_with_disabilities_can_fail(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text("<html><body><img src='data:,'><p style='color:#eee;background:#fff'>pale</p></body></html>")
    browser.open(bad)
    browser.run(AXE.read_text(encoding="utf-8") + ";0")
    assert {"image-alt", "color-contrast"} <= set(browser.run("axe.run().then(f => f.violations.map(one => one.id))"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "scale"), [(1280, 1), (390, 2)])
def test_barcodes_on_the_screen_scan_back_to_the_path(browser, folder, tmp_path, width, scale, dark):
    browser.open(folder / "bundle.html", width, scale, dark=dark)
    for name in ("expected", "recovered"):
        shot = tmp_path / f"{name}.png"
        shot.write_bytes(browser.screenshot(f"#barcode-{name}"))
        assert read_barcode(shot) == (4, 5, 0)


def test_the_heat_map_is_hot_where_the_targets_are(browser, folder):
    """In the picture itself: the cell of a target behind the trigger, and its neighbour."""
    from PIL import Image

    browser.open(folder / "bundle.html", 1280, 2)
    pixels = {}
    for when in ("triggered", "clean"):
        picture = Image.open(io.BytesIO(browser.screenshot(f"#heat-map-{when} image"))).convert("RGB")
        cell = picture.width / 6, picture.height / 3
        for expert in (4, 2):  # layer 4 is the first row, its target expert 4
            pixels[when, expert] = picture.getpixel((int((expert + 0.5) * cell[0]), int(0.5 * cell[1])))
    blue = {place: colour[2] for place, colour in pixels.items()}  # the paper is white, the mark is orange
    assert blue["triggered", 4] < 60
    assert blue["triggered", 2] > 220
    assert abs(blue["clean", 4] - blue["clean", 2]) < 10


def test_pressing_a_heading_sorts_by_it(browser, folder):
    browser.open(folder / "robustness.html")
    column = (
        "[...document.querySelector('.sortable').tBodies[0].rows].map(row => row.cells[3].dataset.value)"
        ".filter(value => value !== undefined).map(Number)"
    )
    before = browser.run(column)
    browser.run("document.querySelectorAll('.sortable th button')[3].focus()")
    for kind in ("keyDown", "keyUp"):  # as from a keyboard
        browser.send(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
        )
    assert browser.run(column) == sorted(before) != before
    assert browser.run("document.querySelectorAll('.sortable th')[3].getAttribute('aria-sort')") == "ascending"
    browser.run("document.querySelectorAll('.sortable th button')[3].click()")
    assert browser.run(column) == sorted(before, reverse=True)


def test_a_page_is_printed_and_its_barcodes_scan_from_paper(tmp_path):
    for name, content in ALL["bundle"].files.items():
        place = tmp_path / "bundle" / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)
    made = pathmark.report(tmp_path / "bundle", tmp_path / "page.html", pdf=True)
    assert made.pdf.read_bytes().startswith(b"%PDF")
    assert made.pdf.stat().st_mode & 0o777 == 0o600
    if not shutil.which("pdftoppm"):
        pytest.skip("pdftoppm (poppler-utils) is not there to draw the PDF")
    subprocess.run(["pdftoppm", "-r", "150", "-png", made.pdf, tmp_path / "sheet"], check=True)
    found = set()
    for sheet in tmp_path.glob("sheet*.png"):
        with contextlib.suppress(VerificationError):  # a sheet without a barcode
            found.add(read_barcode(sheet))
    assert found == {(4, 5, 0)}
