#!/usr/bin/env python3
"""Writes golden.json: what vLLM and transformers make of the templates and cases beside this file.

Needs vLLM and what it brings (transformers, jinja2, tokenizers); made with vLLM 0.32 (CPU),
transformers 5.19, jinja2 3.1.6, tokenizers 0.23.3.

usage: make_golden.py MODEL_DIRECTORY   (any model directory that vLLM can read the config of)
"""
import copy, datetime, glob, json, logging, os, re, sys

os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
os.environ["HF_HUB_OFFLINE"] = "1"
import cases
import transformers.utils.chat_template_utils as hf
from transformers import PreTrainedTokenizerFast
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.renderers import hf as renderer
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.params import merge_kwargs

logging.disable(logging.CRITICAL)
here = os.path.dirname(os.path.abspath(__file__))
NOW = 1_772_600_705  # 2026-03-04 05:05:05
config = ModelConfig(model=sys.argv[1])


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None)


hf.datetime = Clock

# Which tokenizer goes with which template.
MODELS = {"chatml": "bytes", "qwen": "bytes", "parts": "bytes", "macros": "bytes", "llama3": "split", "gemma": "sentence",
          "mistral": "meta", "deepseek": "split", "rag": "sentence"}


def fnv(ids):
    h = 0xCBF29CE484222325
    for i in ids:
        for b in i.to_bytes(4, "little"):
            h = (h ^ b) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{h:016x}"


def load_templates():
    found = {}
    for path in sorted(glob.glob(f"{here}/templates/*.jinja")):
        name, _, part = os.path.basename(path)[:-6].partition("-")
        text = open(path, encoding="utf-8").read()
        if part:
            found.setdefault(name, {})[part] = text
        else:
            found[name] = text
    return found


def load_tokenizer(model, template):
    directory = f"{here}/models/{model}"
    t = PreTrainedTokenizerFast.from_pretrained(directory)
    t.chat_template = template
    t.name_or_path = f"{model}-{abs(hash(str(template)))}"
    return t


def render(tokenizer, body):
    request = ChatCompletionRequest.model_validate(copy.deepcopy({"model": "m", **body}))
    tools = None if request.tools is None else [t.model_dump() for t in request.tools]
    params = request.build_chat_params(None, "auto").with_defaults(merge_kwargs(None, dict(tools=tools, tokenize=False)))
    kind = renderer.resolve_chat_template_content_format(
        None, params.chat_template_kwargs.get("tools"), "auto", tokenizer, model_config=config)
    conversation, _, _ = parse_chat_messages(request.messages, config, content_format=kind)
    text = renderer.safe_apply_chat_template(config, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
    return kind, text


def main():
    out = {"now": NOW, "models": MODELS, "formats": {}, "requests": cases.REQUESTS, "chats": [], "variables": cases.V, "expressions": []}
    for name, template in load_templates().items():
        tokenizer = load_tokenizer(MODELS[name], template)
        for case, body in cases.REQUESTS.items():
            item = {"template": name, "request": case}
            try:
                kind, text = render(tokenizer, body)
                out["formats"].setdefault(name, kind)
                item["text"] = text
                ids = tokenizer.encode(text, add_special_tokens=False)
                item["ids"] = fnv(ids)
                item["count"] = len(ids)
                item["with_special"] = fnv(tokenizer.encode(text, add_special_tokens=True))
            except Exception as e:
                item["error"] = f"{type(e).__name__}: {e}"[:120]
            out["chats"].append(item)
    for source in cases.EXPRESSIONS:
        # Requests cannot give a variable that is none.
        if re.search(r"\bn\b", source):
            source = "{% set n = none +%}" + source
        item = {"source": source}
        try:
            item["text"] = hf._compile_jinja_template(source).render(**copy.deepcopy(cases.V))
        except Exception as e:
            item["error"] = f"{type(e).__name__}: {e}"[:120]
        out["expressions"].append(item)
    detect = renderer._detect_content_format
    out["detect"] = [[source, detect(source, default="string")] for source in cases.DETECT]
    with open(f"{here}/golden.json", "w", encoding="utf-8") as f:
        json.dump(out, f, ensure_ascii=True, indent=0)
        f.write("\n")
    print(len(out["chats"]), sum("error" in c for c in out["chats"]), len(out["expressions"]), sum("error" in c for c in out["expressions"]))


main()
