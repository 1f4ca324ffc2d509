"""report.html and bench.html, opened in a real browser: nothing complains, plots are there, nothing is fetched."""

import pytest

from eagle3_core.evaluate.bench.output import BenchFile, write_files
from eagle3_core.evaluate.bench.verdict import verdict
from eagle3_core.evaluate.bench.versus import compare
from tests.integration.browser import look
from tests.unit.evaluate.test_bench_comparison import PLAIN, Pace, run
from tests.unit.evaluate.test_report import Pipeline, served

BROKEN = """<!doctype html><meta charset="utf-8"><p style="width: 3000px">wide</p>
<svg width="300" height="200"><title>empty</title></svg>
<img src="http://127.0.0.1:9/x.png"><script>nosuch.thing()</script>"""


def report(directory):
    pipeline = Pipeline(directory)
    grid = {"concurrency": (1, 64), "max_new_tokens": (9, 12), "temperatures": (0.0, 1.0)}
    pipeline.run = pipeline.run.model_copy(update={"evaluation": pipeline.run.evaluation.model_copy(update=grid)})
    grid["lengths"] = grid.pop("max_new_tokens")
    pipeline.measure(*(served(shape, **grid) for shape in ("baseline", "3/1/4", "3/2/8")))
    pipeline.report()
    return directory / "root" / pipeline.refs["eval_report"].key / "report.html", 6, "in flight slower, 0.50 times"


def bench(directory):
    ours, plain = run(Pace({1: 0.012, 64: 0.045}, per_pass=3, jitter=0.05)), run(PLAIN)
    comparison = compare(ours, plain)
    file = BenchFile(verdict=verdict(ours, comparison, plain, None), measured=ours, against=plain,
                     comparison=comparison)  # fmt: skip
    return write_files(directory, file)[-1], 4, "EAGLE3 3/1/4"


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("made", [report, bench])
def test_a_page_is_whole_in_a_browser(made, width, tmp_path):
    page, plots, words = made(tmp_path)
    seen = look(page, width)
    assert seen.complaints == []
    assert seen.requests == [page.resolve().as_uri()]
    assert words in seen.text
    assert len(seen.plots) == plots
    for plot in seen.plots:
        assert plot["title"]
        assert plot["width"] > 250
        assert plot["height"] > 80
        assert plot["drawn"] > 20
        assert plot["colours"] > 2
    assert not seen.too_wide


def test_the_test_sees_what_is_wrong_with_a_page(tmp_path):
    (tmp_path / "broken.html").write_text(BROKEN)
    seen = look(tmp_path / "broken.html")
    assert any("nosuch" in complaint for complaint in seen.complaints)
    assert any("127.0.0.1:9/x.png" in request for request in seen.requests)
    assert [plot["drawn"] for plot in seen.plots] == [0]
    assert seen.too_wide
