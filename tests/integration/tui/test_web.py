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

from tests.integration.service.served import OPERATOR, on_tcp, served
from traced.api.control import Control
from tui.web import COOKIE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_S = 40.0
KEPT = Path(__file__).parent / "pictures" / "browser.png"  # for people to look at: fonts differ between machines


@dataclass
class Site:
    """The server, and somebody who has opened its URL."""

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
        told = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as visitor:
            yield Site(process, told.split()[-1], visitor)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def screen(page: aiohttp.ClientWebSocketResponse, part: str) -> str:
    seen = ""
    while part not in seen:
        message = await page.receive(PATIENCE_S)
        assert message.type is aiohttp.WSMsgType.BINARY, message
        seen += message.data.decode()
    return seen


async def test_a_visitor_with_the_url_sees_the_app_and_nothing_is_left_after_ctrl_c(
    tmp_path: Path, control: Control
) -> None:
    path = tmp_path / "traced.sock"
    async with served(control, path), site("--socket", str(path)) as here:
        async with here.visitor.get(here.entrance) as page:
            text = await page.text()
            assert page.status == 200
            (cookie,) = here.visitor.cookie_jar
            assert cookie["path"] == urlsplit(here.entrance).path  # no other server of this host is sent it
            assert "data-session-websocket-url" in text
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        async with here.visitor.ws_connect(f"{here.url}/ws?width=100&height=30", origin=here.origin) as page:
            assert "read-only" in await screen(page, "read-only")
            (child,) = here.children()
            assert "--read-only" in child.cmdline()
            here.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(here.process.wait(), PATIENCE_S) == 0
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_an_app_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    async with site("--socket", str(tmp_path / "none.sock")) as here:
        async with here.visitor.get(here.entrance) as page:
            assert page.status == 200
        async with here.visitor.ws_connect(f"{here.url}/ws", origin=here.origin) as page:
            await screen(page, "no answer")
            (child,) = here.children()
            here.process.kill()
            await asyncio.to_thread(child.wait, PATIENCE_S)


async def test_nobody_else_gets_in(tmp_path: Path) -> None:
    async with site("--socket", str(tmp_path / "none.sock")) as here:
        parts = urlsplit(here.entrance)
        asked: list[tuple[str, dict[str, str], dict[str, str]]] = [
            (f"{here.origin}/", {}, {}),
            (f"{here.origin}/?{parts.query}", {}, {}),
            (f"{here.url}/", {}, {}),
            (f"{here.url}/?key=guess", {}, {}),
            (f"{here.url}/ws", {}, {COOKIE: "guess"}),
            (f"{here.url}/static/js/textual.js", {}, {}),
            (here.entrance, {"Host": f"evil.example:{parts.port}"}, {}),
        ]
        for url, headers, cookies in asked:
            async with here.visitor.get(url, headers=headers, cookies=cookies) as answer:
                assert answer.status == 403, url
        async with here.visitor.get(here.entrance) as answer:
            assert answer.status == 200
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await here.visitor.ws_connect(f"{here.url}/ws", origin="http://evil.example")
        assert here.children() == []


async def test_a_token_is_in_no_command_line_and_writing_is_asked_for(control: Control) -> None:
    async with on_tcp(control, OPERATOR) as client:
        where = client._daemon.address
        async with site("--url", where, "--write", TRACED_TOKEN=OPERATOR) as here:
            async with here.visitor.get(here.entrance) as page:
                assert OPERATOR not in await page.text()
            async with here.visitor.ws_connect(f"{here.url}/ws", origin=here.origin) as page:
                shown = await screen(page, "connected")
                assert "read-only" not in shown
                commands = [psutil.Process(here.process.pid).cmdline(), *(one.cmdline() for one in here.children())]
                assert OPERATOR not in json.dumps(commands)
            for child in here.children():
                await asyncio.to_thread(child.wait, PATIENCE_S)


@pytest.mark.optional
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
async def test_a_browser_shows_it_and_its_keys_arrive(tmp_path: Path, control: Control) -> None:
    async def look() -> None:
        path = tmp_path / "traced.sock"
        async with served(control, path), site("--socket", str(path)) as here, browser(tmp_path) as tab:
            await tab.ask("Network.enable")
            await tab.ask("Page.navigate", url=here.entrance)
            await tab.arrives("policy-checks@v1", "read-only", "Success over time")
            await tab.until("document.body.classList.contains('-first-byte')")
            await tab.ask("Runtime.evaluate", expression="document.querySelector('.xterm-helper-textarea').focus()")
            await tab.ask("Input.insertText", text="2")
            await tab.arrives("Names a method that the customer does not have.")
            await tab.ask("Input.insertText", text="1")
            await tab.arrives("Success over time")
            picture = await tab.at_rest()
            assert len(picture) > 20_000  # a page that shows nothing has about 10,000 bytes
            if os.environ.get("PICTURES") == "new":
                KEPT.write_bytes(picture)
            (child,) = here.children()
            await tab.ask("Page.navigate", url="about:blank")
            await asyncio.to_thread(child.wait, PATIENCE_S)

    await asyncio.wait_for(look(), 120)


@dataclass
class Tab:
    """A tab of the browser, spoken to in its DevTools protocol."""

    line: aiohttp.ClientWebSocketResponse
    count: int = 0
    seen: str = ""  # what its page's WebSocket received, since it was last looked for

    async def ask(self, method: str, **given: object) -> dict[str, Any]:
        self.count += 1
        asked = self.count
        await self.line.send_json({"id": asked, "method": method, "params": given})
        while True:
            told = await self._told()
            if told.get("id") == asked:
                assert "error" not in told, told
                return dict(told["result"])

    async def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = await self.line.receive_json(timeout=PATIENCE_S)
        if told.get("method") == "Network.webSocketFrameReceived":
            frame = told["params"]["response"]
            binary = frame["opcode"] == aiohttp.WSMsgType.BINARY
            self.seen += base64.b64decode(frame["payloadData"]).decode() if binary else ""
        return told

    async def arrives(self, *parts: str) -> None:
        """The page is sent all of these, in any order; what it was sent before is forgotten then."""
        while not all(part in self.seen for part in parts):
            await self._told()
        self.seen = ""

    async def until(self, script: str) -> None:
        """Until the page's script is true there."""
        waiting = f"(async () => {{ while (!({script})) await new Promise(go => setTimeout(go, 50)); }})()"
        await self.ask("Runtime.evaluate", expression=waiting, awaitPromise=True)

    async def at_rest(self) -> bytes:
        """The picture, once it has stopped to change."""
        before, found = b"", b"-"
        while found != before:
            await asyncio.sleep(0.5)
            before, found = found, base64.b64decode((await self.ask("Page.captureScreenshot"))["data"])
        return found


@asynccontextmanager
async def browser(tmp_path: Path) -> AsyncIterator[Tab]:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1200,800"]
    profile = tmp_path / "profile"
    process = await asyncio.create_subprocess_exec(
        str(CHROMIUM), *flags, f"--user-data-dir={profile}", "about:blank", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        told = profile / "DevToolsActivePort"
        for _ in range(400):
            if told.exists() and told.read_text().count("\n"):
                break
            await asyncio.sleep(0.1)
        port = told.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (page, *_) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=2**26) as line:
                yield Tab(line)
    finally:
        process.terminate()
        await process.wait()
