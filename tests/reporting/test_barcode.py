"""Barcodes are drawn by one library (python-barcode) and read by another (zxing-cpp)."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import zxingcpp
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from pathmark.errors import CapacityError, VerificationError
from pathmark.reporting.barcode import (
    MODULE_PIXELS,
    QUIET_MODULES,
    decode_path,
    encode_path,
    read_barcode,
    render_png,
    render_svg,
    write_barcode,
)

PAPER = (11, 24, 5, 18, 3, 26)
paths = st.lists(st.integers(0, 10**6), min_size=1, max_size=99).map(tuple)


def scan(picture: Image.Image) -> tuple[int, ...]:
    codes = zxingcpp.read_barcodes(picture, formats=zxingcpp.BarcodeFormat.Code128)
    assert len(codes) == 1
    return decode_path(codes[0].text)


@given(paths)
def test_digits_round_trip(path: tuple[int, ...]) -> None:
    digits = encode_path(path)
    assert len(digits) % 2 == 0  # code set C holds pairs
    assert decode_path(digits) == path


@given(paths, paths)
def test_different_paths_have_different_digits(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert (encode_path(first) == encode_path(second)) == (first == second)


def test_the_papers_path() -> None:
    assert encode_path(PAPER) == "010106112405180326"
    assert encode_path((0, 255)) == "01020200000255"


def test_a_thousand_random_paths_scan_back() -> None:
    rng = np.random.default_rng(0)
    for _ in range(1000):
        highest = int(rng.choice([8, 30, 64, 100, 128, 12_000]))
        path = tuple(int(i) for i in rng.integers(0, highest, rng.integers(1, 25)))
        assert scan(Image.open(io.BytesIO(render_png(path)))) == path


@given(st.lists(st.integers(0, 300), min_size=1, max_size=48).map(tuple))
@settings(max_examples=40, deadline=None)
def test_svg_scans_back(tmp_path_factory: pytest.TempPathFactory, path: tuple[int, ...]) -> None:
    file = tmp_path_factory.mktemp("svg") / "mark.svg"
    write_barcode(path, file)
    assert read_barcode(file) == path


def test_it_is_code_set_c_with_one_check_symbol_and_text_below() -> None:
    picture = Image.open(io.BytesIO(render_png(PAPER))).convert("L")
    pixels = np.asarray(picture)
    # Start, nine pairs, check symbol of 11 modules each, and a stop of 13.
    modules = (1 + 9 + 1) * 11 + 13 + 2 * QUIET_MODULES
    assert abs(picture.width - modules * MODULE_PIXELS) <= MODULE_PIXELS
    bars_end = int(np.flatnonzero(pixels[:, QUIET_MODULES * MODULE_PIXELS + 1] < 128).max())
    assert (pixels[bars_end + 1 :] < 128).any()  # print below the bars
    assert b">11 24 5 18 3 26<" in render_svg(PAPER).replace(b"\n", b"")
    assert b">Example Lab<" in render_svg(PAPER, caption="Example Lab").replace(b"\n", b"")


def test_a_changed_bar_never_reads_as_another_path() -> None:
    """The check symbol: with any one symbol's bars replaced by another's, the picture is refused."""
    pixels = np.asarray(Image.open(io.BytesIO(render_png(PAPER))).convert("L")).copy()
    left, symbol = QUIET_MODULES * MODULE_PIXELS, 11 * MODULE_PIXELS
    for place in range(1, 10):
        for other in range(1, 10):
            changed = pixels.copy()
            one, two = left + place * symbol, left + other * symbol
            if np.array_equal(pixels[:100, one : one + symbol], pixels[:100, two : two + symbol]):
                continue
            changed[:200, one : one + symbol] = pixels[:200, two : two + symbol]
            assert zxingcpp.read_barcodes(Image.fromarray(changed)) == []


def test_a_photograph_of_it_reads(tmp_path: Path) -> None:
    picture = Image.open(io.BytesIO(render_png(PAPER))).convert("L")
    scene = Image.new("L", (picture.width + 200, picture.height + 200), 230)
    scene.paste(picture, (100, 100))
    scene = scene.rotate(4, expand=True, fillcolor=230).filter(ImageFilter.GaussianBlur(1))
    scene.save(tmp_path / "photo.jpg", quality=70)
    assert read_barcode(tmp_path / "photo.jpg") == PAPER


def test_pictures_without_one_barcode_are_refused(tmp_path: Path) -> None:
    Image.new("L", (300, 100), 255).save(tmp_path / "white.png")
    with pytest.raises(VerificationError, match="found 0"):
        read_barcode(tmp_path / "white.png")
    pair = Image.new("RGB", (700, 1000), "white")
    for row, path in enumerate((PAPER, (8, 2, 14, 0, 27, 6))):
        pair.paste(Image.open(io.BytesIO(render_png(path))), (0, 500 * row))
    pair.save(tmp_path / "two.png")
    with pytest.raises(VerificationError, match="found 2"):
        read_barcode(tmp_path / "two.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(VerificationError, match="not an image"):
        read_barcode(tmp_path / "text.png")
    (tmp_path / "empty.svg").write_text("<svg/>")
    with pytest.raises(VerificationError, match="no bars"):
        read_barcode(tmp_path / "empty.svg")
    with pytest.raises(VerificationError, match="cannot read"):
        read_barcode(tmp_path / "missing.png")


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"\.svg or \.png"):
        write_barcode(PAPER, tmp_path / "mark.pdf")
    with pytest.raises(VerificationError, match="cannot write"):
        write_barcode(PAPER, tmp_path / "nowhere" / "mark.svg")


@pytest.mark.parametrize(
    ("digits", "message"),
    [
        ("0101", "at least eight digits"),
        ("02010111", "layout 2 is not known"),
        ("010102112", "promises 2 layers"),
        ("01010011", "promises 0 layers"),
        ("0102010011", "padded wider"),
        ("01o10111", "at least eight digits"),
    ],
)
def test_foreign_digits_are_refused(digits: str, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        decode_path(digits)


@pytest.mark.parametrize("path", [[], [1] * 100, [-1, 2], [10**18]])
def test_paths_that_do_not_fit_are_refused(path: list[int]) -> None:
    with pytest.raises(CapacityError):
        encode_path(path)
