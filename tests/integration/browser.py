"""Open a page in headless Chromium through its DevTools protocol, and tell what a person and a network would see."""

import asyncio
import itertools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SEEN = """
Array.from(document.querySelectorAll("svg")).map(svg => {
  const box = svg.getBoundingClientRect();
  const drawn = Array.from(svg.querySelectorAll("path, use, text, rect")).filter(shape => {
    const found = shape.getBoundingClientRect();
    return (found.width > 0 || found.height > 0) && !shape.closest("defs, clipPath");
  });
  return {title: svg.querySelector("title")?.textContent ?? "", width: box.width, height: box.height,
          drawn: drawn.length, colours: new Set(drawn.map(shape => getComputedStyle(shape).stroke)).size};
})
"""


@dataclass
class Look:
    """What one page showed: complaints of its console, addresses it asked for, its plots, whether it is too wide."""

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    plots: list[dict] = field(default_factory=list)
    text: str = ""
    too_wide: bool = False


def look(page: Path, width: int = 1280) -> Look:
    """Return what a page shows in a window of so many pixels.

    Raises:
        AssertionError: there is no Chromium; says how to install it.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, f"expected Chromium to look at {page.name}, found none of {', '.join(NAMES)}; on Debian: " \
                    "apt-get install --no-install-recommends chromium"  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                   f"--window-size={width},900", f"--user-data-dir={profile}", "--remote-debugging-port=0"]  # fmt: skip
        process = subprocess.Popen([program, *options, "about:blank"], stderr=subprocess.PIPE, text=True)
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"ws://\S+", line):
                    return asyncio.run(_look(found[0], page.resolve().as_uri()))
            raise AssertionError(f"{program} ended: {''.join(said)[-800:]}")
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


async def _look(address: str, url: str) -> Look:
    seen, numbers = Look(), itertools.count(1)
    async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:

        async def tell(method, session=None, **params):
            number = next(numbers)
            named = {"sessionId": session} if session else {}
            await socket.send_json({"id": number, "method": method, "params": params, **named})
            return await until(lambda message: message.get("id") == number)

        async def until(wanted):
            while True:
                message = await asyncio.wait_for(socket.receive_json(), 60)
                assert "error" not in message, message
                _note(message, seen)
                if wanted(message):
                    return message.get("result", {})

        async def value(expression, session):
            found = await tell("Runtime.evaluate", session, expression=expression, returnByValue=True)
            return found["result"]["value"]

        target = await tell("Target.createTarget", url="about:blank")
        attached = await tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            await tell(f"{domain}.enable", session)
        await tell("Page.navigate", session, url=url)
        await until(lambda message: message.get("method") == "Page.loadEventFired")
        seen.plots = await value(SEEN, session)
        seen.text = await value("document.body.innerText", session)
        seen.too_wide = await value("document.documentElement.scrollWidth > window.innerWidth", session)
    return seen


def _note(message: dict, seen: Look) -> None:
    method, params = message.get("method"), message.get("params", {})
    if method == "Network.requestWillBeSent":
        seen.requests.append(params["request"]["url"])
    elif method == "Runtime.exceptionThrown":
        seen.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
    elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        seen.complaints.append(str(params["args"]))
    elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        seen.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
