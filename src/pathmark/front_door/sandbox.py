"""Read a suspect in a child process that has little to reach for: no network, bounded memory, no endless silence.

The child is a fork, so that it starts at once and a key reaches it by memory alone. What it may not do is taken from it
before it opens a file; what it sends back is unpacked as plain results and nothing else.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pathmark import errors
from pathmark.errors import PathmarkError, UnforeseenError, VerificationError
from pathmark.progress import Progress, Silent

T = TypeVar("T")

_NEW_NET, _NEW_USER, _NO_NEW_PRIVILEGES, _DIE_WITH_PARENT = 0x40000000, 0x10000000, 38, 1
_FORBIDDEN = ("socket.", "subprocess.", "os.exec", "os.posix_spawn", "os.system", "os.fork", "pty.spawn")
"""Beginnings of Python's audit events: connections, and other programs that could make some."""
_PLAIN = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy._core.numeric", "_frombuffer"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a child may use."""

    silence: float = 600.0
    """Seconds without any progress, after which it is ended."""
    memory: int | None = None
    """Bytes beyond what this process has; None: nine tenths of what is free."""
    network: bool = False

    @classmethod
    def for_files(cls, folder: str, *, network: bool = False) -> Limits:
        """Ten minutes, and as much more as reading the weights may take from a slow disk (10 MB a second)."""
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors") if file.is_file())
        return cls(silence=600.0 + size / 1e7, network=network)


def run(job: Callable[[Progress], T], limits: Limits | None = None, progress: Progress | None = None) -> T:
    """Do a job in a child process and return what it returns, or raise what it raises.

    The process must not have computed with several threads before: a fork has none of them. Elsewhere than on Linux,
    where forks are not safe or not there, the job is done here.
    """
    limits, say = limits or Limits(), progress or Silent()
    if sys.platform != "linux":
        return job(say)
    reader, writer = Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        reader.close()
        _work(job, writer, limits)
    writer.close()
    try:
        result: T = _listen(reader, child, limits, say)
        return result
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
        reader.close()


def _listen(reader: Connection, child: int, limits: Limits, say: Progress) -> Any:
    """Pass progress on until the child has its result."""
    while True:
        if not reader.poll(limits.silence):
            raise VerificationError(
                f"reading the suspect made no progress for {limits.silence:.0f} s and was ended: broken or hostile. "
                "Nothing was decided"
            )
        try:
            kind, value = _Plain(io.BytesIO(reader.recv_bytes())).load()
        except EOFError:
            _, status = os.waitpid(child, 0)
            how = f"by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "without a word"
            raise VerificationError(
                f"the process that reads the suspect ended {how}, perhaps for lack of memory; nothing was decided"
            ) from None
        if kind == "done":
            return value
        if kind == "stage":
            say.stage(*value)
        elif kind == "advance":
            say.advance(*value)
        elif kind == "unforeseen":
            raise UnforeseenError(*value)
        else:
            refused = getattr(errors, str(kind), None)
            known = isinstance(refused, type) and issubclass(refused, PathmarkError)
            raise (refused if known else VerificationError)(str(value))  # type: ignore[misc]


class _Plain(pickle.Unpickler):
    """Results of this package and arrays: a child that was taken over cannot make its parent run anything."""

    def find_class(self, module: str, name: str) -> Any:
        """A data class of ours, or what numpy rebuilds arrays with."""
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module.startswith("pathmark.") and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and is_dataclass(found):
                return found
        raise VerificationError(
            "the process that reads the suspect sent something else than a result; nothing was decided"
        )


class _Teller:
    """Progress of the child, told to its parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def stage(self, name: str, total: int | None) -> None:
        """A new stage."""
        _send(self._pipe, "stage", (name, total))

    def advance(self, units: int, note: str = "") -> None:
        """Some units are done."""
        _send(self._pipe, "advance", (units, note))


def _send(pipe: Connection, kind: str, value: Any) -> None:
    pipe.send_bytes(pickle.dumps((kind, value), protocol=5))


def _work(job: Callable[[Progress], Any], pipe: Connection, limits: Limits) -> None:
    """The child's whole life; it never returns to its parent's code."""
    try:
        _confine(limits)
        _send(pipe, "done", job(_Teller(pipe)))
    except PathmarkError as error:
        _send(pipe, type(error).__name__, str(error))
    except BaseException as error:  # kind and place only: the words may be secret
        if os.environ.get("PATHMARK_DEBUG"):
            traceback.print_exc()
        places = traceback.extract_tb(error.__traceback__)
        frames = tuple(f"{Path(place.filename).name}:{place.lineno} {place.name}" for place in places)
        with suppress(OSError):
            _send(pipe, "unforeseen", (type(error).__name__, frames))
    finally:
        os._exit(0)


def _confine(limits: Limits) -> None:
    """Take away what reading a model does not need."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0,) if os.environ.get("PATHMARK_DEBUG") else (0, 1, 2):
        os.dup2(quiet, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the key
    free = psutil.virtual_memory().available * 9 // 10
    used = int(Path("/proc/self/statm").read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    most = used + (free if limits.memory is None else limits.memory)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))  # private writable memory; weights are mapped beside it
    system = ctypes.CDLL(None, use_errno=True)
    system.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if limits.network:
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    # an empty network of our own; where the kernel does not let us, the hook below is what is left
    if system.unshare(_NEW_NET) != 0:
        system.unshare(_NEW_USER | _NEW_NET)
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_FORBIDDEN):
        raise PermissionError(f"reading a suspect may not do this: {event}")
