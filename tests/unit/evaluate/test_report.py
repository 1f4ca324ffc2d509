"""Report and release, made from committed artifacts as the pipeline would have left them."""

import csv
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.config.champion import Champion, Pinned
from eagle3_core.config.sweep import BenchPlan, Cell
from eagle3_core.context import StageContext
from eagle3_core.data.prompts import conversation
from eagle3_core.errors import ArtifactError, ConfigError, NotCommittedError
from eagle3_core.evaluate import plots
from eagle3_core.evaluate.bench.endpoint import facts_of
from eagle3_core.evaluate.bench.results import BenchRun, Passes, summarise_cell
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.champion import compare_drafters
from eagle3_core.evaluate.comparison import Served, compare_shape, differences
from eagle3_core.evaluate.serve import first_point
from eagle3_core.evaluate.trainer import TrainerFigures
from eagle3_core.pipeline import STAGES, output_key, shard_key
from eagle3_core.progress import Progress
from eagle3_core.stages import report
from eagle3_core.storage import commit
from eagle3_core.storage.local import LocalStore
from tests.unit.evaluate.test_champion import answer

RUN = RunConfig.parse(
    {
        "name": "tiny",
        "target": {"model": "nowhere"},
        "data": {"prompts": "nowhere"},
        "evaluation": {"shapes": [{"num_steps": 3, "topk": 1, "num_draft_tokens": 4},
                                  {"num_steps": 3, "topk": 2, "num_draft_tokens": 8}], "primary": "3/1/4"},
        "gate": {"min_acceptance_length": 2.0},
    },
    "test",
)  # fmt: skip
PROMPTS = ("p0", "p1", "p2")
FIRST = Cell(1, 9)
PARITY = {
    "depth": 3, "samples": 3, "positions": 20, "max_logit_difference": 1e-6, "argmax_agreement": 1.0,
    "tau_export": 2.2, "tau_trainer": 2.2, "losses": {"lm_head zeroed": 0.5}, "moved": {"missing norm": 9.0},
}  # fmt: skip
TARGET = "7" * 64
FACTS = {"dtype": "float32", "target_sha256": TARGET}
NO_CHAMPION = {"state": "no champion", "said": "no champion: nothing was published as tiny yet"}
ROW = {"tau": 2.1, "full_acc": 0.5, "cond_acc": 0.5, "valid": 10, "loss": 1.0}


def asked(*trained_on: str) -> str:
    """Return the lines of a prompt set: the served prompts, held out, and others to train on."""
    lines = [{"id": name, "messages": [{"role": "user", "content": f"say {name}"}], "later_turns": [], "domain": "d",
              "held_out": name in PROMPTS, "input_ids": [1]} for name in (*PROMPTS, *trained_on)]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def validation(passes=(4, 4, 4)):
    by_depth = [{"k": depth + 1, "tau_chain": 2.25, **ROW} for depth in range(3)]
    samples = {
        name: {"completion_tokens": 9, "verify_passes": list(passes), "verify_passes_sampling": [6.5, 5.0, 4.5]}
        for name in (*PROMPTS, "p9")
    }
    return {"depth": 3, "max_tokens": 9, "trainer_tau": 2.25, "by_depth": by_depth, "samples": samples}


def answers(
    shape: str, changed: str = "", cell: Cell = FIRST, latency: float | None = None, passes: int = 4
) -> list[StreamedAnswer]:
    """Speculation halves the time of an answer alone, doubles it among 64, and leaves a sampled one as it is."""
    speculating = shape != "baseline"
    alone, crowd = (0.5 if cell.temperature == 0 else 1.0, 4.0) if speculating else (1.0, 2.0)
    latency = latency or (alone if cell.concurrency == 1 else crowd)
    passes = passes if cell.temperature == 0 else 6
    return [
        StreamedAnswer(
            id=name, domain="math" if name == "p0" else "code", repeat=0, prompt_tokens=3,
            output_ids=(*range(8), 99) if name == changed else tuple(range(9)), completion_tokens=9,
            finish_reason="length", verify_passes=passes if speculating else None,
            accept_histogram=(passes - 3, 1, 1, 1) if speculating else None, latency_s=latency, ttft_s=0.1,
            gaps=((0.1, 2),) * 4, empty=False, loop=False, **cell._asdict(),
        )
        for name in PROMPTS
    ]  # fmt: skip


def served(shape: str, changed: str = "", concurrency=(1,), lengths=(9,), temperatures=(0.0,), **pace) -> Served:
    speculating = shape != "baseline"
    sizes = dict(zip(("num_steps", "eagle_topk", "num_draft_tokens"), shape.split("/"), strict=False))
    info = {f"speculative_{name}": int(size) for name, size in sizes.items()} if speculating else {}
    cells, found = [], []
    plan = BenchPlan(concurrency=concurrency, max_new_tokens=lengths, temperatures=temperatures)
    for cell in plan.cells:
        these = answers(shape, changed, cell, **pace)
        wall = sum(answer.latency_s for answer in these)
        passes = Passes(answers=these, wall_s=[wall], client_busy=[0.1])
        cells.append(summarise_cell(cell, passes, speculating))
        found += these
    sweep = BenchRun(
        server=facts_of("http://here", {**info, "speculative_algorithm": "EAGLE3" if speculating else None}),
        plan=plan, prompts=dict.fromkeys(PROMPTS, "d"), started_at="now", seconds=1.0, cells=tuple(cells),
        answers=tuple(found),
    )  # fmt: skip
    about = {"device": "cpu", "engine": {"dtype": "float32"}, "startup_s": 1.0, "server_acceptance_length": None}
    return Served(first_point(sweep, about), sweep)


class Pipeline:
    """A store with everything up to the measurements."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, LocalStore(root / "root")
        self.run = RUN
        self.refs = {
            "prompt_set": self.put("prepare/a", Kind.PROMPT_SET, {"prompts.jsonl": asked("t", "u")},
                                   {"target": {"sha256": TARGET}}),
            "checkpoint": self.put("train/a", Kind.CHECKPOINT, {
                "validation.json": json.dumps(validation()),
                "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in (
                    {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0},
                    {"step": 2, "held_out": validation()["by_depth"]})),
            }),
            "drafter": self.put("export/a", Kind.DRAFTER, {"config.json": "{}"}, FACTS),
            "parity": self.put("parity/a", Kind.PARITY, {"parity.json": json.dumps(PARITY)}),
            "challenge": self.put("challenge/a", Kind.CHALLENGE, {"challenge.json": json.dumps(NO_CHAMPION)}),
        }  # fmt: skip

    def put(self, key, kind, files, facts=None):
        staged = self.root / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        for name, text in files.items():
            (staged / name).write_text(text)
        return commit(self.store, key, staged, kind, facts=facts)

    def measure(self, *measured: Served) -> None:
        stage = STAGES["evaluate"]
        base = output_key(stage, self.run, {name: self.refs[name] for name, _ in stage.inputs})
        for index, one in enumerate(measured):
            files = {"measurement.json": one.measurement.model_dump_json(), "sweep.json": one.sweep.model_dump_json()}
            self.put(shard_key(base, index), Kind.MEASUREMENT, files)

    def context(self, name: str) -> StageContext:
        stage = STAGES[name]
        inputs = {wanted: self.refs[wanted] for wanted, _ in stage.inputs}
        work = self.root / "work"
        work.mkdir(exist_ok=True)
        return StageContext(stage, self.run, self.store, inputs, None, work, Progress(name, None))

    def report(self):
        self.refs["eval_report"] = report.run(self.context("report"))
        return self.refs["eval_report"]

    def file(self, name: str) -> str:
        return (self.root / "root" / self.refs["eval_report"].key / name).read_text()


@pytest.fixture
def pipeline(tmp_path):
    return Pipeline(tmp_path)


def test_the_report_has_the_figures_the_verdict_and_the_lineage(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    ref = pipeline.report()
    assert ref.facts["passed"] is True
    assert ref.facts["acceptance_length"] == 2.25
    assert ref.facts["trainer_tau"] == 2.25
    assert ref.facts["speedup"] == 2.0
    assert ref.facts["equal_answers"] == "3/3"
    values = json.loads(pipeline.file("report.json"))
    assert [row["shape"] for row in values["rows"]] == ["3/1/4", "3/2/8"]
    assert values["rows"][1]["trainer_tau"] is None
    assert values["primary"]["acceptance_at"] == [3 / 4, 2 / 3, 1 / 2]
    assert {row["artifact"] for row in values["lineage"]} >= {"drafter", "checkpoint", "measurement 3/1/4"}


def test_the_csv_has_a_row_per_shape_and_domain(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    pipeline.report()
    rows = list(csv.DictReader(pipeline.file("report.csv").splitlines()))
    assert [(row["shape"], row["domain"]) for row in rows][:4] == [
        ("baseline", "all"), ("3/1/4", "all"), ("3/1/4", "code"), ("3/1/4", "math"),
    ]  # fmt: skip
    assert rows[0]["acceptance_length"] == ""


class Page(HTMLParser):
    """Collects what matters, and fails on tags that do not nest."""

    VOID = ("meta", "link", "img", "br", "input")

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.addresses, self.ids, self.text = [], [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.addresses += [value for name, value in attrs if name in ("href", "src", "xlink:href", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_has_its_plots_and_needs_nothing_from_outside(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    pipeline.report()
    html = pipeline.file("report.html")
    page = Page()
    page.feed(html)
    page.close()
    assert not page.open
    assert page.seen.count("svg") == 4
    assert all(address.startswith("#") for address in page.addresses)
    assert len(page.ids) == len(set(page.ids))
    assert {address[1:] for address in page.addresses} <= set(page.ids)
    assert "script" not in page.seen
    assert html.replace("http://www.w3.org/2000/svg", "").find("://") == -1
    assert "url(http" not in html
    assert "prefers-color-scheme: dark" in html
    assert "Passed: at 3/1/4 acceptance length 2.25" in page.text
    assert "#0000" not in html


def test_text_from_outside_cannot_become_markup(pipeline):
    hostile = served("3/1/4", changed="p1")
    pipeline.run = RUN.model_copy(update={"name": "<script>alert(1)</script>"})
    pipeline.measure(served("baseline"), hostile, served("3/2/8"))
    pipeline.refs["prompt_set"] = pipeline.refs["prompt_set"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_differences", lambda *_: [])
        pipeline.report()
    page = Page()
    page.feed(pipeline.file("report.html"))
    assert "script" not in page.seen


def with_answers(one, answers):
    return Served(one.measurement, one.sweep.model_copy(update={"answers": tuple(answers)}))


def test_faster_alone_and_slower_in_company_is_said_of_each_and_no_single_number_stands_for_both(pipeline):
    sweep = (1, 64)
    evaluation = RUN.evaluation.model_copy(update={"concurrency": sweep})
    pipeline.run = RUN.model_copy(update={"evaluation": evaluation})
    pipeline.measure(*(served(shape, concurrency=sweep) for shape in ("baseline", "3/1/4", "3/2/8")))
    pipeline.report()
    values = json.loads(pipeline.file("report.json"))
    alone, crowd = values["primary"]["sweep"]
    assert (alone["word"], crowd["word"]) == ("faster", "slower")
    assert alone["speedup"]["low"] > 1 > crowd["speedup"]["high"]
    # A pass costs (0.5 - 0.1) / 4 s with 2.25 tokens; alone it may yield fewer, in company it must yield more.
    assert alone["break_even"] < 2.25 < crowd["break_even"]
    assert "at 1 in flight faster, 2.00 times" in values["paces"]
    assert "at 64 in flight slower, 0.50 times" in values["paces"]
    assert (alone["ttft_p50_s"], alone["itl_p50_s"]) == (0.1, 0.05)
    page = Page()
    page.feed(pipeline.file("report.html"))
    assert values["paces"] in page.text
    assert page.seen.count("svg") == 5
    rows = [row for row in csv.DictReader(pipeline.file("report.csv").splitlines()) if row["domain"] == "all"]
    assert [(row["shape"], row["concurrency"]) for row in rows[:4]] == [
        ("baseline", "1"), ("baseline", "64"), ("3/1/4", "1"), ("3/1/4", "64"),
    ]  # fmt: skip
    assert float(rows[3]["speedup_high"]) < 1


def test_other_lengths_and_temperatures_stand_beside_no_speculation_at_the_same_point(pipeline):
    points = {"concurrency": (1, 64), "max_new_tokens": (9, 12), "temperatures": (0.0, 1.0)}
    pipeline.run = RUN.model_copy(update={"evaluation": RUN.evaluation.model_copy(update=points)})
    asked = {"concurrency": (1, 64), "lengths": (9, 12), "temperatures": (0.0, 1.0)}
    pipeline.measure(*(served(shape, **asked) for shape in ("baseline", "3/1/4", "3/2/8")))
    assert pipeline.report().facts["acceptance_length"] == 2.25
    values = json.loads(pipeline.file("report.json"))
    rows = values["primary"]["sweep"]
    assert [(row["concurrency"], row["max_new_tokens"], row["temperature"]) for row in rows] == [
        (1, 9, 0), (1, 9, 1), (1, 12, 0), (1, 12, 1), (64, 9, 0), (64, 9, 1), (64, 12, 0), (64, 12, 1),
    ]  # fmt: skip
    assert [row["acceptance_length"] for row in rows[:4]] == [2.25, 1.5, 2.25, 1.5]
    # The trainer replays answers up to the first length: 27 tokens in 12 passes, and in 13.5 where it samples.
    assert [row["trainer_tau"] for row in rows[:4]] == [2.25, 2.0, None, None]
    assert [row["speedup"]["ratio"] for row in rows[:4]] == [2.0, 1.0, 2.0, 1.0]
    assert {row["trainer_tau"] for row in values["rows"][1]["sweep"]} == {None}
    assert values["paces"].count("in flight") == 2
    page = Page()
    page.feed(pipeline.file("report.html"))
    assert page.seen.count("svg") == 6
    assert "12, T 1" in page.text
    assert "Sampled answers differ by chance" in page.text
    table = [row for row in csv.DictReader(pipeline.file("report.csv").splitlines()) if row["domain"] == "all"]
    assert [row["trainer_tau"] for row in table if row["shape"] == "3/1/4"] == ["2.25", "2.0", "", ""] * 2
    assert {row["temperature"] for row in table} == {"0.0", "1.0"}


def test_a_point_that_the_baseline_lacks_is_not_compared_with_another(pipeline):
    asked = served("3/1/4", temperatures=(0.0, 1.0))
    (greedy, sampled) = compare_shape(served("baseline"), asked, TrainerFigures(validation())).sweep
    assert greedy.speedup.ratio == 2.0
    assert sampled.speedup is None


def test_pretended_lengths_show_which_drafter_would_pay_and_judge_nothing(pipeline):
    evaluation = RUN.evaluation.model_copy(update={"simulated_lengths": (1.5, 3.0)})
    pipeline.run = RUN.model_copy(update={"evaluation": evaluation})
    slow, fast = served("3/1/4", changed="p1", latency=1.6, passes=6), served("3/1/4", latency=0.7, passes=3)
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"), slow, fast)
    pipeline.report()
    values = json.loads(pipeline.file("report.json"))
    assert [one["points"][0]["acceptance_length"] for one in values["pretended"]] == [1.5, 3.0]
    assert [round(one["points"][0]["speedup"]["ratio"], 3) for one in values["pretended"]] == [0.625, 1.429]
    # From (1.5, 0.625) to (3.0, 1.429): 1 is at 1.5 + 1.5 * 0.375 / 0.804.
    assert values["pretended_break_even"] == {"1": pytest.approx(2.2, abs=0.01)}
    assert values["differences"] == []
    page = Page()
    page.feed(pipeline.file("report.html"))
    assert "pretended" in page.ids
    assert page.seen.count("svg") == 5


def test_a_differing_answer_is_found_at_its_first_token():
    found = differences(served("baseline"), served("3/1/4", changed="p1"))
    assert [(item.id, item.position, item.baseline_token, item.token) for item in found] == [("p1", 8, 8, 99)]


def test_an_answer_cut_short_differs_where_it_ends():
    short = served("3/1/4")
    cut = [a.model_copy(update={"output_ids": a.output_ids[:5]}) if a.id == "p2" else a for a in short.answers]
    found = differences(served("baseline"), with_answers(short, cut))
    assert [(item.id, item.position, item.token) for item in found] == [("p2", 5, None)]


def test_measurements_of_other_prompts_are_not_compared():
    other = served("3/1/4")
    with pytest.raises(ArtifactError, match="evaluate again"):
        differences(served("baseline"), with_answers(other, other.answers[:2]))


def test_a_shape_that_was_not_measured_stops_the_report(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"))
    with pytest.raises(NotCommittedError):
        pipeline.report()


def test_a_tree_cannot_decide(pipeline):
    evaluation = RUN.evaluation.model_copy(update={"primary": "3/2/8"})
    pipeline.run = RUN.model_copy(update={"evaluation": evaluation})
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    with pytest.raises(ConfigError, match="chain"):
        pipeline.report()


def test_the_estimate_is_pooled_over_the_served_prompts_only(pipeline):
    values = validation()
    values["samples"]["p9"]["verify_passes"] = [8, 8, 8]
    pipeline.refs["checkpoint"] = pipeline.put(
        "train/b", Kind.CHECKPOINT, {"validation.json": json.dumps(values), "metrics.jsonl": '{"step": 1, "loss": 1}\n'}
    )
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    assert pipeline.report().facts["trainer_tau"] == 2.25
    assert json.loads(pipeline.file("report.json"))["primary"]["trainer_tau_all"] == 36 / 20


def challenged_by(pipeline, ours=20, theirs=30, **changes) -> None:
    """Put a challenge of a champion beside the measurements."""
    domains = [("code", 6), ("math", 1)]
    sides = [
        [answer(f"q{at}{domain}", passes, domain=domain, repeat=repeat) for repeat in range(2)
         for domain, count in domains for at in range(count)]
        for passes in (ours, theirs)
    ]  # fmt: skip
    found = {"state": "compared", "said": "better than export/champion", "champion": "export/champion", "left_out": 3,
             "order": ["champion, 1 pass(es)", "challenger, 2 pass(es)", "champion, 1 pass(es)"],
             "against": compare_drafters("3/1/4", *sides).model_dump(mode="json"), **changes}  # fmt: skip
    pipeline.refs["challenge"] = pipeline.put("challenge/b", Kind.CHALLENGE, {"challenge.json": json.dumps(found)})


def test_the_champion_stands_beside_the_challenger_with_intervals_and_a_plot(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    challenged_by(pipeline)
    ref = pipeline.report()
    assert ref.facts["passed"] is True
    values = json.loads(pipeline.file("report.json"))
    assert values["verdict"]["standing"] == "better"
    assert "against the champion better: acceptance length 1.500 times" in ref.facts["summary"]
    assert [check["name"] for check in values["verdict"]["checks"]][-1] == "lead over the champion"
    page = Page()
    page.feed(pipeline.file("report.html"))
    assert "champion" in page.ids
    assert page.seen.count("svg") == 5
    assert "3 held-out prompts were not asked because the champion was trained on them" in page.text
    assert "acceptance length, math" in page.text
    assert "2 passes of each do not tell how the machine drifts" in page.text
    assert "one pass, so 15 % of drift are assumed" in page.text


def test_a_worse_challenger_is_refused_whatever_the_thresholds_say(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    challenged_by(pipeline, ours=30, theirs=20)
    ref = pipeline.report()
    assert ref.facts["passed"] is False
    assert ref.facts["summary"].startswith("Refused for lead over the champion")


def test_without_a_champion_the_page_says_that_the_thresholds_alone_decide(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    pipeline.report()
    page = Page()
    page.feed(pipeline.file("report.html"))
    said = "Nothing was compared (no champion: nothing was published as tiny yet): the thresholds alone decide."
    assert said in page.text


def learnt(pipeline) -> set[str]:
    return set(pipeline.file("trained_on.txt").split())


def said(*names: str) -> set[str]:
    return {conversation([{"role": "user", "content": f"say {name}"}], ()) for name in names}


def test_a_report_knows_what_its_drafter_was_trained_on_and_all_that_it_started_from(pipeline):
    pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
    first = pipeline.report()
    assert learnt(pipeline) == said("t", "u")
    pin = {name: Pinned(key=ref.key, manifest_sha256=ref.manifest_sha256)
           for name, ref in {**pipeline.refs, "report": first}.items()}  # fmt: skip
    champion = Champion(
        drafter=pin["drafter"], checkpoint=pin["checkpoint"], report=pin["report"], target_sha256=TARGET
    )
    pipeline.refs["prompt_set"] = pipeline.put(
        "prepare/b", Kind.PROMPT_SET, {"prompts.jsonl": asked("v")}, {"target": {"sha256": TARGET}}
    )
    pipeline.refs["drafter"] = pipeline.put("export/b", Kind.DRAFTER, {"config.json": "{ }"}, FACTS)
    for start, target, wanted in (
        ("scratch", TARGET, said("v")),
        ("champion", "8" * 64, said("v")),
        ("champion", TARGET, said("t", "u", "v")),
    ):
        training = RUN.training.model_copy(update={"start_from": start})
        other = champion.model_copy(update={"target_sha256": target})
        pipeline.run = RUN.model_copy(update={"champion": other, "training": training})
        pipeline.measure(served("baseline"), served("3/1/4"), served("3/2/8"))
        pipeline.report()
        assert learnt(pipeline) == wanted, (start, target)


def test_a_legend_of_many_lines_leaves_room_for_them():
    """Where it does not, matplotlib warns, which fails here."""
    names = [f"EAGLE3 3/1/4 ({length} tokens, temperature {at})" for length in (64, 256) for at in range(8)]
    lines = {name: ([1, 2], [1, 2]) for name in names}
    assert plots.curves({"one": lines, "two": lines}, "x", "many", "Many lines").count("EAGLE3") >= 2 * len(names)
