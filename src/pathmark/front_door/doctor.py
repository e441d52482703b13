"""`pathmark doctor`: what this machine has of what PathMark needs, and what to install."""

from __future__ import annotations

import platform
import shutil
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from pathmark.errors import PathmarkError
from pathmark.reporting.pdf import find_browser

DEVELOPERS = frozenset({"dev", "docs", "bundled-training"})
"""Extras that no user needs."""


@dataclass(frozen=True)
class Part:
    """One library."""

    name: str
    wanted: str
    found: str | None
    """Installed version; None where it is not."""
    extra: str | None
    """Extra that brings it; None for what is always needed."""

    @property
    def fits(self) -> bool:
        """Whether it is there in a version that does."""
        return self.found is not None and Requirement(f"x{self.wanted}").specifier.contains(self.found, True)


@dataclass(frozen=True)
class Device:
    """Something that multiplies matrices."""

    name: str
    memory: int
    """Bytes in all."""
    free: int


@dataclass(frozen=True)
class Examination:
    """What was found."""

    python: str
    system: str
    parts: tuple[Part, ...]
    devices: tuple[Device, ...]
    disk_free: int
    """Bytes in the present folder."""
    browser: str | None
    """What prints a page to PDF."""

    @property
    def problems(self) -> list[str]:
        """What keeps PathMark from working, with what to try."""
        return [
            f"{part.name} {part.found or 'is not installed'}, expected {part.wanted}; "
            f"run: pip install '{part.name}{part.wanted}'"
            for part in self.parts
            if part.extra is None and not part.fits
        ]

    def extras(self) -> dict[str, bool]:
        """Extra -> whether everything of it is there."""
        names = sorted({part.extra for part in self.parts if part.extra is not None})
        return {name: all(part.fits for part in self.parts if part.extra == name) for name in names}

    def summary(self) -> dict[str, Any]:
        """The JSON object of `pathmark doctor --json`."""
        return {
            "pathmark": version("pathmark"),
            "python": self.python,
            "system": self.system,
            "parts": [asdict(part) | {"fits": part.fits} for part in self.parts],
            "extras": self.extras(),
            "devices": [asdict(device) for device in self.devices],
            "disk_free": self.disk_free,
            "browser": self.browser,
            "problems": self.problems,
        }

    def words(self) -> str:
        """Some lines for people."""
        core = ", ".join(f"{part.name} {part.found}" for part in self.parts if part.extra is None and part.found)
        lines = [f"PathMark {version('pathmark')}, Python {self.python}, {self.system}", f"with {core}"]
        lines += [
            f"{device.name}: {device.memory / 1e9:.1f} GB of memory, {device.free / 1e9:.1f} GB free"
            for device in self.devices
        ]
        lines.append(f"disk: {self.disk_free / 1e9:.1f} GB free here")
        for name, there in self.extras().items():
            lines.append(f"{name}: installed" if there else f"{name}: not installed; pip install 'pathmark[{name}]'")
        lines.append(f"report --pdf: {self.browser or 'needs Chromium or Chrome, and neither was found'}")
        optional = [name for name, there in self.extras().items() if not there] + (["a browser"] * (not self.browser))
        ready = "All that is needed is there." + (f" Optional, and not there: {', '.join(optional)}." * bool(optional))
        return "\n".join([*lines, *self.problems, "Not ready." if self.problems else ready])


def doctor() -> Examination:
    """Look at versions, devices, memory and extras; nothing is changed and nothing is fetched."""
    parts = tuple(part for part in map(_part, requires("pathmark") or ()) if part.extra not in DEVELOPERS)
    try:
        browser: str | None = find_browser()
    except PathmarkError:
        browser = None
    return Examination(
        platform.python_version(), f"{platform.system()} {platform.machine()}", parts, _devices(),
        shutil.disk_usage(Path.cwd()).free, browser,
    )  # fmt: skip


def _part(line: str) -> Part:
    required = Requirement(line)
    marker = str(required.marker or "")
    extra = marker.rpartition("extra == ")[2].strip("\"'") or None if "extra" in marker else None
    try:
        found = version(required.name)
    except PackageNotFoundError:
        found = None
    return Part(required.name, str(required.specifier), found, extra)


def _devices() -> tuple[Device, ...]:
    memory = psutil.virtual_memory()
    devices = [Device(f"CPU, {psutil.cpu_count()} threads", memory.total, memory.available)]
    try:
        import torch
    except ImportError:  # one of the parts, and told there
        return tuple(devices)
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        devices.append(Device(f"GPU {number}, {torch.cuda.get_device_name(number)}", total, free))
    return tuple(devices)
