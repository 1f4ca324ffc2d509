"""Everyday prompts from our own templates and word lists: those the tiny target learns from, and those of the demo.

`python -m eagle3_core.demo.prompts` writes prompts.jsonl again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

from eagle3_core.demo import topics

DEMO_PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""The prompt set that ships with the project: one {id, messages, domain} per line."""

DEMO_SHARES = {"story": 1200, "explain": 1040, "describe": 560, "compare": 440, "tips": 250, "howto": 200, "note": 200,
               "talk": 100, "plan": 36}  # fmt: skip
"""How many prompts of each domain the demo uses (4,026 in all)."""

_STORY = (
    "Write a short story about {0} who {1}.", "Tell me a very short story about {0} who {1}.",
    "Can you tell me a bedtime story about {0} who {1}?",
)  # fmt: skip
_EXPLAIN = (
    "What is {0}?", "Explain {0} in simple words.", "Explain {0} to a child.", "Tell me about {0}.",
    "Give me three facts about {0}.",
)  # fmt: skip
_ASK = ("{0}", "{0} Explain in simple words.", "{0} Answer in a few sentences.", "I have a question. {0}")
_DESCRIBE = (
    "Describe {0}.", "Describe {0} in three sentences.", "Write a short paragraph about {0}.",
    "Write a short poem about {0}.",
)  # fmt: skip
_TIPS = (
    "Give me three tips for {0}.", "Give me five short tips for {0}.", "Do you have any advice on {0}?",
    "How can I get better at {0}?", "What should I know about {0}?",
)  # fmt: skip
_HOWTO = (
    "How do I {0}?", "How do I {0}? Answer in a few short steps.", "Explain how to {0}.",
    "What do I need to {0}?",
)  # fmt: skip
_COMPARE = ("What is the difference between {0} and {1}?", "Compare {0} and {1}.")
_JOBS = ("What does {0} do?", "Describe a day in the life of {0}.", "Why is the work of {0} important?")
_NOTE = ("Write a short thank-you note to {0} for {1}.", "Help me thank {0} for {1}.")
_FEEL = ("I feel {0} because {1}. What should I do?", "I am {0} because {1}.")
_PLAN = ("Plan {0}.", "Give me ideas for {0}.", "What should I bring for {0}?")


def generate() -> Iterator[tuple[str, str]]:
    """All (domain, prompt) pairs, in a fixed order, without duplicates."""
    for template, hero, plot in product(_STORY, topics.HEROES, topics.PLOTS):
        yield "story", template.format(hero, _plural(plot) if hero in _SEVERAL else plot)
    for domain, templates, subjects in _ONE_SUBJECT:
        for template, subject in product(templates, subjects):
            yield domain, template.format(subject)
    groups = (topics.ANIMALS, topics.FOODS, topics.THINGS, topics.JOBS)
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    reasons = [(feeling, reason) for feeling, because in topics.FEELINGS for reason in because]
    for domain, two_subjects, fillings in (
        ("compare", _COMPARE, pairs),
        ("note", _NOTE, list(product(topics.PEOPLE, topics.FAVORS))),
        ("talk", _FEEL, reasons),
    ):
        for template, filling in product(two_subjects, fillings):
            yield domain, template.format(*filling)


_ONE_SUBJECT: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("explain", _EXPLAIN, (*topics.PHENOMENA, *topics.ANIMALS, *topics.FOODS, *topics.THINGS)),
    ("explain", _ASK, topics.QUESTIONS),
    ("explain", _JOBS, topics.JOBS),
    ("describe", _DESCRIBE, (*topics.PLACES, *topics.ANIMALS, *topics.FOODS, *topics.THINGS)),
    ("tips", _TIPS, topics.HABITS),
    ("howto", _HOWTO, topics.TASKS),
    ("plan", _PLAN, topics.OCCASIONS),
    ("talk", ("{0}",), topics.SMALL_TALK),
)

_SEVERAL = ("a girl named Lily and her dog", "two good friends", "a grandmother and her grandson", "a boy and his kite")


def _plural(plot: str) -> str:
    """`finds a key` -> `find a key`: what several heroes do."""
    verb, _, rest = plot.partition(" ")
    irregular = {"is": "are", "has": "have", "does": "do", "goes": "go", "cannot": "cannot", "makes": "make"}
    rest = rest.replace("and says", "and say")
    if verb in irregular:
        return f"{irregular[verb]} {rest}"
    stem = verb[:-2] if verb.endswith("ches") else verb[:-1]
    return f"{stem} {rest}"


def demo_prompts() -> list[dict[str, object]]:
    """The demo's prompts: of each domain the ones with the lowest content hash, ordered by that hash."""
    chosen: list[tuple[str, str, str]] = []
    by_domain: dict[str, list[tuple[str, str]]] = {}
    for domain, prompt in generate():
        by_domain.setdefault(domain, []).append((hashlib.sha256(prompt.encode()).hexdigest(), prompt))
    for domain, count in DEMO_SHARES.items():
        chosen += [(digest, domain, prompt) for digest, prompt in sorted(by_domain[domain])[:count]]
    return [
        {"id": f"{domain}-{digest[:10]}", "messages": [{"role": "user", "content": prompt}], "domain": domain}
        for digest, domain, prompt in sorted(chosen)
    ]


def main() -> None:
    """Write prompts.jsonl."""
    lines = [json.dumps(record) for record in demo_prompts()]
    DEMO_PROMPTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
