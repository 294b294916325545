"""A headless Chromium, driven through chromedriver's HTTP interface (W3C WebDriver)."""

import os
import re
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
"""Keys as WebDriver spells them."""

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The name of an element's id in WebDriver's JSON."""

WAIT_S = 15.0

UNTIL = """
const done = arguments[0], holds = () => (CONDITION);
const observer = new MutationObserver(() => { if (holds()) { observer.disconnect(); done(true); } });
observer.observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
if (holds()) { observer.disconnect(); done(true); }
"""
"""Waits for a condition, looking again whenever the document has changed."""


class Browser:
    """One window. Every method blocks; the page runs meanwhile."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._session = session

    def open(self, url: str) -> None:
        """Goes to a page, and waits until it is loaded. What was complained of before is forgotten."""
        self._post("/url", url="about:blank")  # the page before may still ask a server that is gone
        self.complaints()
        self._post("/url", url=url)

    def press(self, keys: str, at: str = ":focus") -> None:
        """Types into an element: the one that has the focus, where none is named."""
        self._post(f"/element/{self._find(at)}/value", text=keys)

    def click(self, at: str) -> None:
        """Clicks an element, as a mouse would: where something covers it, this fails."""
        self._post(f"/element/{self._find(at)}/click")

    def value(self, expression: str) -> Any:  # Any: what JSON holds
        """Gives what some JavaScript evaluates to."""
        return self._post("/execute/sync", script=f"return {expression}", args=[])

    def wait(self, condition: str) -> None:
        """Waits until some JavaScript holds; fails with what the page shows if it never does."""
        try:
            self._post("/execute/async", script=UNTIL.replace("CONDITION", condition), args=[])
        except AssertionError as error:
            shown = self.value("document.body.innerText")
            raise AssertionError(
                f"never came true: {condition}\n{error}\nthe page shows:\n{shown}"
            ) from error

    def prefer(self, color_scheme: str) -> None:
        """Sets what the system prefers, "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": color_scheme}]
        self._post("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def complaints(self) -> list[str]:
        """Gives what the browser has complained of since last asked: failed loads, errors, policy."""
        return [f"{entry['level']}: {entry['message']}" for entry in self._post("/se/log", type="browser")]

    def _find(self, selector: str) -> str:
        return self._post("/element", using="css selector", value=selector)[ELEMENT]

    def _post(self, path: str, **body: Any) -> Any:  # Any: what JSON holds
        response = self._driver.post(f"/session/{self._session}{path}", json=body)
        assert response.is_success, response.json()["value"]["message"]
        return response.json()["value"]


@contextmanager
def running_browser() -> Generator[Browser]:
    """Runs a browser round a block."""
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.fail("there is no chromedriver; apt-get install chromium chromium-driver")
    options = ["--headless=new", "--window-size=1200,900", "--disable-gpu", "--disable-dev-shm-usage"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's sandbox refuses to run as root
    capabilities = {
        "browserName": "chrome",
        "goog:chromeOptions": {"args": options},
        "goog:loggingPrefs": {"browser": "ALL"},
        "timeouts": {"script": int(WAIT_S * 1000)},
    }
    with (
        subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{_port_of(process)}", timeout=2 * WAIT_S) as client,
    ):
        try:
            body = {"capabilities": {"alwaysMatch": capabilities}}
            session: str = client.post("/session", json=body).json()["value"]["sessionId"]
            try:
                yield Browser(client, session)
            finally:
                client.delete(f"/session/{session}").raise_for_status()  # else the browser goes on alone
        finally:
            process.terminate()


def _port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if started := re.search(r"started successfully on port (\d+)", line):
            return int(started[1])
    raise AssertionError(f"chromedriver ended with {process.wait()}")
