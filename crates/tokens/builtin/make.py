#!/usr/bin/env python3
"""Makes the built-in tiny model's tokenizer.json and tokenizer_config.json beside this file.

usage: make.py DIRECTORY_OF_HTML [VOCABULARY_SIZE]

The text is that of the Rust books (Apache-2.0 or MIT), which rustup installs:
  $(rustc --print sysroot)/share/doc/rust/html
Needs `pip install tokenizers`.
"""
import glob, html, json, os, re, sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

books, size = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4096
here = os.path.dirname(os.path.abspath(__file__))
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
# Words of chats, numbers and JSON that the books have little of.
MORE = ["user assistant system tool function name arguments type object properties description"] * 200


def text():
    for book in ("book", "reference", "nomicon", "cargo", "rust-by-example", "edition-guide"):
        for path in sorted(glob.glob(f"{books}/{book}/*.html")):
            page = open(path, encoding="utf-8").read()
            if path.endswith("/print.html") or "<main>" not in page:
                continue
            main = page[page.index("<main>"):page.index("</main>")]
            main = re.sub(r"<(script|style|button)\b.*?</\1>", "", main, flags=re.S)
            yield html.unescape(re.sub(r"<[^>]*>", "", main))
    yield from MORE


tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=size,
    special_tokens=SPECIAL,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    max_token_length=16,
    show_progress=False,
)
tokenizer.train_from_iterator(text(), trainer)
data = json.loads(tokenizer.to_str())
data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
with open(f"{here}/tokenizer.json", "w", encoding="utf-8") as f:
    json.dump(data, f, ensure_ascii=False, separators=(",", ":"))

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- 'To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL[0],
    "eos_token": SPECIAL[4],
    "pad_token": SPECIAL[2],
    "additional_special_tokens": [SPECIAL[3], SPECIAL[1]],
    "clean_up_tokenization_spaces": False,
    "model_max_length": 32768,
    "chat_template": TEMPLATE,
}
with open(f"{here}/tokenizer_config.json", "w", encoding="utf-8") as f:
    json.dump(config, f, ensure_ascii=False, indent=2)
    f.write("\n")
