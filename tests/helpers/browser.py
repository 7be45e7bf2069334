"""A headless Chromium from the npm registry for tests of pages, driven through a pipe.

`python -m tests.helpers.browser FOLDER` installs it there. @sparticuz/chromium packs it with all libraries that are not
common; `make test` runs this command wherever npm is installed.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
HERE = Path(sys.prefix) / "chromium"  # in the virtual environment of the tests
UNPACK = """
const fs = require("fs"), unpacked = require("zlib").brotliDecompressSync;
for (const name of process.argv.slice(1)) fs.writeFileSync(name.slice(0, -3), unpacked(fs.readFileSync(name)));
"""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
)


def path() -> str | None:
    """The Chromium program: the installed package's, or the machine's."""
    if (HERE / "chromium").is_file():
        return str(HERE / "chromium")
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def install(folder: Path) -> None:
    """Downloads the package of the version above and unpacks it."""
    folder.mkdir(parents=True, exist_ok=True)
    file_name = subprocess.check_output(["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"], cwd=folder, text=True)
    archive = folder / file_name.strip()
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{archive} has SHA-256 {digest}, and not {SHA256}: it is another file than the tests know")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    names = ("chromium", "swiftshader.tar", "al2023.tar", "fonts.tar")
    packed = [folder / "package" / "bin" / f"{name}.br" for name in names]
    subprocess.run(["node", "-e", UNPACK, *map(str, packed)], check=True)
    for name in names[1:]:
        with tarfile.open(packed[0].with_name(name)) as files:
            files.extractall(folder, filter="data")
    shutil.move(packed[0].with_suffix(""), folder / "chromium")
    (folder / "chromium").chmod(0o755)
    shutil.rmtree(folder / "package")
    archive.unlink()


class Browser:
    """One browser with one page, closed at the end of a `with`; its messages are separated by null bytes in a pipe."""

    def __init__(self, folder: Path):
        program = path()
        if program is None:
            raise RuntimeError(f"no Chromium; python -m tests.helpers.browser {HERE} installs one (needs npm, node)")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [*FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "about:blank"]
        libraries = {"LD_LIBRARY_PATH": f"{HERE / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}', program, *flags],
            pass_fds=(to_browser, from_browser),
            env=os.environ | libraries,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser), os.close(from_browser)
        self._ids, self._rest, self._session = itertools.count(1), b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write), os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, file: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file in a window of this size and waits until it is drawn."""
        self.events.clear()
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait_until("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """Evaluates a JavaScript expression in the page and awaits its value."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, expression: str, seconds: float = 30) -> None:
        """Waits for a JavaScript expression to become true."""
        end = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < end, f"not true after {seconds} s: {expression}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """Presses a key without text, such as ArrowRight or Tab."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def point(self, selector: str, click: bool = False) -> None:
        """Moves the pointer to the middle of an element, or clicks there."""
        x, y = self.ask(MIDDLE % json.dumps(selector))
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, file: Path, whole: bool = False) -> None:
        """Writes the window, or the whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors of scripts and of the security policy so far, and all loads except the page itself."""
        self.call("Runtime.evaluate", expression="0")
        complaints = []
        for event in self.events:
            name, params = event.get("method"), event.get("params", {})
            if name == "Runtime.exceptionThrown":
                complaints.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            elif name == "Log.entryAdded" and params["entry"]["level"] == "error":
                complaints.append(params["entry"]["text"])
            elif name == "Network.requestWillBeSent" and params.get("type") != "Document":
                complaints.append(f"loads {params['request']['url']}")
            elif name == "Page.javascriptDialogOpening":
                complaints.append(f"says {params['message']}")
        return complaints


MIDDLE = """(() => {
  const element = document.querySelector(%s);
  element.scrollIntoView({block: "center"});
  const box = element.getClientRects()[0];
  return [box.x + box.width / 2, box.y + box.height / 2];
})()"""
KEYS = {"Tab": 9, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36}
KEYS |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}

if __name__ == "__main__":
    install(Path(sys.argv[1]))
