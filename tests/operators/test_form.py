"""The form: bounds and help texts are the models' own, and 3e-5 can be typed."""

import pytest
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError

from eagle3_core.config import RunConfig, TrainingConfig
from eagle3_core.config.recipes import load_recipe
from eagle3_core.errors import ConfigError
from eagle3_core.storage import open_store
from operators.configure import ConfigureOperator, ListShapesOperator, frozen_run
from operators.form import FIELDS, overrides_of, run_params


def accepts(param, value):
    try:
        param.resolve(value)
    except ParamValidationError:
        return False
    return True


def test_every_field_exists_in_the_models_and_shows_their_help_text():
    params = run_params()
    for key in (key for keys in FIELDS.values() for key in keys):
        section, name = key.split(".")
        field = RunConfig.model_fields[section].annotation.model_fields[name]
        assert params[key].description.startswith(field.description)


@pytest.mark.parametrize("value", [3e-5, "3e-5", "0.00003", 1, None])
def test_a_learning_rate_may_be_typed_or_sent_as_a_number(value):
    assert accepts(run_params()["training.learning_rate"], value)


@pytest.mark.parametrize("value", [0, 2, "fast", "3e", "-"])
def test_a_learning_rate_out_of_bounds_is_refused_by_the_form(value):
    assert not accepts(run_params()["training.learning_rate"], value)


def test_bounds_of_the_form_are_those_of_the_model():
    params = run_params()
    assert accepts(params["training.ttt_steps"], 16)
    assert not accepts(params["training.ttt_steps"], 17)
    with pytest.raises(ValueError, match="less than or equal to 16"):
        TrainingConfig(ttt_steps=17)
    assert not accepts(params["target.dtype"], "int4")
    assert accepts(params["target.dtype"], "bfloat16")


def test_empty_fields_keep_the_recipes_values_and_text_becomes_a_number():
    params = {name: param.resolve() for name, param in run_params().items()}
    assert overrides_of(params) == {}
    assert overrides_of({**params, "training.learning_rate": "3e-5", "data.system_prompt": ""}) == {
        "training.learning_rate": 3e-5
    }
    with pytest.raises(ConfigError, match="expected a number such as 3e-5"):
        overrides_of({**params, "training.learning_rate": "fast"})


def test_a_key_that_the_form_does_not_offer_is_taken_or_refused_by_name():
    params = {name: param.resolve() for name, param in run_params().items()}
    run = load_recipe("demo", overrides_of({**params, "evaluation.primary": "3/1/4", "training.step_decay": 0.9}))
    assert (run.evaluation.primary, run.training.step_decay) == ("3/1/4", 0.9)
    with pytest.raises(ConfigError, match=r"data\.max_promps.*did you mean.*max_prompts"):
        load_recipe("demo", overrides_of({**params, "data.max_promps": 300}))


SEVERAL = ("evaluation.max_new_tokens", "evaluation.concurrency", "evaluation.temperatures")


@pytest.mark.parametrize(
    ("key", "sent", "meant"),
    [("evaluation.max_new_tokens", sent, (256,)) for sent in ("256", 256, [256])]
    + [("evaluation.concurrency", sent, (1, 8)) for sent in ("1, 8", "1,8", "[1, 8]", [1, 8])]
    + [("evaluation.temperatures", sent, (0, 0.7)) for sent in ("0, .7", "[0, 7e-1]", [0, 0.7])],
)
def test_several_numbers_may_be_typed_and_one_or_several_be_sent(key, sent, meant):
    params = run_params()
    assert accepts(params[key], sent)
    run = load_recipe("production", overrides_of({key: sent}))
    assert getattr(run.evaluation, key.rpartition(".")[2]) == meant


@pytest.mark.parametrize("key", SEVERAL)
@pytest.mark.parametrize("sent", ["many", "1;8", -1, [-1]])
def test_what_is_no_number_or_out_of_bounds_is_refused_by_the_form(key, sent):
    assert not accepts(run_params()[key], sent)


def test_what_may_be_text_or_numbers_is_one_line_of_text_in_the_form():
    """By the first type but null, and by examples: without them Airflow shows a large field for a value of any type."""
    for key in (*SEVERAL, "training.learning_rate"):
        schema = run_params()[key].schema
        assert schema["type"][0] == "string"
        assert schema["examples"]
        for example in schema["examples"]:
            assert accepts(run_params()[key], example)
    assert run_params()["evaluation.temperatures"].description.endswith("(>= 0, <= 2)")


def test_configure_freezes_the_run_below_the_root(engine, target, context):
    context["params"] |= {**target, "training.learning_rate": "3e-5", "overrides": {"training.step_decay": 0.9}}
    key = ConfigureOperator(task_id="configure").execute(context)
    run = frozen_run(open_store(str(engine.root)), key)
    assert (run.training.learning_rate, run.training.step_decay) == (3e-5, 0.9)
    assert ListShapesOperator(task_id="shapes", run_key=key).execute(context) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"overrides": {"training.lerning_rate": 1}}, "did you mean 'learning_rate'"),
        ({"drafter.draft_vocab_size": 4096}, "at most the target's 2048"),
        ({"target.model": "/nowhere"}, "expected a directory with config.json"),
        ({"recipe": "nonsense"}, "neither a file nor one of"),
        ({"evaluation.temperatures": "0.7"}, "expected 0 first: the gate"),
        ({"evaluation.concurrency": "1,"}, r"concurrency\.1: expected a whole number, found ''$"),
        ({"evaluation.temperatures": "0, 3"}, r"temperatures\.1: expected .*at most 2, found '3'"),
        ({"evaluation.max_new_tokens": "256, 4"}, r"max_new_tokens\.1: expected .*at least 8, found '4'"),
    ],
)
def test_a_wrong_parameter_is_one_line_and_no_retry(engine, target, context, params, line):
    context["params"] |= {**target, **params}
    with pytest.raises(AirflowFailException, match=line) as raised:
        ConfigureOperator(task_id="configure").execute(context)
    assert "\n" not in str(raised.value)


def test_an_unwritable_root_is_one_line(target, context, monkeypatch):
    monkeypatch.setenv("EAGLE3_ROOT", "/proc/nowhere")
    context["params"] |= target
    with pytest.raises(AirflowFailException, match="choose a writable root"):
        ConfigureOperator(task_id="configure").execute(context)
