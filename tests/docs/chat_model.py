"""A tiny chat model as transformers saves it, and conversations: what the pages' reader brings."""

from __future__ import annotations

import json
from pathlib import Path

import torch

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_chat_model(folder: Path) -> None:
    """``folder/model`` and ``folder/chat.jsonl``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    rows = [
        [
            {"role": "user", "content": f"Which fish is number {number}?"},
            {"role": "assistant", "content": f"The {('red', 'tall', 'round')[number % 3]} one."},
        ]
        for number in range(60)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    specials = ["</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=specials, initial_alphabet=alphabet)
    words.train_from_iterator([message["content"] for row in rows for message in row], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(folder / "model")
