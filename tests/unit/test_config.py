"""Recipes and sections: closed, bounded, readable from YAML as people write it."""

import pytest

from eagle3_core.config import DraftShape, EvaluationConfig, RunConfig
from eagle3_core.config.recipes import load_recipe, parse_override, recipe_names
from eagle3_core.errors import ConfigError
from eagle3_core.pipeline import STAGES


@pytest.mark.parametrize("name", recipe_names())
def test_every_checked_in_recipe_loads(name):
    assert isinstance(load_recipe(name), RunConfig)


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"training\.learning_rat: unknown key, did you mean 'learning_rate'"):
        load_recipe("demo", {"training.learning_rat": 1})


def test_an_unknown_section_is_refused():
    with pytest.raises(ConfigError, match="trainig: unknown key"):
        load_recipe("demo", {"trainig.learning_rate": 1})


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigError, match="demo, own, production, smollm2"):
        load_recipe("nosuch")


@pytest.mark.parametrize("text", ["3e-5", "3.0e-5", "0.00003", "+3E-5"])
def test_a_learning_rate_reads_as_a_number_however_it_is_written(text):
    path, value = parse_override(f"training.learning_rate={text}")
    assert load_recipe("demo", {path: value}).training.learning_rate == pytest.approx(3e-5)


def test_where_things_lie_does_not_enter_content_names():
    one = load_recipe("demo", {"target.model": "/a", "data.prompts": "/b", "training.nproc": 1})
    two = load_recipe("demo", {"target.model": "/c", "data.prompts": "/d", "training.nproc": 2})
    names = ("target", "data", "training")
    assert one.slice(names) == two.slice(names)
    assert one.digest() != two.digest()


def test_what_things_are_does_enter_content_names():
    base, other = load_recipe("demo"), load_recipe("demo", {"training.learning_rate": 3e-5})
    assert base.slice(("training",)) != other.slice(("training",))


def test_another_sweep_trains_nothing_anew_and_another_depth_does():
    sections = STAGES["train"].sections
    base = load_recipe("demo").slice(sections)
    sweep = {"evaluation.concurrency": [1, 4], "evaluation.max_prompts": 40, "evaluation.repeats": 2}
    sweep |= {"evaluation.temperatures": [0, 1], "evaluation.max_new_tokens": [192, 16]}
    assert load_recipe("demo", sweep).slice(sections) == base
    assert load_recipe("demo", {"evaluation.primary": "3/1/4"}).slice(sections) != base
    assert load_recipe("demo", {"evaluation.max_new_tokens": [16, 192]}).slice(sections) != base


def test_points_beside_the_first_leave_the_challenge_as_it_is():
    sections = STAGES["challenge"].sections
    base = load_recipe("demo").slice(sections)
    more = {"evaluation.concurrency": [1, 4], "evaluation.temperatures": [0, 1], "evaluation.max_new_tokens": [192, 16]}
    assert load_recipe("demo", more).slice(sections) == base
    for key, value in (("concurrency", [4, 1]), ("max_new_tokens", 16), ("repeats", 3)):
        assert load_recipe("demo", {f"evaluation.{key}": value}).slice(sections) != base


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ("5/1/16", ["verify steps+1 = 6 tokens, not 16", "15/1/16", "the tree 5/2/16", "5/1/6"]),
        ("4/1/24", ["verify steps+1 = 5 tokens, not 24", "23/1/24", "the tree 4/4/24"]),
        ("1/1/100", ["99/1/100, or for 1/1/2"]),
        ("5/1/4", ["verify steps+1 = 6 tokens, not 4", "3/1/4"]),
    ],
)
def test_a_chain_of_another_length_explains_what_sglang_would_do_and_what_to_ask_for(shape, advice):
    with pytest.raises(ValueError, match="at topk 1 the draft is a chain") as caught:
        DraftShape.from_name(shape)
    assert all(part in str(caught.value) for part in advice)


@pytest.mark.parametrize("shape", ["3/2/11", "5/8/64", "1/4/5", "7/1/8", "1/1/2"])
def test_a_tree_as_large_as_its_branches_is_fine(shape):
    assert DraftShape.from_name(shape).name == shape


@pytest.mark.parametrize(("shape", "most"), [("3/2/12", 11), ("1/4/6", 5), ("2/4/22", 21)])
def test_a_tree_larger_than_its_branches_is_refused(shape, most):
    with pytest.raises(ValueError, match=f"at most {most} tokens"):
        DraftShape.from_name(shape)


def test_shapes_can_be_typed_as_they_are_shown():
    run = load_recipe("demo", dict([parse_override("evaluation.shapes=[3/1/4, 7/1/8]")]))
    assert [shape.name for shape in run.evaluation.shapes] == ["3/1/4", "7/1/8"]


@pytest.mark.parametrize("shape", ["7/1", "7/1/x", "", {"num_steps": 7, "topk": 1}])
def test_half_a_shape_is_refused_and_never_filled(shape):
    with pytest.raises(ConfigError, match=r"evaluation\.shapes"):
        load_recipe("demo", {"evaluation.shapes": [shape]})


def test_an_answer_as_long_as_the_whole_sample_is_refused():
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        load_recipe("demo", {"data.max_sample_tokens": 192})


@pytest.mark.parametrize(("typed", "meant"), [("8", (8,)), ("[1, 8, 32]", (1, 8, 32)), ("'1, 8'", (1, 8))])
def test_one_concurrency_or_several_can_be_asked_for(typed, meant):
    run = load_recipe("production", dict([parse_override(f"evaluation.concurrency={typed}")]))
    assert run.evaluation.concurrency == meant


@pytest.mark.parametrize(("typed", "meant"), [("64", (64,)), ("[64, 256]", (64, 256))])
def test_one_length_or_several_can_be_asked_for(typed, meant):
    run = load_recipe("production", dict([parse_override(f"evaluation.max_new_tokens={typed}")]))
    assert run.evaluation.max_new_tokens == meant


@pytest.mark.parametrize(("typed", "meant"), [("0", (0.0,)), ("[0, 0.7, 1]", (0.0, 0.7, 1.0))])
def test_one_temperature_or_several_can_be_asked_for(typed, meant):
    run = load_recipe("production", dict([parse_override(f"evaluation.temperatures={typed}")]))
    assert run.evaluation.temperatures == meant


@pytest.mark.parametrize(
    ("key", "typed", "why"),
    [
        ("temperatures", "[0.7, 0]", "expected 0 first: the gate"),
        ("temperatures", "1", "expected 0 first"),
        ("temperatures", "[0, 1, 1]", "each once"),
        ("temperatures", "[0, 3]", "at most 2"),
        ("max_new_tokens", "[64, 64]", "each once"),
        ("max_new_tokens", "[64, 4]", "at least 8"),
        ("max_new_tokens", "[]", "a list of at least 1"),
    ],
)
def test_a_grid_that_means_nothing_is_refused(key, typed, why):
    with pytest.raises(ConfigError, match=why):
        load_recipe("production", dict([parse_override(f"evaluation.{key}={typed}")]))


def test_how_much_will_be_served_is_told_pass_by_pass():
    """Two shapes and none at eight points, three times; a server that pretends knows one length and temperature."""
    grid = {"shapes": ["3/1/4", "5/1/6"], "primary": "3/1/4", "concurrency": [1, 4], "max_new_tokens": [100, 300],
            "temperatures": [0, 1], "repeats": 3, "simulated_lengths": [2], "max_prompts": 10}  # fmt: skip
    found = EvaluationConfig.parse(grid, "test")
    assert sum(plan.passes for plan in found.plans) == 3 * (3 * 8 + 1 * 2)
    tokens = 3 * 10 * (3 * 2 * 2 * (100 + 300) + 2 * 100)
    assert found.told == f"78 passes over 10 prompts or fewer, by 4 servers; at most {tokens:,} answer tokens"


UNMEASURABLE = [("[8, 8]", "each once"), ("300", "at least as many prompts"), ("[]", "a list of at least 1"),
                ("0", "expected at least 1, found")]  # fmt: skip


@pytest.mark.parametrize(("typed", "why"), UNMEASURABLE)
def test_a_sweep_that_cannot_be_measured_is_refused(typed, why):
    with pytest.raises(ConfigError, match=why):
        load_recipe("production", dict([parse_override(f"evaluation.concurrency={typed}")]))


WRONG = [
    ("training.learning_rate=abc", "training.learning_rate: expected a number, found 'abc'"),
    ("training.epochs=-1", "training.epochs: expected a number above 0, found -1"),
    ("training.nproc=1.5", "training.nproc: expected a whole number, found 1.5"),
    ("training.learning_rate=.nan", "training.learning_rate: expected a finite number, found nan"),
    ("training.max_bad_steps=null", "training.max_bad_steps: expected a whole number, found nothing"),
    ("training.loss=foo", "training.loss: expected 'kl' or 'lk', found 'foo'"),
    ("training.betas=[1]", "training.betas.1: expected a value, found none; add it"),
    ("training.betas=[1,2,3]", "training.betas: expected a list of at most 2, found [1, 2, 3]"),
    ("capture.max_tasks=5000", "capture.max_tasks: expected at most 1,024, found 5000"),
    ("drafter.train_lm_head=maybe", "drafter.train_lm_head: expected true or false, found 'maybe'"),
    ("drafter.head_dim=3", "drafter.head_dim: expected a multiple of 2, found 3"),
    ("serving.engine_args=[1]", "serving.engine_args: expected a mapping, found [1]"),
    ("serving.engine_args={a: {b: 1}}", "engine_args.a: expected text, a number, true or false, found {'b': 1}"),
    ("target.model=5", "target.model: expected text, found 5"),
    ("target=", "target: expected a section with the keys model, dtype, aux_layers, found nothing"),
    ("name=Bad Name", "name: expected text like"),
    ("evaluation.shapes=5", "evaluation.shapes: expected a list, found 5"),
    ("evaluation.shapes=[]", "evaluation.shapes: expected a list of at least 1, found []"),
    ("evaluation.shapes=[3/1]", "evaluation.shapes.0: expected steps/topk/draft tokens like 7/1/8, found '3/1'"),
    ("evaluation.shapes=[{num_steps: 1, topkk: 1}]", "evaluation.shapes.0.topkk: unknown key, did you mean 'topk'?"),
    ("learning_rat=1", "learning_rat: unknown key, did you mean 'training.learning_rate'?"),
    ("training.last_rows=x", "training.last_rows: unknown key, did you mean 'capture.last_rows'?"),
    ("data=5", "data: expected a section with the keys prompts, window_days, until, "),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_wrong_is_said_in_one_line_of_our_words(text, said):
    with pytest.raises(ConfigError) as caught:
        load_recipe("demo", dict([parse_override(text)]))
    line = str(caught.value)
    assert said in line
    assert not any(word in line for word in ("nput should", "ield required", "alue error", "alidation", "\n"))


@pytest.mark.parametrize("values", [{}, {"target": {}, "data": {}}, [1], None, "x"])
def test_whatever_a_recipe_holds_the_line_says_what_to_add(values):
    with pytest.raises(ConfigError, match=r"found none; add it|expected a section with the keys name, target"):
        RunConfig.parse(values, "recipe r")


def test_a_length_longer_than_the_draft_cannot_be_pretended():
    run = load_recipe("production", {"evaluation.simulated_lengths": [1, 8]})
    assert run.evaluation.simulated_lengths == (1.0, 8.0)
    with pytest.raises(ConfigError, match="at most the 8 tokens that 7/1/8 verifies"):
        load_recipe("production", {"evaluation.simulated_lengths": [8.5]})


def test_a_recipe_cannot_name_its_champion_which_a_run_takes_from_its_release():
    pin = {"key": "export/a", "manifest_sha256": "0" * 64}
    champion = {"drafter": pin, "checkpoint": pin, "report": pin, "target_sha256": "0" * 64}
    with pytest.raises(ConfigError, match=r"champion: expected none, for a run takes it from its release as it begins"):
        load_recipe("demo", {"champion": champion})


@pytest.mark.parametrize("typed", ["127.0.0.1:99999", "127.0.0.1:65535", "127.0.0.1", ":29500", "my host:29500", "h:x"])
def test_a_meeting_place_nobody_could_reach_is_refused_before_any_work(typed):
    with pytest.raises(ConfigError, match=r"rdzv_endpoint: expected HOST:PORT with a port of 1 to 65534, found"):
        load_recipe("demo", {"training.nodes": 2, "training.rdzv_endpoint": typed})


def test_a_meeting_place_may_be_a_name_or_an_address():
    for typed in ("host.example:29500", "10.0.0.1:1", "[fe80::1]:65534"):
        assert load_recipe("demo", {"training.nodes": 2, "training.rdzv_endpoint": typed}).training.nodes == 2


def test_a_day_that_is_none_is_asked_for_by_an_example():
    with pytest.raises(ConfigError, match=r"data\.until: expected a date like 2026-11-30, found 'tomorow'"):
        load_recipe("demo", {"data.window_days": 1, "data.until": "tomorow"})


def test_keys_of_which_the_same_is_to_be_said_share_a_clause():
    with pytest.raises(ConfigError) as caught:
        load_recipe("demo", {"drafter.colour": 1, "drafter.smell": 2})
    assert str(caught.value).count("known: draft_vocab_size") == 1
    assert "drafter.colour, drafter.smell: unknown key, known: " in str(caught.value)
