"""`FP4Cache` in Transformers models: tiny random models against Transformers' own cache and attention."""

import inspect

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from bitdecoding.cache import paged as paged_module
from bitdecoding.cache.codec import LayerCodec
from bitdecoding.calibration import Calibration
from bitdecoding.errors import CalibrationError, InvalidInputError, UnsupportedError
from bitdecoding.integrations.transformers import FP4Cache
from bitdecoding.integrations.transformers.probing import RecordingCache, TeacherForcedCache
from bitdecoding.recipe import PAGE_SIZE, get_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 2, 32, 97
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # attention that is far from uniform
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ALTERNATING = {"sliding_window": 150, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen2": lambda: Qwen2Config(**{**COMMON, "hidden_size": 128}),
    "qwen3": lambda: Qwen3Config(**COMMON),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=150),
    "mistral-short-window": lambda: MistralConfig(**COMMON, sliding_window=20),
    "gemma": lambda: GemmaConfig(**COMMON),
    "gemma2": lambda: Gemma2Config(**COMMON, **ALTERNATING, attn_logit_softcapping=5.0, query_pre_attn_scalar=20),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, **ALTERNATING, query_pre_attn_scalar=20),
}
PROMPT = 250  # six tokens before a page boundary
# Earlier releases of Transformers call it past_key_values.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def make_model(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    # Gemma 2 caps its logits, which SDPA cannot.
    attention = "eager" if name == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention).to(dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            parameter.data += torch.randn_like(parameter) * 0.1
    return model


def calibration(layers: int = LAYERS) -> Calibration:
    generator = torch.Generator().manual_seed(1)
    return Calibration(
        key_mean=torch.randn(layers, KV_HEADS, HEAD_DIM, generator=generator) * 0.2,
        query_second_moment=torch.eye(HEAD_DIM).expand(layers, KV_HEADS, HEAD_DIM, HEAD_DIM).contiguous(),
    )


def random_ids(count: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


class RoundedCache(DynamicCache):
    """Transformers' cache, with what it holds rounded to bf16; a prefill attends to the given keys and values."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        empty = self.get_seq_length(layer_idx) == 0
        rounded = [x.bfloat16().to(x.dtype) for x in (key_states, value_states)]
        held = super().update(*rounded, layer_idx, *args, **kwargs)
        return (key_states, value_states) if empty else held


@torch.inference_mode()
def forward(model: PreTrainedModel, cache, ids: torch.Tensor, sizes, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of consecutive forward passes over these numbers of tokens."""
    start, logits = cache.get_seq_length(), []
    for size in sizes:
        end = start + size
        options = {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        logits.append(model(ids[:, start:end], **{CACHE: cache}, use_cache=True, **options).logits)
        start = end
    return torch.cat(logits, 1)


def generate(model: PreTrainedModel, cache, ids: torch.Tensor, mask: torch.Tensor | None = None, **options):
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, **options}
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        **{CACHE: cache},
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of rows of these lengths."""
    longest = max(lengths)
    ids = random_ids(longest, len(lengths), seed)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    return ids * mask, mask


def assert_logits_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 0.02) -> None:
    """Within a fraction of their spread: P is fp16 against pages, and bf16 rounding passes small differences on."""
    assert expected.std() > 0.3
    torch.testing.assert_close(actual.float(), expected.float(), atol=atol * float(expected.std()), rtol=0)


# --- Equal to Transformers with 16-bit pages


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", [[PROMPT, *[1] * 20], [120, 100, 3, 2, 1, 4, *[1] * 10, 60]], ids=["steps", "chunks"])
def test_logits_equal_transformers(name, sizes):
    model = make_model(name)
    ids = random_ids(300, rows=2)
    expected = forward(model, RoundedCache(), ids, sizes)
    actual = forward(model, FP4Cache.for_model(model, "bf16"), ids, sizes)
    assert_logits_close(actual, expected)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3"])
def test_generate_equals_transformers_on_a_padded_batch(name):
    model = make_model(name)
    ids, mask = left_padded([PROMPT, 125, 40])
    expected = generate(model, RoundedCache(), ids, mask)
    cache = FP4Cache.for_model(model, "bf16")
    actual = generate(model, cache, ids, mask)
    assert torch.equal(actual.sequences, expected.sequences)
    assert_logits_close(torch.stack(actual.logits), torch.stack(expected.logits))
    assert cache.get_seq_length() == PROMPT + 11
    assert cache.paged.lengths == [261, 136, 51]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models(dtype):
    model = make_model("llama", dtype)
    ids = random_ids(PROMPT + 10)
    expected = forward(model, DynamicCache(), ids, [PROMPT, *[1] * 10])
    actual = forward(model, FP4Cache.for_model(model, "bf16"), ids, [PROMPT, *[1] * 10])
    assert actual.dtype == dtype
    assert_logits_close(actual, expected, 0.15 if dtype is torch.bfloat16 else 0.03)


def test_beam_search():
    model = make_model()
    ids, mask = left_padded([PROMPT, 100])
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True}
    expected = generate(model, RoundedCache(), ids, mask, **options)
    cache = FP4Cache.for_model(model, "bf16")
    actual = generate(model, cache, ids, mask, **options)
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, atol=5e-3, rtol=1e-2)
    # The page of the prompt is shared by the beams of a row, the second is each beam's own.
    assert cache.paged.layers[0].store.pool.num_used <= 6


def test_sampled_return_sequences():
    model = make_model()
    ids = random_ids(PROMPT)
    options = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(0)
    expected = generate(model, RoundedCache(), ids, **options)
    torch.manual_seed(0)
    actual = generate(model, FP4Cache.for_model(model, "bf16"), ids, **options)
    assert torch.equal(actual.sequences, expected.sequences)


@pytest.mark.parametrize("turn", [3, 40])
def test_a_second_turn_on_the_same_cache(turn):
    model = make_model("gemma3")
    ids, mask = left_padded([PROMPT - 12, 101])

    def talk(cache):
        first = generate(model, cache, ids, mask)
        ids2 = torch.cat((first.sequences, random_ids(turn, 2, seed=5)), 1)
        mask2 = torch.cat((mask, torch.ones(2, ids2.shape[1] - mask.shape[1], dtype=mask.dtype)), 1)
        return generate(model, cache, ids2, mask2)

    expected = talk(RoundedCache())
    actual = talk(FP4Cache.for_model(model, "bf16"))
    assert torch.equal(actual.sequences, expected.sequences)
    assert_logits_close(torch.stack(actual.logits), torch.stack(expected.logits))


def test_chunked_prefill_of_generate():
    model = make_model()
    ids, mask = left_padded([PROMPT, 60])
    expected = generate(model, RoundedCache(), ids, mask, prefill_chunk_size=100)
    whole = generate(model, FP4Cache.for_model(model, "bf16"), ids, mask)
    chunked = generate(model, FP4Cache.for_model(model, "bf16"), ids, mask, prefill_chunk_size=100)
    assert_logits_close(torch.stack(chunked.logits), torch.stack(expected.logits))
    assert torch.equal(whole.sequences, chunked.sequences)


# --- Quantized


def test_padded_rows_equal_single_rows():
    model = make_model("qwen3")
    lengths = [PROMPT, 125, 40]
    ids, mask = left_padded([n + 12 for n in lengths])
    new = [1] * 12
    for recipe in ("bitdecoding-nvfp4", "bitdecoding-mxfp4-plus"):
        cache = FP4Cache.for_model(model, recipe, calibration())
        batch = forward(model, cache, ids, [PROMPT, *new], mask)
        for row, n in enumerate(lengths):
            cache.reset()
            single = forward(model, cache, ids[row : row + 1, PROMPT - n :], [n, *new])
            # A last-bit difference of the padded prefill may move a 4-bit code.
            assert_logits_close(batch[row : row + 1, PROMPT - n :], single, 0.1)


@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4", "bitdecoding-mxfp4-plus", "bitdecoding-nvfp4-w16", "saw-int4"])
def test_steps_equal_teacher_forcing(recipe):
    """All new tokens in one pass over an encoding of their own: another implementation of the same cache."""
    model = make_model("qwen3")
    ids = random_ids(PROMPT + 12)
    actual = forward(model, FP4Cache.for_model(model, recipe, calibration()), ids, [PROMPT, *[1] * 12])
    prompt = RecordingCache(LAYERS)
    forward(model, prompt, ids, [PROMPT])
    codecs = [LayerCodec(get_recipe(recipe), KV_HEADS, HEAD_DIM, calibration().layer(i)) for i in range(LAYERS)]
    expected = forward(model, TeacherForcedCache(prompt, codecs), ids, [12])
    assert_logits_close(actual[:, PROMPT:], expected, 0.05)
    exact = forward(model, FP4Cache.for_model(model, "bf16"), ids, [PROMPT, *[1] * 12])
    assert (exact - actual)[:, PROMPT:].abs().max() > 4 * (expected - actual[:, PROMPT:]).abs().max()


@pytest.mark.parametrize("recipe", ["bitdecoding-nvfp4-plus", "bitdecoding-mxfp4"])
def test_stored_pages_are_the_encoded_keys_and_values(recipe, monkeypatch):
    """What prefill and steps stored, against encoding all captured keys and values at once."""
    captured: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    attend = paged_module.PagedLayer.attend

    def capture(self, q, keys, values, logits, padding=None):
        captured.setdefault(self.name, []).append((keys.clone(), values.clone()))
        return attend(self, q, keys, values, logits, padding)

    monkeypatch.setattr(paged_module.PagedLayer, "attend", capture)
    model = make_model("qwen2")
    ids, mask = left_padded([PROMPT + 20, 150])
    cache = FP4Cache.for_model(model, recipe, calibration())
    forward(model, cache, ids, [PROMPT, *[1] * 20], mask)
    for i, layer in enumerate(cache.paged.layers):
        codec = LayerCodec(get_recipe(recipe), KV_HEADS, HEAD_DIM, calibration().layer(i))
        keys, values = (torch.cat(x, -2).bfloat16() for x in zip(*captured[f"layer {i}"], strict=True))
        for row, (pad, pages) in enumerate(((0, 2), (120, 1))):
            whole = [
                x[row, :, pad : pad + pages * PAGE_SIZE].unflatten(1, (pages, PAGE_SIZE)).transpose(0, 1)
                for x in (keys, values)
            ]
            held = layer.store.pool.gather(layer.store.table.tensor()[row, :pages])
            encoded = (codec.encode_keys(whole[0], torch.arange(pages) == 0), codec.encode_values(whole[1]))
            for part, expected in zip(held, encoded, strict=True):
                for tensor in expected:
                    assert torch.equal(part[tensor], expected[tensor]), (i, row, tensor)


def test_memory_of_a_generation():
    model = make_model("gemma2")
    cache = FP4Cache.for_model(model, "bitdecoding-nvfp4", calibration())
    assert cache.memory().used == 0
    generate(model, cache, random_ids(3 * PAGE_SIZE + 1), max_new_tokens=2, min_new_tokens=2)
    memory = cache.memory()
    page = PAGE_SIZE * KV_HEADS * 2 * HEAD_DIM * 9 // 16
    token = KV_HEADS * 2 * HEAD_DIM * 2
    # The sliding layer has lost its first page, and needs 150 tokens in BF16.
    assert memory.pages_used == 5 * page
    assert memory.recent_used == 2 * 2 * token
    assert memory.sink_used == 2 * 16 * token
    assert memory.bf16 == (386 + 150) * token
    assert memory.tokens == 386


# --- The interface of a cache


def test_reset_starts_over():
    model = make_model()
    cache = FP4Cache.for_model(model, "bitdecoding-nvfp4-plus", calibration())
    first = generate(model, cache, random_ids(PROMPT))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, cache, random_ids(PROMPT)).sequences, first.sequences)


def test_rows_can_be_repeated_and_selected():
    model = make_model()
    ids = random_ids(PROMPT + 8, rows=2)
    cache = FP4Cache.for_model(model, "bitdecoding-nvfp4", calibration())
    expected = forward(model, cache, ids, [PROMPT, *[1] * 8])[:, PROMPT:]
    cache.reset()
    forward(model, cache, ids, [PROMPT])
    cache.batch_repeat_interleave(2)
    actual = forward(model, cache, ids[[0, 0, 1, 1]], [1] * 4)
    torch.testing.assert_close(actual, expected[[0, 0, 1, 1], :4], atol=1e-3, rtol=1e-3)
    cache.batch_select_indices(torch.tensor([False, True, False, True]))
    cache.reorder_cache(torch.tensor([1, 0]))
    actual = forward(model, cache, ids[[1, 0]], [1] * 4)
    torch.testing.assert_close(actual, expected[[1, 0], 4:], atol=0.02, rtol=0)


def test_what_transformers_asks_a_cache():
    cache = FP4Cache.for_model(make_model("gemma2"), "bf16")
    cache.batch_repeat_interleave(2)
    cache.crop(0)
    assert len(cache) == LAYERS
    assert not cache.is_compileable
    assert cache.is_sliding == [False] * LAYERS
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(7, 0) == (7, 0)
    with pytest.raises(UnsupportedError, match="crop"):
        cache.crop(-1)


def test_another_attention_function_is_refused():
    model = make_model()
    cache = FP4Cache.for_model(model, "bf16")
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match="attn_implementation: 'sdpa'"):
        generate(model, cache, random_ids(5))
    with pytest.raises(UnsupportedError, match="FP4Cache"):
        model = make_model()
        FP4Cache.for_model(model, "bf16")
        generate(model, DynamicCache(), random_ids(5))


def test_masks_that_are_not_left_padding_are_refused():
    model = make_model()
    cache = FP4Cache.for_model(model, "bf16")
    ids = random_ids(6, rows=2)
    right = torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0]])
    with pytest.raises(InvalidInputError, match="left padding"):
        model(ids, attention_mask=right, **{CACHE: cache})
    cache.reset()
    forward(model, cache, ids, [6], right.flip(1))
    with pytest.raises(InvalidInputError, match="attention_mask: it pads"):
        forward(model, cache, random_ids(7, 2), [1])
    cache.reset()
    with pytest.raises(InvalidInputError, match="attention_mask: shape"):
        model(ids, attention_mask=right.flip(1)[:, 1:], **{CACHE: cache})


def test_more_than_causal_masks_are_refused():
    model = make_model()
    cache = FP4Cache.for_model(model, "bf16")
    with pytest.raises(UnsupportedError, match="attention_mask"):
        model(random_ids(4), attention_mask=torch.zeros(1, 1, 4, 4), **{CACHE: cache})


def test_nan_names_layer_and_tensor():
    model = make_model()
    cache = FP4Cache.for_model(model, "bf16")
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(InvalidInputError, match="layer 1 keys"):
        generate(model, cache, random_ids(5))


def test_calibration_and_recipe_are_checked():
    model = make_model()
    with pytest.raises(CalibrationError, match="needs one"):
        FP4Cache.for_model(model, "bitdecoding-nvfp4")
    with pytest.raises(CalibrationError, match="3 layers"):
        FP4Cache.for_model(model, "bitdecoding-nvfp4", calibration(3))
    with pytest.raises(InvalidInputError, match="unknown preset"):
        FP4Cache.for_model(model, "nvfp5")
    assert model.config._attn_implementation == "sdpa"


SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
UNSUPPORTED = {
    "deepseek_v3": ({"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 8, "n_group": 1}, "kv_lora_rank"),
    "mamba": ({}, "recurrent"),
    "jamba": ({"num_experts": 1, "mamba_expand": 1}, "recurrent"),
    "qwen3_next": ({"num_experts": 2}, "recurrent|linear_attention"),
    "llama4_text": ({"num_local_experts": 2, "pad_token_id": 0}, "chunk"),
    "gpt_oss": ({"num_local_experts": 2, "pad_token_id": 0}, "sinks"),
    "gemma3n_text": (
        {"vocab_size_per_layer_input": 32, "num_kv_shared_layers": 1, "intermediate_size": [32, 32]},
        "share",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_models_are_refused_by_name(kind):
    fields, feature = UNSUPPORTED[kind]
    config = AutoConfig.for_model(kind, **{**SMALL, **fields})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match=feature):
        FP4Cache.for_model(model, "bf16")


def test_encoder_decoder_and_odd_heads_are_refused():
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(
            T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
        )
        llama = AutoModelForCausalLM.from_config(LlamaConfig(**{**COMMON, "head_dim": 24}))
    with pytest.raises(UnsupportedError, match="encoder"):
        FP4Cache.for_model(t5, "bf16")
    with pytest.raises(UnsupportedError, match="head_dim"):
        FP4Cache.for_model(llama, "native-nvfp4-plain")


def test_a_window_that_the_configuration_does_not_tell_is_refused():
    model = make_model("mistral")
    cache = FP4Cache.for_model(model, "bf16")
    model.config.sliding_window = 99
    with pytest.raises(UnsupportedError, match="window of 99"):
        generate(model, cache, random_ids(5))
