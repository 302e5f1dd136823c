"""Curves as text, and the page that a browser shows."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_tracking.local.comparing import MISSING, common_metric, differing_settings, points
from accel_tracking.local.curves import drawing, shrink, sparkline
from accel_tracking.local.page import page, thinned
from accel_tracking.local.reading import Run, Series, read_run
from accel_tracking.trackers.local import LocalTracker


def a_run(name: str, values: list[float], **settings: object) -> Run:
    series = Series(list(range(len(values))), values, [float(place) for place in range(len(values))])
    return Run(name, Path(name), name="digits", started=0.0, ended=10.0, settings=settings, metrics={"loss": series})


# ---- text -----------------------------------------------------------------------------------------------------------


def test_a_sparkline_goes_from_lowest_to_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, math.nan, 1.0]) == "█·▁"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([math.inf]) == "·"
    assert sparkline([]) == ""


@given(st.lists(st.floats(), max_size=300), st.integers(1, 40))
def test_curves_never_exceed_their_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))
    assert len(shrink(values, width)) == min(width, len(values))
    assert all(len(line) <= width for line in drawing(values, width, 4))


def test_a_drawing_joins_its_points() -> None:
    lines = drawing([0.0, 1.0, 2.0, 3.0], width=10, height=2)
    assert len(lines) == 2
    assert all(any(ord(dot) != 0x2800 for dot in line) for line in lines)
    assert drawing([math.nan], 10, 2) == []


# ---- comparing ------------------------------------------------------------------------------------------------------


def test_settings_that_differ_are_found_at_any_depth() -> None:
    first = a_run("a", [1.0], rate=0.1, model={"width": 8, "depth": 2})
    second = a_run("b", [1.0], rate=0.1, model={"width": 16, "depth": 2}, seed=None)
    assert differing_settings([first, second]) == {"model.width": [8, 16], "seed": [MISSING, None]}


def test_the_metric_to_show_is_a_loss() -> None:
    run = a_run("a", [1.0])
    run.metrics = {"accuracy": Series(), "eval_loss": Series(), "train/loss": Series()}
    assert run.main_metric() == "train/loss"
    assert common_metric([run, a_run("b", [1.0]), a_run("c", [1.0])]) == "loss"
    assert common_metric([]) is None


def test_every_point_is_exported() -> None:
    assert points([a_run("a", [1.0, 0.5])]) == [
        ("a", "digits", "loss", 0, 0.0, 1.0),
        ("a", "digits", "loss", 1, 1.0, 0.5),
    ]


# ---- the page -------------------------------------------------------------------------------------------------------


def data_of(text: str) -> dict[str, object]:
    actual = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert actual
    return json.loads(actual.group(1), parse_constant=pytest.fail)


def test_the_page_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    tracker = LocalTracker("digits", tmp_path)
    tracker.start()
    tracker.log({"loss": 1.0, "nan": math.nan}, step=0)
    tracker.log_images({"sample": [[[0.0, 1.0], [1.0, 0.0]]]}, step=0)
    tracker.log_table("mistakes", columns=["a"], data=[[math.nan], [{"x": 1}]])
    tracker.finish()
    text = page([read_run(tracker.folder)])
    (run,) = data_of(text)["runs"]  # type: ignore[misc]
    assert run["metrics"]["loss"]["values"] == [1.0]
    assert run["metrics"]["nan"]["values"] == [None]
    assert run["images"]["sample"][0]["source"].startswith("data:image/png;base64,")
    assert run["tables"]["mistakes"]["data"] == [["NaN"], ['{"x": 1}']]
    assert not re.search(r'(src|href)=["\']?(https?:)?//', text)
    assert "default-src 'none'" in text


@given(st.text())
def test_no_text_ends_the_script(hostile: str) -> None:
    run = a_run("a", [1.0])
    run.texts["note"] = hostile + "</script><!--"
    text = page([run], title=hostile)
    assert data_of(text)["runs"][0]["texts"]["note"] == hostile + "</script><!--"  # type: ignore[index]
    assert text.count("</script>") == 2


def test_images_outside_of_the_run_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"x")
    run = a_run("a", [1.0])
    run.folder = tmp_path / "run"
    run.folder.mkdir()
    run.images["sample"] = [(0, "../secret.png"), (1, "missing.png")]
    assert data_of(page([run]))["runs"][0]["images"] == {"sample": []}  # type: ignore[index]


@given(st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), min_size=1, max_size=500), st.integers(4, 60))
def test_thinning_keeps_ends_and_peaks(values: list[float], length: int) -> None:
    kept = thinned(values, length)
    assert len(kept) <= max(length, 4)
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [values[place] for place in kept if math.isfinite(values[place])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))
