"""A random Llama of two layers with a byte-level tokenizer, as a folder: loads in milliseconds, reads any text."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, CONTEXT, VOCABULARY = 2, 4, 2, 32, 1024, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_tiny_model(folder: Path, seed: int = 0, chat_template: str | None = None) -> Path:
    """Write the model; a token is a byte. Returns the folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,  # attention that is far from uniform
        bos_token_id=None,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({**{byte: i for i, byte in enumerate(alphabet)}, "<end>": 256}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def text(characters: int, seed: int = 0) -> str:
    """ASCII text without any meaning."""
    generator = torch.Generator().manual_seed(seed)
    return "".join(chr(code) for code in torch.randint(97, 123, (characters,), generator=generator).tolist())
