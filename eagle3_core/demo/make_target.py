"""Make the tiny chat target: SmolLM2 writes answers, a small Llama learns them from scratch.

python -m eagle3_core.demo.make_target write --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out answers.jsonl
python -m eagle3_core.demo.make_target train --answers answers.jsonl --out eagle3_core/demo/target
python -m eagle3_core.demo.make_target check --target eagle3_core/demo/target

`write` and `train` want one GPU with 80 GB or more (smaller ones with fewer --rows); everything also runs on a CPU,
slowly. `write` needs the package gguf.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from itertools import islice
from pathlib import Path

import torch

from eagle3_core.demo import corpus
from eagle3_core.errors import TargetError

_log = logging.getLogger(__name__)


def write(args: argparse.Namespace) -> None:
    """Append fit answers to args.out until args.tokens are kept or args.seconds have passed."""
    # gguf is needed by this step alone.
    from eagle3_core.demo import smollm2
    from eagle3_core.demo.writer import Sampling, Writer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model = smollm2.load(args.gguf, device, torch.bfloat16 if device == "cuda" else torch.float32)
    _log.info("SmolLM2 loaded")
    sampling = Sampling(args.temperature, args.min_p, args.max_tokens)
    writer = Writer(model, args.rows, args.prompt_tokens, sampling)
    began, kept, drawn, batch = time.monotonic(), 0, 0, 0
    asked = corpus.draw(args.seed)
    with args.out.open("w", encoding="utf-8") as out:
        while kept < args.tokens and time.monotonic() - began < args.seconds:
            rows = list(islice(asked, args.rows))
            answers = writer.answer([one.ids for one in model.tokenizer.encode_batch([text for _, _, text in rows])])
            texts = model.tokenizer.decode_batch([ids or [] for ids in answers])
            for (domain, prompt, _), ids, text in zip(rows, answers, texts, strict=True):
                fit = corpus.clean(text, domain) if ids else None
                if fit and ids:
                    kept += len(ids)
                    out.write(json.dumps({"domain": domain, "prompt": prompt, "answer": fit}) + "\n")
            out.flush()
            batch, drawn, took = batch + 1, drawn + args.rows, time.monotonic() - began
            left = min(args.seconds - took, took * (args.tokens - kept) / max(kept, 1))
            ended = sum(ids is not None for ids in answers) / args.rows
            _log.info(
                f"batch {batch}: {drawn} asked, {ended:.0%} of the last ended, {kept:,} tokens kept, "
                f"{kept / took:,.0f} tokens/s, {left:.0f} s left"
            )


def train(args: argparse.Namespace) -> None:
    """Tokenizer, packed documents, training, files, check."""
    from eagle3_core.demo import target_files
    from eagle3_core.demo.check_target import check, own_answers
    from eagle3_core.demo.train_target import Recipe, new_model, pack_chats
    from eagle3_core.demo.train_target import train as fit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    with args.answers.open(encoding="utf-8") as lines:
        written = [(row["prompt"], row["answer"]) for row in map(json.loads, lines)]
    chats = corpus.simple(written, args.words)
    _log.info(f"{len(chats):,} of {len(written):,} answers use the {args.words:,} most common words alone")
    known = [chat for chat in chats if not corpus.held_out(chat[0])]
    unknown = [chat for chat in chats if corpus.held_out(chat[0])] or known[:8]
    sample = random.Random(0).sample(known, min(len(known), 60000))
    tokenizer = target_files.train_tokenizer(text for chat in sample for text in chat)
    packed, held_out = pack_chats(tokenizer, known, 0), pack_chats(tokenizer, unknown, 1)
    tokens = int((packed.documents >= 0).sum())
    _log.info(f"{len(known):,} chats, {tokens:,} tokens, {len(packed.tokens):,} rows, {time.monotonic() - began:.0f} s")
    recipe = Recipe(steps=args.steps, rows=args.rows, learning_rate=args.learning_rate)
    model = new_model(recipe.seed, device)
    loss = fit(model, packed, held_out, recipe)
    target_files.write_target(args.out, tokenizer, model.state_dict())
    if args.polish:
        own = own_answers(args.out, sorted({prompt for prompt, _ in known}), device)
        if not own:
            raise TargetError(
                f"{args.out}: expected greedy answers that end and read tidily, found none; raise --steps"
            )
        _log.info(f"{len(own):,} greedy answers of its own are fit, {time.monotonic() - began:.0f} s")
        polish = Recipe(steps=args.polish, rows=args.rows, learning_rate=args.learning_rate / 6, warmup=20)
        fit(model, pack_chats(tokenizer, own, 2), held_out, polish)
        target_files.write_target(args.out, tokenizer, model.state_dict())
    seconds = time.monotonic() - began
    facts = {
        "chats": len(known),
        "tokens": tokens,
        "steps": args.steps,
        "passes": args.steps * args.rows / len(packed.tokens),
        "held_out_loss": loss,
        "seconds": seconds,
        "parameters": sum(w.numel() for w in model.parameters()),
    }
    facts |= check(args.out, _unknown_prompts(args.check), device)
    _log.info(json.dumps(facts))
    args.out.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def check_command(args: argparse.Namespace) -> None:
    """Print greedy answers and their figures."""
    from eagle3_core.demo.check_target import check

    torch.set_num_threads(args.threads)
    _log.info(json.dumps(check(args.target, _unknown_prompts(args.check), "cpu")))


def _unknown_prompts(count: int) -> list[str]:
    """Prompts the target has not been trained on, in the mixture of the demo."""
    asked = (prompt for _, prompt, _ in corpus.draw(7) if corpus.held_out(prompt))
    return list(islice(dict.fromkeys(islice(asked, 4 * count)), count))


def main() -> None:
    """Parse the command line and run one step."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True)
    one = steps.add_parser("write", help="let SmolLM2 answer prompts")
    one.add_argument("--gguf", type=Path, required=True)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--tokens", type=int, default=30_000_000, help="stop after this many kept tokens of SmolLM2's")
    one.add_argument("--seconds", type=float, default=480, help="or after this many seconds")
    one.add_argument("--rows", type=int, default=4096, help="prompts in one batch")
    one.add_argument("--prompt-tokens", type=int, default=192)
    one.add_argument("--max-tokens", type=int, default=224)
    one.add_argument("--temperature", type=float, default=0.3)
    one.add_argument("--min-p", type=float, default=0.08)
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(run=write)
    two = steps.add_parser("train", help="train the target on the answers")
    two.add_argument("--answers", type=Path, required=True)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--steps", type=int, default=700)
    two.add_argument("--rows", type=int, default=128, help="packed rows in one step")
    two.add_argument("--words", type=int, default=4000, help="learn only from answers in this many most common words")
    two.add_argument(
        "--polish", type=int, default=400, help="further steps on the greedy answers of its own that are fit"
    )
    two.add_argument("--learning-rate", type=float, default=3e-3)
    two.add_argument("--check", type=int, default=512, help="prompts to answer afterwards")
    two.set_defaults(run=train)
    three = steps.add_parser("check", help="answer unknown prompts greedily on the CPU")
    three.add_argument("--target", type=Path, required=True)
    three.add_argument("--check", type=int, default=32)
    three.add_argument("--threads", type=int, default=1)
    three.set_defaults(run=check_command)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
