"""A headless Chromium from Debian, driven over its DevTools protocol: for tests that click where a user does.

    with chromium.running() as browser:
        page = browser.open("http://127.0.0.1:8080/")
        page.fill("input[name=host]", "rabbit1")
        page.click("button", text="Save")
        page.wait_for("document.body.innerText.includes('saved')")
        page.screenshot(Path("saved.png"))

Whatever is looked for is waited for. Clicks and keys are real ones, sent to where the element is.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from websockets.sync.client import ClientConnection, connect

from services import packages, process

#: It draws no window, and takes two thirds of the CPU of "chromium --headless=new".
PROGRAM = "/usr/bin/chromium-headless-shell"
#: Seconds for which an element is waited for.
PATIENCE = 120.0
#: The first visible element of a selector that has a text (its own, or its value) in it, brought into view.
_FIND = """((page, selector, text) => {
  for (const found of page.querySelectorAll(selector)) {
    const box = found.getBoundingClientRect();
    const said = (found.innerText || found.value || found.getAttribute('aria-label') || '');
    if (box.width && box.height && (text === null || said.includes(text))) {
      found.scrollIntoView({block: 'center', behavior: 'instant'});
      return found;
    }
  }
  return null;
})"""


class Page:
    """A tab. ``problems`` are the errors that its scripts and requests had so far.

    While ``frame`` is the selector of a frame (of the same origin), what is looked for is looked for in there: by
    ``click`` and ``fill``, and by scripts under the name ``page``, which is the document.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.problems: list[str] = []
        self.frame: str | None = None
        self._socket = socket
        self._number = 0
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def at_first(self, script: str) -> None:
        """Run a script in each document from now on, before those of the document."""
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def go(self, url: str, *, complete: bool = True) -> None:
        """Open another address, and wait until its document is there.

        :param complete: with all that it loads; otherwise it may be just beginning.
        """
        self._call("Page.navigate", url=url)
        if complete:
            self.wait_for("document.readyState === 'complete'")

    def log_in(self, user: str, password: str) -> None:
        """Fill in the form of Airflow's login, as a person does."""
        self.fill("input[name=username]", user)
        self.fill("input[name=password]", password)
        self.click("button[type=submit]")
        self.wait_for("!location.pathname.includes('/auth/')")

    def forget_files(self) -> None:
        """Empty the browser's cache."""
        self._call("Network.enable")
        self._call("Network.clearBrowserCache")

    def evaluate(self, script: str) -> Any:
        """Return what an expression comes to; a promise is waited for.

        Raises RuntimeError with what the script threw.
        """
        expression = f"(async () => {{ const page = {self._document()}; return ({script}); }})()"
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", "a script failed"))
        return found["result"].get("value")

    def load(self, script: str) -> Any:
        """Run a script beside those of the document, whatever its content security policy allows; return its value."""
        tree = self._call("Page.getFrameTree")["frameTree"]
        frame = tree["frame"] if self.frame is None else tree["childFrames"][0]["frame"]
        world = self._call("Page.createIsolatedWorld", frameId=frame["id"])["executionContextId"]
        found = self._call(
            "Runtime.evaluate", expression=script, contextId=world, awaitPromise=True, returnByValue=True
        )
        return found["result"].get("value")

    def wait_for(self, script: str, *, seconds: float = PATIENCE, every: float = 0.1) -> Any:
        """Wait until an expression is true, and return it; raises TimeoutError with the page's text."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # while one document follows another there is none
            with contextlib.suppress(RuntimeError):
                if found := self.evaluate(script):
                    return found
            time.sleep(every)
        raise TimeoutError(f"not within {seconds:.0f} s: {script}\nproblems: {self.problems}\n{self.text()}")

    def text(self) -> str:
        """Return what the page says."""
        return str(self.evaluate("page.body.innerText"))

    def click(self, selector: str, *, text: str | None = None) -> None:
        """Click the first visible element of a CSS selector, with this text in it."""
        with self.hold(selector, text=text):
            pass

    @contextlib.contextmanager
    def hold(self, selector: str, *, text: str | None = None) -> Iterator[None]:
        """Keep the mouse button pressed on an element until the block ends."""
        place = None
        # as a person does: the pointer is there, and so is still the element, before the button is pressed
        while place is None or place != self._place(selector, text):
            place = self._resting_place(selector, text)
            x, y = place
            self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        button = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type="mousePressed", buttons=1, **button)
        yield
        self._call("Input.dispatchMouseEvent", type="mouseReleased", **button)

    def fill(self, selector: str, value: str) -> None:
        """Type into a field, in place of what stands there."""
        self.click(selector)
        self.evaluate("page.activeElement.select && page.activeElement.select()")
        self.press("Backspace")
        self.write(value)

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key, such as Enter or Escape."""
        codes = {"Backspace": 8, "Tab": 9, "Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowDown": 40, "/": 191}
        # only what makes a text presses a button
        down = {"type": "keyDown", "text": "\r"} if key == "Enter" else {"type": "rawKeyDown"}
        for event in (down, {"type": "keyUp"}):
            self._call("Input.dispatchKeyEvent", **event, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, in CSS pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        """Save what is visible as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _resting_place(self, selector: str, text: str | None) -> tuple[float, float]:
        """Wait for an element that does not move, and return its middle."""
        before = None
        deadline = time.monotonic() + PATIENCE
        while (now := self._place(selector, text)) is None or now != before:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not within {PATIENCE:.0f} s: {selector} {text or ''}\nproblems: {self.problems}\n{self.text()}"
                )
            before = now
            time.sleep(0.1)
        return now

    def _place(self, selector: str, text: str | None) -> tuple[float, float] | None:
        """Return the middle of an element; None: it is not there."""
        around = "{ x: 0, y: 0 }"
        if self.frame is not None:
            around = f"document.querySelector({json.dumps(self.frame)}).getBoundingClientRect()"
        found = f"{_FIND}(page, {json.dumps(selector)}, {json.dumps(text)})?.getBoundingClientRect()"
        # while one document follows another there is none
        with contextlib.suppress(RuntimeError):
            middle = "box && [around.x + box.x + box.width / 2, around.y + box.y + box.height / 2]"
            if place := self.evaluate(f"((box, around) => {middle})({found}, {around})"):
                return place[0], place[1]
        return None

    def _document(self) -> str:
        return "document" if self.frame is None else f"document.querySelector({json.dumps(self.frame)}).contentDocument"

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            said = json.loads(self._socket.recv(timeout=180))
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']['message']}")
                return dict(said["result"])
            self._note(said)

    def _note(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(given["exceptionDetails"].get("exception", {}).get("description", "a script failed"))
        elif event["method"] == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.problems.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")


class Browser:
    """A running Chromium, with no cookies and no cache but its own, and one tab at a time."""

    def __init__(self, port: int, stack: contextlib.ExitStack) -> None:
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}")
        self._stack = stack
        self._tab: str | None = None
        stack.callback(self._http.close)

    def open(self, url: str) -> Page:
        """Open an address in a new tab, and close the one before: its scripts would go on."""
        before, self._tab = self._tab, None
        if before is not None:
            self._http.get(f"/json/close/{before}").raise_for_status()
        tab = self._http.put(f"/json/new?{quote('about:blank')}").raise_for_status().json()
        # without pings: a browser that has much to do is slow to answer them
        connection = connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None, ping_interval=None)
        socket = self._stack.enter_context(connection)
        self._tab = tab["id"]
        page = Page(socket)
        page.go(url)
        return page


@contextlib.contextmanager
def running(*, width: int = 1280, height: int = 1600) -> Iterator[Browser]:
    """Run a browser until the block ends; installed from Debian when it is missing."""
    packages.require(PROGRAM, "chromium-headless-shell")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)))
        command = [
            PROGRAM,
            "--remote-debugging-port=0",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},{height}",
            "--lang=en-US",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            # its sandbox does not run as root
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "about:blank",
        ]
        log, port = folder / "chromium.log", folder / "profile" / "DevToolsActivePort"
        stack.enter_context(process.running(command, log=log, env={"HOME": str(folder)}))
        process.wait_for("Chromium", port.exists, seconds=60, log=log)
        process.wait_for("Chromium's port", lambda: port.read_text().count("\n"), seconds=10, log=log)
        yield Browser(int(port.read_text().split()[0]), stack)
