"""A learner's hand on the course: a real browser, from opening a notebook to moving a slider."""

import base64
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from perflab import paths
from perflab.course.form import as_text, read
from perflab.course.kernel import own_processes
from perflab.course.replay import replay_env

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]

LIVE = "00"  # as a learner measures; the rest replay, which is faster
EACH_RUN = (LIVE, "03", "06")  # the others weekly

SHOTS = paths.COURSE / "build" / "browser"
REDRAW_LIMIT_S = 1.0
RUN_LIMIT_MS = 600_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-extensions",
)
WAY_OUT = "install one (`playwright install chromium`), or set CHROMIUM to the path of one"

SERVER = {
    "ServerApp": {"open_browser": False},
    "LabApp": {"open_browser": False, "expose_app_in_browser": True},
    "IdentityProvider": {"token": "perflab"},
}
SETTINGS = {
    # Every cell is in the page, so that the test finds it; nothing is saved or fetched unasked.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "docmanager-extension/plugin": {"autosave": False},
    "apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
}
RUN_ALL = """async () => {
  const app = window.jupyterapp;
  await app.restored;
  const panel = app.shell.currentWidget;
  await panel.context.ready; await panel.sessionContext.ready;
  await app.commands.execute('notebook:run-all-cells');
}"""
IDLE = "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
FAULTS = """() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells
  .map(cell => cell.toJSON())
  .filter(cell => cell.cell_type === 'code' && String(cell.source).trim() !== '')
  .filter(cell => !(cell.metadata.tags || []).includes('raises-exception'))
  .filter(cell => cell.execution_count === null || cell.outputs.some(o => o.output_type === 'error'))
  .map(cell => [cell.source, ...cell.outputs.filter(o => o.output_type === 'error').map(o => o.evalue)])
"""
PICTURE = "box => [...box.querySelectorAll('img')].map(img => img.src).join('|')"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing: install the extra `test` of this package"
    )
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path  # where `playwright install` puts one
        program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, (*BROWSERS, own))), None)
        if not program:
            pytest.skip(f"there is no browser: {WAY_OUT}")
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # root may not use Chromium's sandbox
        chromium = driver.chromium.launch(executable_path=program, args=[*QUIET, *sandbox])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab of the tests' own, and the copy of the course that it serves."""
    folder = tmp_path_factory.mktemp("browser")
    course = folder / "course"
    for name in ("perflab", "notebooks", "data", ".jupyter"):
        shutil.copytree(paths.COURSE / name, course / name)
    env = replay_env(folder) | {"PERFLAB_BUDGET": "quick", **scratch(folder), "PYTHONPATH": str(course)}
    with own_processes(env) as own, server(course, own) as url:
        yield url, course
    shutil.rmtree(folder)


def scratch(folder: Path) -> dict[str, str]:
    """Every folder that JupyterLab writes to, below this one."""
    for name, settings in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings), "utf-8")
    names = {
        "HOME": "home",
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    for name in names.values():
        (folder / name).mkdir(exist_ok=True)
    for name in ("server", "lab"):
        (folder / "config" / f"jupyter_{name}_config.json").write_text(json.dumps(SERVER), "utf-8")
    return {variable: str(folder / name) for variable, name in names.items()}


@contextmanager
def server(course: Path, env: dict[str, str]):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = course.parent / "lab.log"
    command = [sys.executable, "-m", "perflab", "lab", f"--port={port}"]  # as `make lab` starts it
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, cwd=course, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/api/status?token=perflab", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()  # SIGINT would ask whether it is meant; own_processes ends its kernels
        process.wait()


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 90
    while True:
        assert process.poll() is None, f"JupyterLab ended: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            assert time.monotonic() < deadline, f"JupyterLab does not answer: {log.read_text()[-2000:]}"
            time.sleep(0.1)


def test_a_learner_opens_runs_predicts_and_explores(notebook, lab, browser, note, weekly):
    if not weekly and not notebook.stem.startswith(EACH_RUN):
        pytest.skip("driven in the browser weekly")
    url, course = lab
    nb = read(notebook)
    if notebook.stem.startswith(LIVE):
        code = next(cell for cell in nb.cells if cell.cell_type == "code")
        code.source = f"import os; os.environ.pop('PERFLAB_MACHINE')\n{code.source}"
    (course / "notebooks" / notebook.name).write_text(as_text(nb), "utf-8")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    try:
        run_all(page, f"{url}/lab/workspaces/{notebook.stem}/tree/notebooks/{notebook.name}?token=perflab")
        source = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "code")
        if "predict(" in source:
            lock_a_prediction(page)
        if "explore_" in source or "Explorer(" in source:
            seconds = move_a_slider(page)
            note(f"{notebook.stem} in the browser: redrawn after {max(seconds):.2f} s at most")
    finally:
        page.screenshot(path=SHOTS / f"{notebook.stem}.png")
        page.close()


def run_all(page, url):
    page.goto(url)
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=90_000)
    page.wait_for_function(IDLE, timeout=90_000)
    page.set_default_timeout(RUN_LIMIT_MS)
    page.evaluate(RUN_ALL)
    page.wait_for_function(IDLE, timeout=RUN_LIMIT_MS)
    page.set_default_timeout(30_000)
    faults = page.evaluate(FAULTS)
    assert not faults, f"cells that failed or did not run: {faults}"


def lock_a_prediction(page):
    box = page.locator(".perflab-predict").first
    box.scroll_into_view_if_needed()
    lock = box.locator(".perflab-lock").first
    before = lock.inner_text()
    lock.click()
    page.wait_for_function(
        "([button, before]) => button.disabled || button.innerText !== before",
        arg=[lock.element_handle(), before],
    )


def move_a_slider(page, presses=4):
    """Seconds from each press of an arrow key to another picture; no painted frame without one in between."""
    box = page.locator(".perflab-explorer:has(.noUi-handle)").first
    image = box.locator("img").first
    image.wait_for()
    image.scroll_into_view_if_needed()
    handle = box.locator(".noUi-handle").first
    page.wait_for_timeout(500)  # the page settles after the last cell's output
    frame, place = box.element_handle(), image.bounding_box()
    seconds = [press(page, frame, handle) for _ in range(presses)]
    with painted(page) as frames:
        for _ in range(presses):
            press(page, frame, handle)
        page.wait_for_timeout(300)
    empty = [number for number, png in enumerate(frames) if is_empty(png, place, page.viewport_size["width"])]
    assert len(frames) > presses, f"the browser painted {len(frames)} frames only"
    assert not empty, f"of {len(frames)} frames, those without a picture: {empty}"
    assert image.bounding_box() == place, "the picture moved, so that the page jumped"
    assert min(seconds) < REDRAW_LIMIT_S, f"redrawn after {seconds} s"  # others may have the core at times
    return seconds


@contextmanager
def painted(page):
    """Every frame that the browser paints, as PNG: an `img` may lack data while the old one is shown."""
    frames = []
    session = page.context.new_cdp_session(page)

    def keep(event):
        frames.append(base64.b64decode(event["data"]))
        session.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})

    session.on("Page.screencastFrame", keep)
    session.send("Page.startScreencast", {"format": "png"})
    try:
        yield frames
    finally:
        session.send("Page.stopScreencast")
        session.detach()


def is_empty(png: bytes, place: dict[str, float], width: int) -> bool:
    """Whether the frame has one plain colour where the picture belongs."""
    frame = Image.open(io.BytesIO(png)).convert("L")
    scale = frame.width / width
    left, top = place["x"] * scale, place["y"] * scale
    part = frame.crop((left, top, left + place["width"] * scale, top + place["height"] * scale))
    dark, bright = part.getextrema()
    return bright - dark < 50


def press(page, frame, handle):
    was = frame.evaluate(PICTURE)
    at, last = (float(handle.get_attribute(f"aria-value{name}")) for name in ("now", "max"))
    start = time.perf_counter()
    handle.press("ArrowLeft" if at >= last else "ArrowRight")
    page.wait_for_function(
        f"([box, was]) => {{ const now = ({PICTURE})(box); return now && now !== was; }}",
        arg=[frame, was],
        polling=5,
    )
    return time.perf_counter() - start
