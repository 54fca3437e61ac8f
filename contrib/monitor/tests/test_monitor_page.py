"""The page holds all it needs, and a browser draws what was recorded, in dark and in light."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from importlib import resources

import pytest
from click.testing import CliRunner

from accel_monitor import monitor, sampling
from accel_monitor.columns import Curve, Point
from accel_monitor.commands import report
from accel_monitor.page import _curve, page
from accel_monitor.records import Record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom")
SETTINGS += ("--virtual-time-budget=8000", "--enable-logging=stderr")
WATCH = (
    "<script>window.errors = []; addEventListener('error', (e) => errors.push(String(e.message)));</script>"
)
LOOK = """<script>
const style = (element, what) => getComputedStyle(element)[what];
const found = {
  errors, loaded: performance.getEntriesByType("resource").map((each) => each.name),
  ground: style(document.body, "backgroundColor"),
  card: style(document.querySelector(".card"), "backgroundColor"),
  inks: [...document.querySelectorAll("h1, h2, h3, th, td, summary, .note")]
    .map((each) => style(each, "color")),
  axes: [...document.querySelectorAll(".xtick text, .ytick text")].map((each) => style(each, "fill")),
  lines: [...document.querySelectorAll(".js-line")].map((each) => style(each, "stroke")),
  drawn: {},
};
for (const plot of document.querySelectorAll(".plot[data-name]"))
  found.drawn[plot.dataset.name] = plot.data.map(({ x, y }) => ({ x: [...x], y: [...y] }));
found.ranges = Object.fromEntries([...document.querySelectorAll(".plot[data-name]")]
  .map((plot) => [plot.dataset.name, plot._fullLayout.yaxis.range]));
found.shapes = document.querySelector(".plot[data-name]").layout.shapes.map((each) => each.x0);
found.marks = control("marks").parentElement.textContent.trim();
control("smoothing").value = 0.9;
control("log").checked = true;
control("axis").value = "t";
control("controls").dispatchEvent(new Event("input"));
document.querySelector("#legend button").click();
found.after = document.querySelector(".plot[data-name='logged loss']").data.length;
const place = document.createElement("pre");
place.id = "found";
place.textContent = JSON.stringify(found);
document.body.append(place);
</script>"""


@pytest.fixture(scope="module")
def html(resumed, whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "of runs" / "report.html"
    done = CliRunner().invoke(
        report, [str(resumed[0]), str(whole[0]), "-o", str(path)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return path.read_text("utf-8")


def test_a_missing_package_is_named_with_the_command_that_installs_it(whole, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.delitem(sys.modules, "plotly.offline", raising=False)
    done = CliRunner().invoke(report, [str(whole[0]), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 1
    assert "needs the package plotly" in done.output
    assert "pip install plotly" in done.output


def data(html):
    return json.loads(
        re.search(r'<script type="application/json" id="runs">(.*?)</script>', html, re.DOTALL)[1]
    )


def test_the_page_has_each_logged_loss_of_a_run(html, whole):
    first, second = data(html)

    assert second["curves"]["logged loss"]["x"] == list(range(1, 31))
    assert second["curves"]["logged loss"]["y"] == list(whole[1].values())
    assert first["curves"]["logged loss"]["x"] == list(range(1, 31))
    assert [mark["kind"] for mark in first["marks"]].count("checkpoint") == 1
    assert [mark["kind"] for mark in first["marks"]].count("restart") == 1
    assert len(first["lives"]) == 2


def test_the_page_begins_with_what_was_logged_and_samples_have_the_titles_people_use(html):
    titles = re.findall(r"<h3>(.*?)</h3>", html)

    assert titles[:6] == ["loss", "step time", "samples/s", "tokens/s", "learning rate", "memory"]
    assert html.index('id="logged"') < html.index("<h2>Samples</h2>") < html.index("Where the time went")


def test_losses_come_before_other_values_that_were_logged():
    record = Record("a.jsonl", "a")
    record.add({"kind": "run", "time": 1.0, "step": 0})
    values = {"accuracy": 0.5, "grad_norm": 1.0, "train/loss": 2.0}
    record.add({"kind": "log", "time": 2.0, "step": 1, "given": 1, "values": values})

    assert re.findall(r"<h3>(.*?)</h3>", page([record]))[:3] == ["train/loss", "accuracy", "grad_norm"]


def test_the_page_says_what_ran_what_differs_and_what_was_warned(html):
    for text in ("settings.lr", "ten are done", "profile_0.json", "explain()", "Differences of settings"):
        assert text in html
    assert "sk-secret" not in html


def test_the_page_asks_no_server_for_anything(html):
    around = html.replace(html[html.index("<script>") :], "")

    assert not re.search(r'(src|href)="(?!file:)', around)
    assert "@import" not in around


def test_no_text_of_a_record_becomes_markup():
    record = Record("a.jsonl", "</script><b>x</b>")
    evil = "<img src=x onerror=alert(1)></script>"
    record.add(
        {
            "kind": "run",
            "time": 1.0,
            "step": 0,
            "script": evil,
            "explain": [evil],
            "config": [[evil, evil, evil]],
        }
    )
    record.add({"kind": "warning", "time": 2.0, "step": 1, "text": evil})
    record.add({"kind": "log", "time": 2.0, "step": 1, "given": None, "values": {evil: 1.0}})

    html = page([record])
    assert "<img" not in html.replace(html[html.rindex("<script>") :], "").partition("plotly.js")[0]
    assert data(html)[0]["name"] == "</script><b>x</b>"


def test_a_long_curve_keeps_its_peaks():
    odd, points = {54_321: 99.0, 12_345: float("nan")}, Curve()
    for step in range(100_000):
        points.add(Point(step, step, float(step), odd.get(step, 1.0)))
    curve = _curve(points, 0.0)

    assert len(curve["x"]) <= 4000
    assert max(curve["means"]) < 1.0 + 99.0 / 74  # smoothing goes by means, not by peaks
    assert (54_321, 99.0) in zip(curve["x"], curve["y"], strict=True)
    assert (12_345, None) in zip(curve["x"], curve["y"], strict=True)


def test_many_warnings_are_no_longer_page():
    record = Record("a.jsonl", "a")
    record.add({"kind": "run", "time": 1.0, "step": 0})
    for step in range(1000):
        record.add({"kind": "warning", "time": 2.0, "step": step, "text": "overflow"})
        record.add({"kind": "warning", "time": 2.0, "step": step, "text": f"overflow in step {step}"})

    html = page([record])
    assert "steps 0 to 999, 1000 times" in html
    assert "801 later texts of warnings" in html
    assert len([mark for mark in data(html)[0]["marks"] if mark["kind"] == "warning"]) == 200


# -- in a browser --------------------------------------------------------------------------------------


def seen(run_command, html, folder, scheme):
    """What a browser shows of the page: 0 is dark, 1 is light."""
    path = folder / "page.html"
    path.write_text(html.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{LOOK}</body>"), "utf-8")
    options = (f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}")
    done = run_command(
        [BROWSER, *SETTINGS, *options, path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, re.findall(r".*CONSOLE.*", done.stderr)
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)[1]
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def contrast(ink, ground):
    """WCAG's ratio of the luminances of two colours, such as rgb(1, 2, 3)."""

    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(ink), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("scheme", "is_dark"), [(0, True), (1, False)], ids=["dark", "light"])
def test_a_browser_draws_each_logged_loss_without_an_error_and_readably(
    html, whole, tmp_path, scheme, is_dark, run_command
):
    found = seen(run_command, html, tmp_path, scheme)

    assert found["errors"] == []
    assert found["loaded"] == []
    first, second = found["drawn"]["logged loss"]
    assert second["y"] == list(whole[1].values())
    assert first["x"] == second["x"] == list(range(1, 31))
    assert {"lr", "samples_per_second", "items_per_second"} <= set(found["drawn"])
    assert found["after"] == 2  # one run, as it is and smoothed

    assert (contrast(found["ground"], "rgb(0, 0, 0)") < 2) == is_dark
    assert min(contrast(ink, found["ground"]) for ink in found["inks"]) >= 4.5
    assert len(found["axes"]) > 20
    assert min(contrast(ink, found["card"]) for ink in found["axes"]) >= 4.5
    assert min(contrast(ink, found["card"]) for ink in found["lines"]) >= 3


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_long_run_is_drawn_as_means_among_extremes_with_marks_that_can_be_told_apart(tmp_path, run_command):
    record = Record("a.jsonl", "long")
    for line in long_run():
        record.add(line)
    found = seen(run_command, page([record]), tmp_path, 1)

    peaks, means = found["drawn"]["logged loss"]
    assert max(peaks["y"]) == 9.0
    assert len(means["y"]) == len(peaks["y"])
    assert max(means["y"]) < 3
    assert len(found["drawn"]["lr"]) == 1  # a short one is as it is
    assert found["ranges"]["lr"] == pytest.approx([0.0005, 0.0015])
    assert found["ranges"]["seconds"][0] == 0
    assert found["shapes"] == [4500]  # the restart, and none of so many checkpoints
    assert found["marks"] == "restarts (checkpoints: below)"
    assert found["errors"] == []


def long_run():
    yield {"kind": "run", "time": 1.0, "step": 0}
    for step in range(1, 9001):
        yield {
            "kind": "log",
            "time": 1.0 + step,
            "step": step,
            "given": step,
            "values": {"loss": 9.0 if step == 777 else 1.0 + step % 2},
        }
        if step % 100 == 0:
            yield {
                "kind": "step",
                "time": 1.0 + step,
                "step": step,
                "lr": 0.001,
                "seconds": 0.1 + step / 1e6,
            }
            yield {"kind": "checkpoint", "time": 1.0 + step, "step": step, "folder": "x", "seconds": 0.1}
        if step == 4500:
            yield {"kind": "restart", "time": 1.0 + step, "step": step}


def test_each_part_of_a_step_that_the_record_names_has_a_bar_and_a_colour():
    source = inspect.getsource(sampling) + inspect.getsource(monitor)
    parts = {
        *re.findall(r'[.]mark[(]"(\w+)"[)]', source),
        *sampling.BEGUN,
        *sampling.BEGUN.values(),
        sampling.WAITS,
    }
    page = resources.files("accel_monitor").joinpath("page")
    script, style = (page.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))

    assert parts >= {"data", "forward", "backward", "optimizer"}
    assert parts <= set(re.findall(r'"(\w+)"', re.search("const PHASES = (.*);", script)[1]))
    colours = dict(re.findall(r"(\w+): (\d)", re.search("const PHASE_COLOURS = (.*);", script)[1]))
    assert {part: style.count(f"--phase{colours[part]}: ") for part in parts} == dict.fromkeys(parts, 2)
