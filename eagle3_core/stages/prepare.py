"""Normalise, deduplicate and split the prompts; apply the target's chat template once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3_core.artifacts import Ref
from eagle3_core.config.data import DataConfig
from eagle3_core.context import StageContext
from eagle3_core.data.prompts import NamedPrompt, named, selection_rank, split, split_position, unique
from eagle3_core.errors import InputError, TargetError
from eagle3_core.identity import check_sizes, resolve_target, target_fingerprint
from eagle3_core.progress import Progress
from eagle3_core.prompt_files import prompt_files, prompts_sha256
from eagle3_core.prompts import read_prompts

if TYPE_CHECKING:
    from eagle3_core.data.chat import Chat

FILE = "prompts.jsonl"


@dataclass(frozen=True)
class _Rendered:
    """A prompt that fits, with its token ids."""

    prompt: NamedPrompt
    input_ids: list[int]
    held_out: bool


def run(context: StageContext) -> Ref:
    """Write the prompt set.

    Raises:
        InputError: no prompt fits, or a split would be empty.
        TargetError: the chat template fails on a prompt.
    """
    data = context.run.data
    target, files = resolve_target(context.run), prompt_files(context.run)
    identity = target_fingerprint(target)
    check_sizes(context.run, identity)
    content = {"target": identity.sha256, "prompts": prompts_sha256(files)}
    if done := context.done(content):
        return done
    from eagle3_core.data.chat import Chat, check_template

    _say_days(context, len(files))
    check_template(target, data.system_prompt)
    chat = Chat(target)
    given = [named(prompt, data.system_prompt) for path in files for prompt in read_prompts(path)]
    distinct = sorted(unique(given), key=selection_rank)
    rendered, too_long = _render(distinct, chat, data, identity.vocab_size, context.progress)
    _check_split(rendered, data, too_long)
    staged = context.staged()
    with (staged / FILE).open("w", encoding="utf-8") as file:
        for item in sorted(rendered, key=lambda item: item.prompt.id):
            file.write(json.dumps(_line(item), ensure_ascii=False) + "\n")
    held_out = sum(item.held_out for item in rendered)
    counts = {"prompts": len(rendered), "train": len(rendered) - held_out, "held_out": held_out,
              "duplicates": len(given) - len(distinct), "too_long": too_long}  # fmt: skip
    if counts["duplicates"]:
        context.progress.phase(
            f"{counts['duplicates']} of {len(given)} prompts are another one but for case and blanks; each is used once"
        )
    facts = {
        "given": len(given),
        "target": identity.model_dump(mode="json"),
        "stop_ids": chat.stop_ids,
        "special_ids": chat.special_ids,
    }
    return context.commit(staged, content=content, facts=facts, ref_facts=counts)


def _say_days(context: StageContext, files: int) -> None:
    """Say which days the prompts are of; a day without a file is told, since it may be a collector that failed."""
    if days := context.run.data.days:
        context.progress.phase(f"{files} files of the {context.run.data.window_days} days {days[0]} to {days[1]}")


def _render(
    prompts: Sequence[NamedPrompt], chat: Chat, data: DataConfig, vocab_size: int, progress: Progress
) -> tuple[list[_Rendered], int]:
    """Render in the order given until `max_prompts` fit; also return how many were too long."""
    wanted = min(len(prompts), data.max_prompts or len(prompts))
    longest = data.max_sample_tokens - data.max_new_tokens
    rendered: list[_Rendered] = []
    too_long = 0
    for prompt in prompts:
        if len(rendered) == wanted:
            break
        input_ids = chat.prompt_ids(prompt.messages)
        if max(input_ids, default=0) >= vocab_size:
            raise TargetError(
                f"{chat.directory}: expected token ids below vocab_size {vocab_size}, found {max(input_ids)}; "
                "config.json and tokenizer belong to different models"
            )
        if len(input_ids) > longest:
            too_long += 1
            continue
        rendered.append(_Rendered(prompt, input_ids, split_position(prompt) < data.held_out_fraction))
        progress.update(len(rendered), wanted, "prompts")
    return rendered, too_long


def _check_split(rendered: Sequence[_Rendered], data: DataConfig, too_long: int) -> None:
    if not rendered:
        raise InputError(
            f"{data.prompts}: expected prompts of at most {data.max_sample_tokens - data.max_new_tokens} tokens, found "
            f"none ({too_long} are longer); raise data.max_sample_tokens or lower data.max_new_tokens"
        )
    split([item.prompt for item in rendered], data.held_out_fraction).check(data.prompts, data.held_out_fraction)


def _line(item: _Rendered) -> dict[str, Any]:
    return {
        "id": item.prompt.id,
        "messages": item.prompt.messages,
        "later_turns": list(item.prompt.prompt.later_turns),
        "domain": item.prompt.prompt.domain,
        "held_out": item.held_out,
        "input_ids": item.input_ids,
        "given_id": item.prompt.prompt.given_id,
    }
