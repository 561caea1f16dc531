#!/usr/bin/env python3
"""Makes the small tokenizers of models/: one of each kind that matters.

usage: make_models.py DIRECTORY_OF_HTML   (the Rust books, as for the built-in model)
"""
import glob, html, json, os, re, sys
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

here = os.path.dirname(os.path.abspath(__file__))
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def text():
    for path in sorted(glob.glob(f"{sys.argv[1]}/book/ch0*.html")):
        page = open(path, encoding="utf-8").read()
        main = page[page.index("<main>"):page.index("</main>")]
        yield html.unescape(re.sub(r"<[^>]*>", "", main))


def save(name, tokenizer, **config):
    os.makedirs(f"{here}/models/{name}", exist_ok=True)
    data = json.loads(tokenizer.to_str())
    json.dump(data, open(f"{here}/models/{name}/tokenizer.json", "w"), ensure_ascii=False, separators=(",", ":"))
    json.dump(config, open(f"{here}/models/{name}/tokenizer_config.json", "w"), ensure_ascii=False, indent=1)


def special(*names, **flags):
    return [AddedToken(n, special=True, normalized=False, **flags) for n in names]


def bpe(pre, specials, size=700, **model):
    t = Tokenizer(models.BPE(**model))
    t.pre_tokenizer = pre
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator(text(), trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(specials)
    return t


# Byte-level with NFC and Qwen's kind of tokens; some added tokens are not special, one is normalised.
t = bpe(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
t.normalizer = normalizers.NFC()
t.add_tokens([AddedToken(n, normalized=False) for n in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
t.add_tokens([AddedToken("Zürich", normalized=True)])
save("bytes", t, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None)

# Byte-level as Llama 3 splits, a post-processor that adds the first token.
t = bpe(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        special("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
                "<｜tool▁call▁begin｜>"), ignore_merges=True)
b = t.token_to_id("<|begin_of_text|>")
t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
    single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B", special_tokens=[("<|begin_of_text|>", b)])])
save("split", t, bos_token={"content": "<|begin_of_text|>", "__type": "AddedToken", "normalized": False, "lstrip": False, "rstrip": False, "single_word": False},
     eos_token="<|eot_id|>")


def sentence(normalizer, pre, specials):
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.normalizer, t.pre_tokenizer = normalizer, pre
    byte = [f"<0x{i:02X}>" for i in range(256)]
    t.train_from_iterator(text(), trainers.BpeTrainer(vocab_size=1100, special_tokens=["<unk>", "<s>", "</s>"] + byte, show_progress=False, max_token_length=12))
    data = json.loads(t.to_str())
    data["added_tokens"] = [a for a in data["added_tokens"] if not a["content"].startswith("<0x")]
    t = Tokenizer.from_str(json.dumps(data))
    t.add_special_tokens(specials)
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return t


# Llama 2's way: a normaliser that writes spaces as ▁ and puts one before each piece.
t = sentence(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, special("<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>"))
t.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
save("sentence", t, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

# Metaspace that treats only the start of the text in a special way, tokens that take spaces.
t = sentence(None, pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False), special("[INST]", "[/INST]", "[TOOL_CALLS]"))
t.add_special_tokens(special("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", rstrip=True))
t.add_special_tokens(special("[TOOL_RESULTS]", "[/TOOL_RESULTS]", lstrip=True))
save("meta", t, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
