"""Makes a small llama with random weights, and a tokenizer for it, in the directory given.

Big random weights make one token far likelier than the next, so that the same prompt gives the same
text whichever way its KV was computed. The tokenizer learns from Python's own library, which is
wherever this runs.
"""

import argparse
from pathlib import Path

import sysconfig
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 8192
CONTEXT = 32_768
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, PAD, IM_START, IM_END = range(5)

TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def texts():
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.glob("*.py")):
        yield file.read_text(errors="ignore")


def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[IM_END],
        pad_token=SPECIAL[PAD],
        model_max_length=CONTEXT,
        additional_special_tokens=[SPECIAL[IM_START], SPECIAL[EOS]],
    )
    made.chat_template = TEMPLATE
    return made


def model(hidden: int, layers: int, heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(2, heads // 4),
        head_dim=hidden // heads,
        max_position_embeddings=CONTEXT,
        bos_token_id=BOS,
        eos_token_id=IM_END,
        pad_token_id=PAD,
        initializer_range=0.2,
    )
    made = LlamaForCausalLM(config).to(torch.bfloat16)
    made.generation_config.eos_token_id = [IM_END]
    made.generation_config.pad_token_id = PAD
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    asked = parser.parse_args()
    tokenizer().save_pretrained(asked.directory)
    model(asked.hidden, asked.layers, asked.heads).save_pretrained(asked.directory)
