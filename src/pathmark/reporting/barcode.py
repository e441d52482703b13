"""A path as a Code 128C barcode (ISO/IEC 15417), as in the paper's appendix on deployment, and back.

The digits are read in pairs, as code set C holds them:

    01          version of this layout
    WW          pairs per group index: 01 for indices up to 99, 02 up to 9999, ...
    LL          number of layers, 01 to 99
    LL * WW     the group indices, in the order of the layers, with leading zeros

Code 128 adds its own check symbol (modulo 103). A barcode holds group indices only: without the key's
permutation they say which licensee a copy belongs to, not which experts are marked.

Round-trip laws: decode_path(encode_path(path)) == path, and read_barcode(f) == path after
write_barcode(path, f), for SVG and PNG.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, UnidentifiedImageError

from pathmark.errors import CapacityError, VerificationError

VERSION = 1
# Not 99, now or later: the writer takes a leading 99 for its own code-set switch and drops it.

MAX_LAYERS = 99
MAX_PAIRS = 9
DPI = 300
MODULE_PIXELS = 4
"""Width of the narrowest bar in the PNG: a whole number of pixels, so that no bar is blurred."""
MODULE_MM = MODULE_PIXELS * 25.4 / DPI
QUIET_MODULES = 10
"""White on either side, the least that the standard asks for."""


def encode_path(path: Sequence[int]) -> str:
    """The digits of a path of group indices.

    >>> encode_path([11, 24, 5, 18, 3, 26])
    '010106112405180326'
    """
    if not 1 <= len(path) <= MAX_LAYERS:
        raise CapacityError(f"a barcode holds 1 to {MAX_LAYERS} layers, got {len(path)}")
    if min(path) < 0:
        raise CapacityError(f"group indices are not negative, got {min(path)}")
    pairs = -(-len(str(max(path))) // 2)
    if pairs > MAX_PAIRS:
        raise CapacityError(f"a group index has at most {2 * MAX_PAIRS} digits, got {max(path)}")
    return f"{VERSION:02d}{pairs:02d}{len(path):02d}" + "".join(f"{index:0{2 * pairs}d}" for index in path)


def decode_path(digits: str) -> tuple[int, ...]:
    """The path that `encode_path` turned into these digits; anything else is refused."""
    if not re.fullmatch(r"[0-9]{8,}", digits):
        raise VerificationError(f"expected at least eight digits, got {digits!r}; is it a PathMark barcode?")
    version, pairs, n_layers = (int(digits[i : i + 2]) for i in (0, 2, 4))
    if version != VERSION:
        raise VerificationError(f"barcode layout {version} is not known (expected {VERSION}); update PathMark")
    body, width = digits[6:], 2 * pairs
    if not 1 <= pairs <= MAX_PAIRS or n_layers < 1 or len(body) != n_layers * width:
        raise VerificationError(
            f"the header promises {n_layers} layers of {width} digits, {len(body)} digits follow; scan again"
        )
    path = tuple(int(body[i : i + width]) for i in range(0, len(body), width))
    if encode_path(path) != digits:  # one path, one barcode
        raise VerificationError(f"indices are padded wider than needed in {digits!r}; not a PathMark barcode")
    return path


def render_svg(path: Sequence[int], caption: str | None = None) -> bytes:
    """An SVG file with the path in print below the bars, or `caption` instead."""
    from barcode.writer import SVGWriter  # type: ignore[import-untyped]

    svg = _render(path, caption, SVGWriter())
    assert isinstance(svg, bytes)
    return svg


def render_png(path: Sequence[int], caption: str | None = None) -> bytes:
    """A PNG file at 300 dpi with the path in print below the bars, or `caption` instead."""
    from barcode.writer import ImageWriter

    picture = _render(path, caption, ImageWriter(mode="L", dpi=DPI))
    assert isinstance(picture, Image.Image)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", dpi=(DPI, DPI))
    return buffer.getvalue()


def write_barcode(path: Sequence[int], file: Path, caption: str | None = None) -> None:
    """Write an SVG or a PNG, by the file's suffix."""
    render = {".svg": render_svg, ".png": render_png}.get(file.suffix.lower())
    if render is None:
        raise VerificationError(f"expected a file name ending in .svg or .png, got {file.name}")
    picture = render(path, caption)
    try:
        file.write_bytes(picture)
    except OSError as error:
        raise VerificationError(f"cannot write {file}: {error.strerror or error}") from error


def read_barcode(file: Path) -> tuple[int, ...]:
    """The path in a picture: any image Pillow opens, photographed or drawn, or an SVG written by us."""
    import zxingcpp

    try:
        if file.suffix.lower() == ".svg":
            picture = _draw_svg(file.read_text(encoding="utf-8"), file.name)
        else:
            with Image.open(file) as opened:
                picture = opened.convert("L")
    except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, UnicodeDecodeError) as error:
        raise VerificationError(f"{file.name} is not an image; expected SVG, PNG or JPEG") from error
    except OSError as error:
        raise VerificationError(f"cannot read {file.name}: {error.strerror or error}") from error
    found = {code.text for code in zxingcpp.read_barcodes(picture, formats=zxingcpp.BarcodeFormat.Code128)}
    if len(found) != 1:
        raise VerificationError(
            f"expected one Code 128 barcode in {file.name}, found {len(found)}; crop the picture to one, or "
            "take it sharper and with some white on both sides"
        )
    return decode_path(found.pop())


def _render(path: Sequence[int], caption: str | None, writer: object) -> object:
    from barcode.codex import Code128  # type: ignore[import-untyped]

    options = {
        "module_width": MODULE_MM,
        "module_height": 15.0,
        "quiet_zone": QUIET_MODULES * MODULE_MM,
        "font_size": 9,
        "text_distance": 5.0,
        "margin_bottom": 2.0,
    }
    text = " ".join(map(str, path)) if caption is None else caption
    return Code128(encode_path(path), writer=writer).render(options, text)


def _draw_svg(svg: str, name: str) -> Image.Image:
    """The bars of an SVG that `render_svg` wrote, as a picture: all that a scanner would see of them."""

    bars = re.findall(r'<rect x="([\d.]+)mm" y="([\d.]+)mm" width="([\d.]+)mm" height="([\d.]+)mm"', svg)
    size = re.search(r'width="([\d.]+)mm" height="([\d.]+)mm"', svg)
    if not bars or size is None:
        raise VerificationError(f"{name} has no bars in it; only an SVG made by `pathmark barcode` can be read")
    scale = MODULE_PIXELS / MODULE_MM
    width, height = (round(float(length) * scale) for length in size.groups())
    if not 0 < width * height < 10**8:
        raise VerificationError(f"{name} is {width} x {height} pixels; expected a barcode")
    picture = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(picture)
    for bar in bars:
        x, y, bar_width, bar_height = (round(float(length) * scale) for length in bar)
        draw.rectangle((x, y, x + bar_width - 1, y + bar_height - 1), fill=0)
    return picture
