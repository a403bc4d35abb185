"""The interface in a browser: who gets in, what arrives, and that nothing is left when it ends."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from tests.integration.service.served import OPERATOR, on_tcp, served
from traced.service.control import Control
from tui.web import COOKIE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_S = 40.0


@dataclass
class Site:
    """The server, and somebody who has opened its URL."""

    process: asyncio.subprocess.Process
    entrance: str
    visitor: aiohttp.ClientSession

    @property
    def url(self) -> str:
        parts = urlsplit(self.entrance)
        return f"{parts.scheme}://{parts.netloc}"

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


def test_a_visitor_with_the_url_sees_the_app_and_nothing_is_left_after_ctrl_c(tmp_path: Path, control: Control) -> None:
    async def visit() -> None:
        path = tmp_path / "traced.sock"
        async with served(control, path), site("--socket", str(path)) as here:
            async with here.visitor.get(here.entrance) as page:
                text = await page.text()
                assert page.status == 200
                assert "data-session-websocket-url" in text
                assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            async with here.visitor.ws_connect(f"{here.url}/ws?width=100&height=30", origin=here.url) as page:
                assert "read-only" in await screen(page, "read-only")
                (child,) = here.children()
                assert "--read-only" in child.cmdline()
                here.process.send_signal(signal.SIGINT)
                assert await asyncio.wait_for(here.process.wait(), PATIENCE_S) == 0
            assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    asyncio.run(visit())


def test_nobody_else_gets_in(tmp_path: Path) -> None:
    async def knock() -> None:
        async with site("--socket", str(tmp_path / "none.sock")) as here:
            port = urlsplit(here.url).port
            asked = [
                ("/", {}, {}),
                ("/?key=guess", {}, {}),
                ("/ws", {}, {COOKIE.format(port=port): "guess"}),
                ("/static/js/textual.js", {}, {}),
                (f"/{here.entrance.partition('/?')[2] and '?' + here.entrance.partition('/?')[2]}",
                 {"Host": f"evil.example:{port}"}, {}),
            ]  # fmt: skip
            for path, headers, cookies in asked:
                async with here.visitor.get(f"{here.url}{path}", headers=headers, cookies=cookies) as answer:
                    assert answer.status == 403, path
            async with here.visitor.get(here.entrance) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await here.visitor.ws_connect(f"{here.url}/ws", origin="http://evil.example")
            assert here.children() == []

    asyncio.run(knock())


def test_a_token_is_in_no_command_line_and_writing_is_asked_for(control: Control) -> None:
    async def visit() -> None:
        async with on_tcp(control, OPERATOR) as client:
            where = client._daemon.where
            async with site("--url", where, "--write", TRACED_TOKEN=OPERATOR) as here:
                async with here.visitor.get(here.entrance) as page:
                    assert OPERATOR not in await page.text()
                async with here.visitor.ws_connect(f"{here.url}/ws", origin=here.url) as page:
                    shown = await screen(page, "connected")
                    assert "read-only" not in shown
                    commands = [psutil.Process(here.process.pid).cmdline(), *(one.cmdline() for one in here.children())]
                    assert OPERATOR not in json.dumps(commands)
                for child in here.children():
                    await asyncio.to_thread(child.wait, PATIENCE_S)

    asyncio.run(visit())


@pytest.mark.optional
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_a_browser_shows_it(tmp_path: Path, control: Control) -> None:
    async def look() -> None:
        path = tmp_path / "traced.sock"
        async with served(control, path), site("--socket", str(path)) as here, browser(tmp_path) as tab:
            await tab.ask("Page.navigate", url=here.entrance)
            script = "document.body && document.body.classList.contains('-first-byte')"
            await tab.until(script)
            await asyncio.to_thread(wait_for_child, here)
            picture = await tab.picture(tmp_path / "overview.png")
            assert len(picture) > 20_000  # a page that shows nothing has about 10,000 bytes

    asyncio.run(asyncio.wait_for(look(), 120))


def wait_for_child(here: Site) -> None:
    assert here.children()


@dataclass
class Tab:
    """A tab of the browser, spoken to in its DevTools protocol."""

    line: aiohttp.ClientWebSocketResponse
    count: int = 0

    async def ask(self, method: str, **given: object) -> dict[str, object]:
        self.count += 1
        await self.line.send_json({"id": self.count, "method": method, "params": given})
        while True:
            told = await self.line.receive_json(timeout=PATIENCE_S)
            if told.get("id") == self.count:
                assert "error" not in told, told
                return told["result"]

    async def until(self, script: str) -> None:
        for _ in range(400):
            found = await self.ask("Runtime.evaluate", expression=script)
            if found["result"].get("value"):  # type: ignore[attr-defined]
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never: {script}")

    async def picture(self, into: Path) -> bytes:
        """What is to be seen once it is more than an empty page."""
        import base64

        for _ in range(100):
            found = await self.ask("Page.captureScreenshot")
            into.write_bytes(base64.b64decode(str(found["data"])))
            if into.stat().st_size > 20_000:
                break
            await asyncio.sleep(0.2)
        return into.read_bytes()


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
