"""Let the target answer every prompt; the server's own token ids are the corpus."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config.base import canonical_sha256
from eagle3_core.context import StageContext
from eagle3_core.data.corpus import CORPUS, Answer, AskedPrompt, read_corpus, read_prompt_set, write_corpus
from eagle3_core.engine.fingerprint import serving_engine
from eagle3_core.errors import CorruptArtifactError, EngineError, InputError
from eagle3_core.identity import require_target
from eagle3_core.pipeline import STAGES
from eagle3_core.storage import ObjectStore, commit, committed_keys, full_disk_is_typed, load, quarantine

if TYPE_CHECKING:
    from eagle3_core.engine.client import EngineClient

Connect = Callable[[], "EngineClient"]


def run(context: StageContext) -> Ref:
    """Write the corpus; answers are committed every `chunk_prompts`, so a killed run repeats at most one chunk.

    An answer that any run of this root was given before, to the same prompt under the same settings, is used again.

    Raises:
        InputError: every answer of a split is empty.
        EngineError: the server failed; a retry goes on from the last chunk.
    """
    engine = serving_engine(context.run.serving.device)
    content = {"engine": canonical_sha256(engine)}
    if done := context.done(content):
        return done
    prompt_set = context.input("prompt_set")
    facts = prompt_set.manifest.facts
    asked = read_prompt_set(prompt_set)
    decides = {
        "target": facts["target"]["sha256"], "dtype": context.run.target.dtype, "engine": engine,
        "serving": context.run.serving.identity(), "max_new_tokens": context.run.data.max_new_tokens,
    }  # fmt: skip
    known = _Known(context.store, decides, frozenset(prompt.id for prompt in asked))
    answers: list[Answer] = []
    too_long = 0
    with full_disk_is_typed(context.work), _lazy_client(context, facts["target"]) as connect:
        while asked:
            found = _answer_all(context, asked, known, connect)
            answers += found.values()
            asked, dropped = _next_turns(context, asked, found)
            too_long += dropped
    stop_ids = set(facts["stop_ids"])
    kept = sorted((answer for answer in answers if not _is_empty(answer, stop_ids)), key=lambda answer: answer.id)
    counts = _counts(kept, len(answers))
    staged = context.staged()
    write_corpus(staged / CORPUS, kept)
    inherited = {name: facts[name] for name in ("target", "stop_ids", "special_ids")}
    return context.commit(
        staged,
        content=content,
        facts={**inherited, "generated_by": engine, "turns_too_long": too_long,
               "cut_off": sum(answer.finish_reason == "length" for answer in kept)},
        ref_facts=counts,
    )  # fmt: skip


@dataclasses.dataclass
class _Known:
    """Answers committed so far, in chunks that are named by what was asked and by all that decides an answer."""

    store: ObjectStore
    decides: Mapping[str, Any]
    wanted: frozenset[str]

    def __post_init__(self) -> None:
        """Know of nothing yet: chunks are read when a temperature is first asked for."""
        self._answers: dict[float, dict[tuple[str, int], Answer]] = {}

    def answer(self, prompt: AskedPrompt, temperature: float) -> Answer | None:
        """Return the answer that was given to this prompt, as a sample of it; None where none was."""
        found = self._read(temperature).get(_asked(prompt))
        if found is None or found.input_ids != prompt.input_ids:
            return None
        # Where a prompt belongs is its own affair, not its answer's.
        return dataclasses.replace(found, domain=prompt.domain, held_out=prompt.held_out)

    def commit(self, answers: Sequence[Answer], temperature: float, work: Path) -> None:
        """Commit some answers; their name is that of what was asked, so no chunk is ever replaced by another.

        Where another run has committed other answers to the same before, those count.
        """
        staged = work / "chunk"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        write_corpus(staged / CORPUS, list(answers))
        name = canonical_sha256([[answer.id, answer.input_ids] for answer in answers])[:24]
        ref = commit(self.store, f"{self._place(temperature)}/{name}", staged, Kind.CORPUS)
        self._read(temperature).update({_asked(one): one for one in read_corpus(load(self.store, ref))})

    def _place(self, temperature: float) -> str:
        return f"{STAGES['regenerate'].name}/answers/{canonical_sha256([self.decides, temperature])[:24]}"

    def _read(self, temperature: float) -> dict[tuple[str, int], Answer]:
        """Read every committed chunk once; a damaged one is put aside and its prompts are answered again."""
        if temperature in self._answers:
            return self._answers[temperature]
        found = self._answers[temperature] = {}
        for chunk in committed_keys(self.store, self._place(temperature)):
            try:
                answers = list(read_corpus(load(self.store, chunk)))
            except CorruptArtifactError as error:
                quarantine(self.store, chunk, str(error))
                continue
            # Later turns are named by their first.
            found |= {_asked(one): one for one in answers if one.id.partition(".")[0] in self.wanted}
        return found


def _asked(what: AskedPrompt | Answer) -> tuple[str, int]:
    """Return what tells questions apart: after different first answers a second turn is another question."""
    return what.id, hash(tuple(what.input_ids))


@contextlib.contextmanager
def _lazy_client(context: StageContext, target: Mapping[str, Any]) -> Iterator[Connect]:
    """Yield a function that starts the engine when first called: where all answers are there, none starts."""
    from eagle3_core.engine.launch import LaunchPlan
    from eagle3_core.engine.server import SglangServer

    run = context.run
    clients: list[EngineClient] = []
    with contextlib.ExitStack() as stack:

        def connect() -> EngineClient:
            if not clients:
                plan = LaunchPlan.serve(require_target(run, target), run.target.dtype, run.serving)
                server = SglangServer.of_stage(plan, context)
                clients.append(stack.enter_context(stack.enter_context(server).client()))
            return clients[0]

        yield connect


def _answer_all(
    context: StageContext, asked: Sequence[AskedPrompt], known: _Known, connect: Connect
) -> dict[str, Answer]:
    """Return an answer to every prompt by id; held-out ones are answered greedily, as they will be served."""
    groups: dict[float, list[AskedPrompt]] = {}
    for prompt in asked:
        groups.setdefault(0.0 if prompt.held_out else context.run.data.temperature, []).append(prompt)
    missing = {
        temperature: [prompt for prompt in prompts if known.answer(prompt, temperature) is None]
        for temperature, prompts in sorted(groups.items())
    }
    done = len(asked) - sum(map(len, missing.values()))
    context.progress.update(done, len(asked), "prompts", answered_before=done)
    for temperature, prompts in missing.items():
        if prompts:
            _answer(context, prompts, temperature, known, connect(), (done, len(asked)))
            done += len(prompts)
    found = {
        prompt.id: known.answer(prompt, temperature) for temperature, prompts in groups.items() for prompt in prompts
    }
    whole = {name: answer for name, answer in found.items() if answer is not None}
    if len(whole) < len(asked):
        raise EngineError(f"regenerate: expected {len(asked)} answers, found {len(whole)}; try again")
    return whole


def _answer(
    context: StageContext,
    prompts: Sequence[AskedPrompt],
    temperature: float,
    known: _Known,
    client: EngineClient,
    count: tuple[int, int],
) -> None:
    from eagle3_core.engine.client import Sampling

    run, (done, total) = context.run, count
    sampling = Sampling(max_new_tokens=run.data.max_new_tokens, temperature=temperature)
    finished: list[Answer] = []
    started, tokens = time.monotonic(), 0
    for generation in client.generate(
        [prompt.input_ids for prompt in prompts], sampling, concurrency=run.serving.max_running_requests
    ):
        prompt = prompts[generation.index]
        finished.append(
            Answer(prompt.id, prompt.domain, prompt.held_out, prompt.input_ids, generation.output_ids,
                   generation.finish_reason)
        )  # fmt: skip
        tokens += len(generation.output_ids)
        done += 1
        rate = tokens / max(time.monotonic() - started, 1e-6)
        context.progress.update(done, total, "prompts", tokens_per_s=round(rate, 1), answer_tokens=tokens)
        if len(finished) >= run.data.chunk_prompts:
            known.commit(finished, temperature, context.work)
            finished = []
    if finished:
        known.commit(finished, temperature, context.work)


def _next_turns(
    context: StageContext, asked: Sequence[AskedPrompt], answers: Mapping[str, Answer]
) -> tuple[list[AskedPrompt], int]:
    """Return the following turn of every conversation that has one, and how many would be too long."""
    open_ones = [prompt for prompt in asked if prompt.later_turns and answers[prompt.id].output_ids]
    if not open_ones:
        return [], 0
    from eagle3_core.data.chat import Chat
    from eagle3_core.identity import resolve_target

    chat, data = Chat(resolve_target(context.run)), context.run.data
    following = []
    for prompt in open_ones:
        base, _, turn = prompt.id.partition(".")
        messages = [
            *prompt.messages,
            {"role": "assistant", "content": chat.decode(answers[prompt.id].output_ids)},
            {"role": "user", "content": prompt.later_turns[0]},
        ]
        following.append(
            dataclasses.replace(
                prompt,
                id=f"{base}.{int(turn or 1) + 1}",
                messages=messages,
                later_turns=prompt.later_turns[1:],
                input_ids=chat.prompt_ids(messages),
            )
        )
    fitting = [turn for turn in following if len(turn.input_ids) <= data.max_sample_tokens - data.max_new_tokens]
    return fitting, len(following) - len(fitting)


def _is_empty(answer: Answer, stop_ids: set[int]) -> bool:
    return all(token in stop_ids for token in answer.output_ids)


def _counts(kept: Sequence[Answer], answered: int) -> dict[str, int]:
    held_out = sum(answer.held_out for answer in kept)
    if not held_out or held_out == len(kept):
        raise InputError(
            f"regenerate: {answered - len(kept)}/{answered} samples have no supervised token, left are "
            f"{len(kept) - held_out} to train on and {held_out} held out, both are needed; "
            "check the chat template and data.prompts"
        )
    return {
        "samples": len(kept),
        "held_out": held_out,
        "empty": answered - len(kept),
        "tokens": sum(answer.length for answer in kept),
        "answer_tokens": sum(len(answer.output_ids) for answer in kept),
    }
