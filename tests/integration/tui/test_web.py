"""The interface in a browser: who gets in, what arrives, and that nothing is left when it ends."""

import asyncio
import base64
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from tests.integration.service.api_server import OPERATOR, on_tcp, serve_api
from traced.api.control import Control
from tui.web import COOKIE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_S = 40.0
# For people to look at: fonts differ between machines.
PICTURE_PATH = Path(__file__).parent / "pictures" / "browser.png"


@dataclass
class Site:
    """The server process, its URL with the key, and the HTTP session of a visitor."""

    process: asyncio.subprocess.Process
    entrance: str
    visitor: aiohttp.ClientSession

    @property
    def origin(self) -> str:
        parts = urlsplit(self.entrance)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def url(self) -> str:
        return self.origin + urlsplit(self.entrance).path.rstrip("/")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@asynccontextmanager
async def site(*options: str, **variables: str) -> AsyncIterator[Site]:
    command = ["-m", "tui", *options, "--web", "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **variables}
    )
    try:
        assert process.stdout is not None
        output = (await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S)).decode()
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as visitor:
            yield Site(process, output.split()[-1], visitor)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def screen(page: aiohttp.ClientWebSocketResponse, part: str) -> str:
    text = ""
    while part not in text:
        message = await page.receive(TIMEOUT_S)
        assert message.type is aiohttp.WSMsgType.BINARY, message
        text += message.data.decode()
    return text


async def test_a_visitor_with_the_url_sees_the_app_and_nothing_is_left_after_ctrl_c(
    tmp_path: Path, control: Control
) -> None:
    path = tmp_path / "traced.sock"
    async with serve_api(control, path), site("--socket", str(path)) as server:
        async with server.visitor.get(server.entrance) as page:
            text = await page.text()
            assert page.status == 200
            (cookie,) = server.visitor.cookie_jar
            # The cookie is not sent to other servers of this host.
            assert cookie["path"] == urlsplit(server.entrance).path
            assert "data-session-websocket-url" in text
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        async with server.visitor.ws_connect(f"{server.url}/ws?width=100&height=30", origin=server.origin) as page:
            assert "read-only" in await screen(page, "read-only")
            (child,) = server.children()
            assert "--read-only" in child.cmdline()
            server.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(server.process.wait(), TIMEOUT_S) == 0
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_an_app_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    async with site("--socket", str(tmp_path / "none.sock")) as server:
        async with server.visitor.get(server.entrance) as page:
            assert page.status == 200
        async with server.visitor.ws_connect(f"{server.url}/ws", origin=server.origin) as page:
            await screen(page, "no answer")
            (child,) = server.children()
            server.process.kill()
            await asyncio.to_thread(child.wait, TIMEOUT_S)


async def test_nobody_else_gets_in(tmp_path: Path) -> None:
    async with site("--socket", str(tmp_path / "none.sock")) as server:
        parts = urlsplit(server.entrance)
        requests: list[tuple[str, dict[str, str], dict[str, str]]] = [
            (f"{server.origin}/", {}, {}),
            (f"{server.origin}/?{parts.query}", {}, {}),
            (f"{server.url}/", {}, {}),
            (f"{server.url}/?key=guess", {}, {}),
            (f"{server.url}/ws", {}, {COOKIE: "guess"}),
            (f"{server.url}/static/js/textual.js", {}, {}),
            (server.entrance, {"Host": f"evil.example:{parts.port}"}, {}),
        ]
        for url, headers, cookies in requests:
            async with server.visitor.get(url, headers=headers, cookies=cookies) as answer:
                assert answer.status == 403, url
        async with server.visitor.get(server.entrance) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await server.visitor.ws_connect(f"{server.url}/ws", origin="http://evil.example")
        assert server.children() == []


async def test_a_token_is_in_no_command_line_and_writing_is_asked_for(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        address = client._daemon.address
        async with site("--url", address, "--write", TRACED_TOKEN=OPERATOR) as server:
            async with server.visitor.get(server.entrance) as page:
                assert OPERATOR not in await page.text()
            async with server.visitor.ws_connect(f"{server.url}/ws", origin=server.origin) as page:
                text = await screen(page, "connected")
                assert "read-only" not in text
                commands = [
                    psutil.Process(server.process.pid).cmdline(),
                    *(process.cmdline() for process in server.children()),
                ]
                assert OPERATOR not in json.dumps(commands)
            for child in server.children():
                await asyncio.to_thread(child.wait, TIMEOUT_S)


@pytest.mark.optional
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
async def test_a_browser_shows_it_and_its_keys_arrive(tmp_path: Path, control: Control) -> None:
    async def check() -> None:
        path = tmp_path / "traced.sock"
        async with serve_api(control, path), site("--socket", str(path)) as server, browser(tmp_path) as tab:
            await tab.call("Network.enable")
            await tab.call("Page.navigate", url=server.entrance)
            await tab.wait_for_text("policy-checks@v1", "read-only", "Success over time")
            await tab.wait_until("document.body.classList.contains('-first-byte')")
            await tab.call("Runtime.evaluate", expression="document.querySelector('.xterm-helper-textarea').focus()")
            await tab.call("Input.insertText", text="2")
            await tab.wait_for_text("Names a method that the customer does not have.")
            await tab.call("Input.insertText", text="1")
            await tab.wait_for_text("Success over time")
            picture = await tab.stable_picture()
            assert len(picture) > 20_000  # a page that shows nothing has about 10,000 bytes
            if os.environ.get("PICTURES") == "new":
                PICTURE_PATH.write_bytes(picture)
            (child,) = server.children()
            await tab.call("Page.navigate", url="about:blank")
            await asyncio.to_thread(child.wait, TIMEOUT_S)

    await asyncio.wait_for(check(), 120)


@dataclass
class Tab:
    """A browser tab, controlled through the DevTools protocol."""

    line: aiohttp.ClientWebSocketResponse
    count: int = 0
    received: str = ""  # text of the page's WebSocket since the last match

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        self.count += 1
        request_id = self.count
        await self.line.send_json({"id": request_id, "method": method, "params": params})
        while True:
            reply = await self._receive()
            if reply.get("id") == request_id:
                assert "error" not in reply, reply
                return dict(reply["result"])

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.line.receive_json(timeout=TIMEOUT_S)
        if message.get("method") == "Network.webSocketFrameReceived":
            frame = message["params"]["response"]
            binary = frame["opcode"] == aiohttp.WSMsgType.BINARY
            self.received += base64.b64decode(frame["payloadData"]).decode() if binary else ""
        return message

    async def wait_for_text(self, *parts: str) -> None:
        """Wait until the page has received all parts, in any order, then clear the received text."""
        while not all(part in self.received for part in parts):
            await self._receive()
        self.received = ""

    async def wait_until(self, script: str) -> None:
        """Wait until the script is true in the page."""
        expression = f"(async () => {{ while (!({script})) await new Promise(go => setTimeout(go, 50)); }})()"
        await self.call("Runtime.evaluate", expression=expression, awaitPromise=True)

    async def stable_picture(self) -> bytes:
        """Return a screenshot once two in a row are equal."""
        previous, picture = b"", b"-"
        while picture != previous:
            await asyncio.sleep(0.5)
            previous, picture = picture, base64.b64decode((await self.call("Page.captureScreenshot"))["data"])
        return picture


@asynccontextmanager
async def browser(tmp_path: Path) -> AsyncIterator[Tab]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1200,800"]
    profile = tmp_path / "profile"
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *flags, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        port_file = profile / "DevToolsActivePort"
        for _ in range(400):
            if port_file.exists() and port_file.read_text().count("\n"):
                break
            await asyncio.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (page, *_) = [target for target in await answer.json() if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=2**26) as line:
                yield Tab(line)
    finally:
        process.terminate()
        await process.wait()
