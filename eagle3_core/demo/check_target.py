"""How the tiny target answers greedily: does it end, does it loop, how sure is it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_core.demo import corpus


@torch.inference_mode()
def check(folder: Path, prompts: Sequence[str], device: str, max_tokens: int = 256, show: int = 12) -> dict[str, Any]:
    """Answer `prompts` greedily in float32 and print the first `show` answers.

    Returns:
        `ended`: share of answers that end by themselves; `tokens`: median length of those; `loops`: share of answers
        in which over 20 % of the four-word runs repeat; `top1`: mean probability of the token it says; `sure`: share
        of tokens with probability over 0.9.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    ended, lengths, loops, sure = 0, [], 0, []
    for first in range(0, len(prompts), 256):
        part = list(prompts[first : first + 256])
        chats = [[{"role": "user", "content": prompt}] for prompt in part]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = out.sequences[:, inputs["input_ids"].shape[1] :]
        best = torch.stack([score.float().softmax(-1).amax(-1) for score in out.scores], dim=1)
        for row, (prompt, ids) in enumerate(zip(part, answers.tolist(), strict=True)):
            length = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            text = tokenizer.decode(ids[:length], skip_special_tokens=True)
            if tokenizer.eos_token_id in ids:
                ended += 1
                lengths.append(length)
            loops += corpus.repetition(text.lower().split()) > 0.2
            sure += best[row, :length].tolist()
            if first + row < show:
                print(f"--- {prompt}\n{text}", flush=True)
    count = len(prompts)
    return {
        "prompts": count,
        "ended": ended / count,
        "tokens": median(lengths) if lengths else 0,
        "loops": loops / count,
        "top1": sum(sure) / len(sure),
        "sure": sum(p > 0.9 for p in sure) / len(sure),
    }
