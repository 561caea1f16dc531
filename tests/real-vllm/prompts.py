"""Requests, each unlike all others, so that every prompt begins cold."""

import itertools
import random

from fleet import MODEL

_SEEDS = itertools.count()
TOKENS = 24

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = {"completions": COMPLETIONS, "chat": CHAT}

WORDS = (
    "import class return value list string number object method function call table entry state "
    "buffer reader writer thread event signal parser token module package error handler request"
).split()


def words(count: int) -> str:
    seeded = random.Random(next(_SEEDS))
    return " ".join(seeded.choice(WORDS) for _ in range(count))


def completion(count: int = 300, **more) -> dict:
    return _body({"prompt": words(count)}, more)


def chat(count: int = 300, **more) -> dict:
    return _body({"messages": [{"role": "user", "content": words(count)}]}, more)


def _body(prompt: dict, more: dict) -> dict:
    # `ignore_eos`, because random weights would end some answers at once.
    shape = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, **prompt, **shape, **more}


def of(api: str, count: int = 300, **more) -> dict:
    return {"completions": completion, "chat": chat}[api](count, **more)
