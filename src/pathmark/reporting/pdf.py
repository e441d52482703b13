"""A page on paper: printed by headless Chromium, where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pathmark.errors import MissingLibraryError, ReportError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 120


def find_browser() -> str:
    """The program that prints, or a refusal."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise MissingLibraryError(
            "--pdf needs Chromium or Chrome, and neither was found; install one, or print the page from any browser"
        )
    return found


def print_page(html: str) -> bytes:
    """The PDF of a page. The page lies in a private folder meanwhile, and nothing is fetched."""
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="pathmark-") as folder:
        page, pdf = Path(folder) / "page.html", Path(folder) / "page.pdf"
        page.write_text(html, encoding="utf-8")
        command = [
            browser, "--headless=new", "--disable-gpu", "--no-pdf-header-footer", f"--user-data-dir={folder}/profile",
            f"--print-to-pdf={pdf}", page.as_uri(),
        ]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.insert(1, "--no-sandbox")  # as root it does not start with one; the page is ours
        try:
            subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
            return pdf.read_bytes()
        except (subprocess.SubprocessError, OSError) as error:
            raise ReportError(
                f"{Path(browser).name} could not print the page ({type(error).__name__}); open the page and print it"
            ) from None
