"""Pooling of answers: token-weighted, counters required."""

import pytest

from eagle3_core.data.corpus import AskedPrompt
from eagle3_core.errors import InputError, NotSpeculatingError
from eagle3_core.evaluate.measurement import (
    Pool,
    ServedAnswer,
    by_domain,
    check_counters,
    check_pretended,
    pool,
    quantile,
    summarise,
)
from eagle3_core.evaluate.serve import held_out

RUN = {"shape": "3/1/4", "device": "cpu", "engine": {}, "prompts": 2, "repeats": 1, "concurrency": 1,
       "max_new_tokens": 9, "temperature": 0.0, "startup_s": 1.0, "server_acceptance_length": None}  # fmt: skip


def answer(tokens=9, passes=3, histogram=(1, 0, 1, 1), **changes):
    values = {"id": "a", "domain": "math", "repeat": 0, "prompt_tokens": 4, "output_ids": tuple(range(tokens)),
              "completion_tokens": tokens, "finish_reason": "stop", "verify_passes": passes,
              "accept_histogram": histogram, "latency_s": 0.5}  # fmt: skip
    return ServedAnswer(**{**values, **changes})


def test_acceptance_is_pooled_over_answers_not_a_mean_of_means():
    pooled = pool([answer(), answer(tokens=2, passes=1, histogram=(1,))], speculating=True)
    assert pooled.acceptance_length == 11 / 4
    assert pooled.accept_histogram == (2, 0, 1, 1)


def test_an_answer_of_one_token_says_nothing_about_the_drafter():
    pooled = pool([answer(), answer(tokens=1, passes=0, histogram=())], speculating=True)
    assert pooled.acceptance_length == 3.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verify_passes": None}, "no speculation counters"),
        ({"accept_histogram": None}, "no speculation counters"),
        ({"verify_passes": 0, "accept_histogram": ()}, "no verify pass counted"),
        ({"verify_passes": 4}, "in the histogram"),
    ],
)
def test_a_server_without_counters_is_an_error_not_an_acceptance_of_one(changes, message):
    with pytest.raises(NotSpeculatingError, match=message):
        pool([answer(), answer(**changes)], speculating=True)


def test_only_one_token_answers_is_an_error_not_an_acceptance_of_one():
    with pytest.raises(NotSpeculatingError):
        pool([answer(tokens=1, passes=0, histogram=())], speculating=True)


def test_without_speculation_acceptance_is_unknown_not_one():
    pooled = pool([answer(verify_passes=None, accept_histogram=None)], speculating=False)
    assert pooled.acceptance_length is None
    assert pooled.verify_passes is None


def test_acceptance_by_position_is_conditional():
    measured = summarise([answer(passes=4, histogram=(1, 1, 0, 2))], [1.0], RUN, speculating=True)
    assert measured.acceptance_at == [3 / 4, 2 / 3, 1.0]


def test_speed_is_the_median_over_passes():
    answers = [answer(repeat=repeat) for repeat in range(3)]
    assert summarise(answers, [1.0, 3.0, 9.0], RUN, speculating=True).tokens_per_s == 3.0


def test_domains_are_pooled_apart():
    domains = by_domain([answer(), answer(domain="code", tokens=4, passes=3, histogram=(3,))], speculating=True)
    assert {name: found.acceptance_length for name, found in domains.items()} == {"code": 4 / 3, "math": 3.0}


def test_the_servers_own_counter_must_tell_the_same_story():
    pooled = pool([answer()], speculating=True)
    check_counters(pooled, None, "3/1/4")
    check_counters(pooled, 2.5, "3/1/4")
    with pytest.raises(NotSpeculatingError, match=r"2\.67 tokens per verify pass, the server's own average says 1\.00"):
        check_counters(pooled, 1.0, "3/1/4")


def test_quantiles_are_values_that_occurred():
    assert quantile([5.0, 1.0, 3.0], 0.5) == 3.0
    assert quantile([1.0, 2.0], 0.99) == 2.0
    assert quantile([4.0], 0.5) == 4.0


def asked(name, kept=True):
    return AskedPrompt(name, [], [], "", kept, [len(name), 2])


def test_the_same_prompts_are_chosen_whatever_their_order_in_the_file():
    prompts = [asked(f"p{number}", kept=number % 3 == 0) for number in range(30)]
    chosen = held_out(prompts, 4)
    assert held_out(reversed(prompts), 4) == chosen
    assert all(prompt.held_out for prompt in chosen)
    assert len(chosen) == 4


def test_no_held_out_prompt_is_an_error():
    with pytest.raises(InputError, match="held_out_fraction"):
        held_out([asked("a", kept=False)], 4)


def test_a_server_that_does_not_pretend_what_it_was_told_is_an_error():
    counted = Pool(answers=1, completion_tokens=30, stream_tokens_per_s=1.0, verify_passes=10, acceptance_length=3.0,
                   accept_histogram=None)  # fmt: skip
    check_pretended(counted, 3.1, "x")
    with pytest.raises(NotSpeculatingError, match="expected SGLang to pretend acceptance length 2 "):
        check_pretended(counted, 2.0, "x")
