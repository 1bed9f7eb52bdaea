"""The command line, run in this process on a tiny random model."""

import functools
import io
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny_model import CHAT_TEMPLATE, CONTEXT, save_tiny_model, text

from bitdecoding import __version__, models
from bitdecoding.calibration import CALIBRATION_PROMPTS, compute
from bitdecoding.calibration.compute import calibrate
from bitdecoding.calibration.storage import load_calibration, save_calibration
from bitdecoding.cli import main, options
from bitdecoding.cli.calibrations import cached_path, without_calibration
from bitdecoding.errors import UnsupportedError
from bitdecoding.evaluation import TeacherForcing, load_trajectories
from bitdecoding.models import load_model
from bitdecoding.recipe import KeyRounding, QuerySmoothing, get_recipe, preset_names

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = text(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def raw_model(tmp_path_factory) -> str:
    """Other weights, and no chat template."""
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "raw", seed=1))


@pytest.fixture(scope="module")
def calibration(model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("calibrations") / "tiny.safetensors"
    save_calibration(calibrate(load_model(model), window=400, prompts=CALIBRATION_PROMPTS[:2], new_tokens=8), path)
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("a", "b", "c")):
        (folder / f"{name}.txt").write_text(text(300, seed))
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("BITDECODING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(capsys):
    """Runs a command that works; returns its standard output and error."""

    def run(*arguments: str) -> tuple[str, str]:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out, captured.err

    return run


@pytest.fixture
def fail(capsys):
    """Runs a command that fails with this code and one line that starts with ``error:``; returns the line."""

    def fail(code: int, *arguments: str) -> str:
        capsys.readouterr()
        actual = main(arguments)
        captured = capsys.readouterr()
        assert actual == code, captured.err
        *_, line = captured.err.splitlines()
        assert line.startswith("error: ")
        assert captured.err.count("error:") == 1
        assert "Traceback" not in captured.err
        return line

    return fail


# --- The program


def test_version(run):
    assert run("--version")[0] == f"bitdecoding {__version__}\n"


@pytest.mark.parametrize("command", ["generate", "calibrate", "kl", "inspect", "info"])
def test_every_command_has_help_with_an_example(run, command):
    out, _ = run(command, "--help")
    assert f"Example: bitdecoding {command}" in out
    assert command in run("--help")[0]


def test_help_is_quick_because_it_loads_no_torch():
    program = (
        "import sys; from bitdecoding.cli import main; code = main(['kl', '--help']); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command"),
        (["kll"], "No such command 'kll'"),
        (["kl"], "Missing argument 'MODEL'"),
        (["kl", "m", "--steps", "many"], "--steps"),
        (["kl", "m", "--steps", "0"], "--steps"),
        (["generate", "m", "hello", "--nonsense"], "No such option"),
        (["calibrate", "m"], "--output"),
    ],
)
def test_usage_errors(fail, arguments, message):
    line = fail(2, *arguments)
    assert message in line
    assert "--help" in line


def raising(error: BaseException):
    def function(*args, **kwargs):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), 1, "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), 1, "out of memory"),
        (OSError(28, "No space left on device", "results.json"), 1, "No space left on device: results.json"),
        (UnsupportedError("model: two\nlines"), 2, "model: two lines"),
    ],
)
def test_failures_are_one_line(fail, monkeypatch, error, code, message):
    monkeypatch.setattr(models, "load_model", raising(error))
    assert message in fail(code, "calibrate", "m", "-o", "x.safetensors")


def test_bugs_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(models, "load_model", raising(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["calibrate", "m", "-o", "x.safetensors"])


def test_warnings_are_one_line(run, monkeypatch, model):
    def warn(*args, **kwargs):
        warnings.warn("keys saturate", stacklevel=1)
        return load_model(*args, **kwargs)

    monkeypatch.setattr(models, "load_model", warn)
    _, err = run("generate", model, PROMPT, "--recipe", "fp8", "--max-new-tokens", "1")
    assert err.splitlines()[0] == "warning: keys saturate"


def test_models_that_cannot_be_loaded(fail, model, tmp_path):
    assert "no file or folder" in fail(1, "generate", "./nowhere", "hello")
    broken = Path(shutil.copytree(model, tmp_path / "broken"))
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot load 'broken'" in fail(1, "generate", str(broken), "hello", "--recipe", "fp8")


def test_devices_and_dtypes_that_do_not_exist(fail, model):
    assert "device: 'abacus'" in fail(2, "generate", model, "hello", "--device", "abacus")
    assert "dtype: 'int3'" in fail(2, "generate", model, "hello", "--dtype", "int3")


# --- generate


def test_generate_streams_text_and_reports_memory(run, model, calibration):
    out, err = run("generate", model, PROMPT, "--calibration", calibration, "--max-new-tokens", "5", "--raw")
    loaded = load_model(model)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    exact = loaded.model.generate(ids, do_sample=False, max_new_tokens=5)[0, ids.shape[1] :]
    assert out[:1] == loaded.tokenizer.decode(exact)[:1]  # the prefill is exact, and gives the first token
    assert err.startswith("cache (bitdecoding-nvfp4): 304 tokens: ")
    assert "BF16 needs 0.15 MiB" in err


@pytest.mark.parametrize(("option", "tokens"), [([], 300 + 17), (["--chat"], 300 + 17), (["--raw"], 300)])
def test_generate_uses_the_chat_template(run, model, option, tokens):
    _, err = run("generate", model, PROMPT, "--recipe", "fp8", "--max-new-tokens", "1", *option)
    assert f"cache (fp8): {tokens} tokens" in err


def test_generate_without_a_chat_template(run, fail, raw_model):
    _, err = run("generate", raw_model, PROMPT, "--recipe", "fp8", "--max-new-tokens", "1")
    assert "300 tokens" in err
    assert "no chat template; use --raw" in fail(2, "generate", raw_model, PROMPT, "--chat")


def test_generate_reads_files_and_standard_input(run, fail, model, tmp_path, monkeypatch):
    command = ["generate", model, "--recipe", "fp8", "--max-new-tokens", "1", "--raw"]
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    assert "300 tokens" in run(*command, "--prompt-file", str(path))[1]
    for source in (["-"], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT[:50]))
        assert "50 tokens" in run(*command, *source)[1]
    path.write_bytes(b"\xff\xff")
    assert "not UTF-8" in fail(2, *command, "--prompt-file", str(path))
    assert "cannot read" in fail(2, *command, "--prompt-file", str(tmp_path))


@pytest.mark.parametrize("prompt", [[""], ["  \n"]])
def test_empty_prompts(fail, model, prompt):
    assert "prompt: is empty" in fail(2, "generate", model, *prompt)


def test_one_prompt_is_needed(fail, model):
    for prompt in ([], ["hello", "--prompt-file", "file.txt"]):
        assert "give either PROMPT" in fail(2, "generate", model, *prompt)


def test_context_overflow(fail, model):
    line = fail(2, "generate", model, text(CONTEXT - 10), "--raw", "--max-new-tokens", "11")
    assert f"{CONTEXT - 10} tokens and 11 new ones exceed the model's context of {CONTEXT}" in line


def test_temperature_samples(run, model):
    command = ["generate", model, PROMPT, "--recipe", "fp8", "--max-new-tokens", "8"]
    greedy = {run(*command)[0] for _ in range(2)}
    torch.manual_seed(0)
    sampled = {run(*command, "--temperature", "2")[0] for _ in range(3)}
    assert len(greedy) == 1
    assert len(sampled) == 3


# --- Recipes


def test_recipes_from_files_and_arithmetic(run, fail, model, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(get_recipe("native-nvfp4-plain").replace(name="mine").to_json())
    command = ["generate", model, PROMPT, "--max-new-tokens", "1", "--recipe"]
    assert "cache (mine)" in run(*command, str(path))[1]
    assert "cache (mine-w16)" in run(*command, str(path), "--arithmetic", "w16")[1]
    assert "'w8' is unknown" in fail(2, *command, str(path), "--arithmetic", "w8")
    assert "no FP4 blocks" in fail(2, *command, "fp8", "--arithmetic", "w16")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"name": "x", "kv_format": "nvfp4", "rotatoin": "none"}', "unknown field 'rotatoin'"),
        ('{"name": "x", "kv_format": "nvfp5"}', "kv_format"),
        ('{"kv_format": "nvfp4"}', "name"),
        ("[]", "expected a JSON object"),
        ("{", "not valid JSON"),
    ],
)
def test_malformed_recipe_files(fail, model, tmp_path, content, message):
    path = tmp_path / "mine.json"
    path.write_text(content)
    assert message in fail(2, "generate", model, PROMPT, "--recipe", str(path))


def test_unknown_recipes(fail, model):
    assert "unknown preset 'nope'" in fail(2, "generate", model, PROMPT, "--recipe", "nope")
    assert "cannot read nope.json" in fail(2, "kl", model, "--recipe", "nope.json")


def test_models_that_a_recipe_cannot_store(fail, tmp_path):
    folder = Path(save_tiny_model(tmp_path / "odd"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 24}))
    from transformers import AutoConfig, LlamaForCausalLM

    LlamaForCausalLM(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    assert "head_dim: 24" in fail(2, "generate", str(folder), PROMPT)
    assert "head_dim: 24" in fail(2, "kl", str(folder), "--texts", str(folder / "config.json"))


# --- Calibrations


@pytest.fixture
def quick_calibration(monkeypatch) -> list[str]:
    """Makes the cached calibration cheap; gets an entry whenever one is computed."""
    computed = []

    def quick(loaded, **arguments):
        computed.append(loaded.model_id)
        return calibrate(loaded, prompts=CALIBRATION_PROMPTS[:1], new_tokens=2, **arguments)

    monkeypatch.setattr(compute, "calibrate", quick)
    return computed


def test_calibration_is_computed_once_and_cached(run, model, cache, quick_calibration):
    command = ["generate", model, PROMPT, "--max-new-tokens", "1"]
    _, err = run(*command)
    path = cached_path(load_model(model), CONTEXT)
    assert path.parent == cache / "calibrations"
    assert path.name.endswith(f"-w{CONTEXT}.safetensors")
    assert load_calibration(path).metadata["window"] == CONTEXT
    assert f"calibrating tiny, once; kept in {path}" in err
    assert "calibrating: prefill" in err
    assert "calibrating" not in run(*command)[1]
    assert quick_calibration == ["tiny"]


def test_damaged_cached_calibration_is_computed_again(run, model, quick_calibration):
    path = cached_path(load_model(model), CONTEXT)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nonsense")
    assert "damaged" in run("generate", model, PROMPT, "--max-new-tokens", "1")[1]
    assert quick_calibration == ["tiny"]
    load_calibration(path)


@pytest.mark.parametrize("recipe", ["fp8", "bf16", "native-nvfp4-plain", "saw-int4"])
def test_recipes_that_gain_nothing_compute_no_calibration(run, model, cache, recipe):
    run("generate", model, PROMPT, "--max-new-tokens", "1", "--recipe", recipe)
    assert not cache.exists()


def test_calibration_none_switches_off_what_needs_one(run, model, cache):
    command = ["generate", model, PROMPT, "--max-new-tokens", "1", "--calibration", "none", "--recipe"]
    _, err = run(*command, "bitdecoding-nvfp4-plus")
    note, memory = err.splitlines()
    assert note.startswith("note: bitdecoding-nvfp4-plus runs without a calibration and so without key smoothing (")
    assert "LDLQ (" in note
    assert memory.startswith("cache (bitdecoding-nvfp4-plus without calibration)")
    assert "note" not in run(*command, "fp8")[1]
    assert not cache.exists()


@pytest.mark.parametrize("name", preset_names())
def test_without_calibration_keeps_the_rest(name):
    recipe = get_recipe(name)
    changed = without_calibration(recipe)
    assert not changed.needs_calibration
    kept = {"name", "key_smoothing", "key_rounding", "query_smoothing"}
    assert changed.model_dump(exclude=kept) == recipe.model_dump(exclude=kept)
    assert (changed == recipe) == (not recipe.needs_calibration)
    if recipe.query_smoothing is QuerySmoothing.GQA:
        assert changed.query_smoothing is QuerySmoothing.GQA
    assert changed.key_rounding is KeyRounding.NEAREST


def test_calibration_of_another_model(run, fail, raw_model, calibration):
    command = ["generate", raw_model, PROMPT, "--max-new-tokens", "1", "--calibration", calibration]
    line = fail(2, *command)
    assert "made for model_id tiny, this is raw" in line
    assert "--allow-mismatch" in line
    run(*command, "--allow-mismatch")


def test_damaged_and_missing_calibrations(fail, model, calibration, tmp_path):
    path = tmp_path / "half.safetensors"
    path.write_bytes(Path(calibration).read_bytes()[:500])
    assert "damaged" in fail(2, "generate", model, PROMPT, "--calibration", str(path))
    assert "no file" in fail(2, "generate", model, PROMPT, "--calibration", str(tmp_path / "nowhere"))


def test_calibrate_writes_a_file(run, fail, model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n\nThe end \n")
    output = tmp_path / "new" / "tiny.safetensors"
    command = ["calibrate", model, "-o", str(output), "--window", "400", "--new-tokens", "3"]
    out, err = run(*command, "--prompts-file", str(prompts))
    assert out.startswith(f"{output}: 2 layers of tiny, threshold tau 0.")
    assert "calibrating: probability threshold" in err
    metadata = load_calibration(output).metadata
    assert metadata["prompts"] == ["Once upon a time", "The end"]
    assert (metadata["window"], metadata["new_tokens"]) == (400, 3)
    before = output.read_bytes()
    assert "exists; --force" in fail(2, *command)
    assert output.read_bytes() == before
    run(*command, "--prompts-file", str(prompts), "--force", "--window", "330")
    assert load_calibration(output).metadata["window"] == 330


def test_calibrate_refuses_wrong_input(fail, model, tmp_path):
    output = str(tmp_path / "tiny.safetensors")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert "holds no prompt" in fail(2, "calibrate", model, "-o", output, "--prompts-file", str(empty))
    assert "cannot read" in fail(2, "calibrate", model, "-o", output, "--prompts-file", "nowhere.txt")
    assert "window: 100 tokens are too few" in fail(2, "calibrate", model, "-o", output, "--window", "100")
    assert "is a folder" in fail(2, "calibrate", model, "-o", str(tmp_path), "--force")
    assert "cannot make the folder" in fail(2, "calibrate", model, "-o", str(empty / "x.safetensors"))


# --- kl


@pytest.fixture
def kl(model, calibration) -> list[str]:
    return ["kl", model, "--calibration", calibration, "--prompt-tokens", "200", "--steps", "4"]


def test_kl_compares_recipes_and_resumes(run, kl, texts, tmp_path, monkeypatch):
    results, trajectories = tmp_path / "kl.json", tmp_path / "trajectories.json"
    command = [*kl, "--recipe", "bitdecoding-nvfp4", "--recipe", "fp8", "--draws", "2"]
    command += ["--texts", texts, "--output", str(results), "--trajectories", str(trajectories)]
    out, _ = run(*command)
    assert [(t.name, t.prompt_length, t.steps) for t in load_trajectories(trajectories)] == [
        (name, 200, 4) for name in "abc"
    ]
    content = json.loads(results.read_text())
    assert len(content["cells"]) == 3 * (2 + 1)
    first, second = (line for line in out.splitlines() if line.startswith("│"))
    nvfp4, fp8 = content["summary"]["recipes"]
    assert [cell.strip() for cell in first.strip("│").split("│")] == [
        "bitdecoding-nvfp4",
        f"{nvfp4['mean_kl']:.5f}",
        f"{1 - nvfp4['mean_top1_mismatch']:.2%}",
        *("1", "", "", ""),
    ]
    cells = [cell.strip() for cell in second.strip("│").split("│")]
    assert cells[0] == "fp8"
    assert float(cells[3]) == pytest.approx(fp8["mean_kl"] / nvfp4["mean_kl"], abs=1e-3)
    wins = sum(a < b for a, b in zip(fp8["kl_per_trajectory"], nvfp4["kl_per_trajectory"], strict=True))
    assert cells[6] == f"{wins}/3"

    monkeypatch.setattr(TeacherForcing, "run", raising(AssertionError("computed again")))
    again, err = run(*command)
    assert again == out
    assert f"trajectories of {trajectories}" in err


def test_kl_in_markdown_against_a_recipe_not_named(run, kl, texts):
    out, _ = run(*kl, "--recipe", "fp8", "--texts", f"{texts}/a.txt", "--against", "bf16", "--markdown")
    header, rule, fp8, bf16 = out.splitlines()
    assert header.startswith("| recipe | mean KL [nats] | top-1 agreement |")
    assert rule == "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    # One text: no t test; the reference itself diverges by nothing
    assert fp8.startswith("| fp8 | 0.0")
    assert fp8.endswith("| inf |  |  | 0/1 |")
    assert bf16 == "| bf16 | 0.00000 | 100.00% | 1 |  |  |  |"


def test_kl_runs_the_default_recipes(run, kl, texts):
    out, _ = run(*kl, "--texts", f"{texts}/a.txt", "--markdown")
    names = [line.split(" | ")[0].strip("| ") for line in out.splitlines()[2:]]
    assert names == ["bitdecoding-nvfp4", "bitdecoding-mxfp4", "trtllm-nvfp4", "fp8", "native-nvfp4-plain"]


def test_kl_refuses_wrong_input(fail, kl, texts, tmp_path):
    assert "use --texts DIR" in fail(2, *kl)
    assert "use --texts DIR" in fail(2, *kl, "--texts", str(tmp_path))
    assert "use --texts DIR" in fail(2, *kl, "--trajectories", str(tmp_path / "nowhere.json"))
    assert "names must differ" in fail(2, *kl, "--texts", texts, "--texts", f"{texts}/a.txt")
    assert "cannot read" in fail(2, *kl, "--texts", str(tmp_path / "nowhere.txt"))
    assert "names must differ" in fail(2, *kl, "--texts", texts, "--recipe", "fp8", "--recipe", "fp8")
    assert "unknown preset" in fail(2, *kl, "--texts", texts, "--against", "nope")
    assert "exceed the model's context" in fail(2, *kl, "--texts", texts, "--steps", str(CONTEXT))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert "trajectories" in fail(2, *kl, "--trajectories", str(broken))
    assert "choose another file" in fail(2, *kl, "--texts", f"{texts}/a.txt", "--output", str(broken))


# --- inspect


@pytest.fixture
def inspect(model, calibration, texts) -> list[str]:
    return ["inspect", model, "--calibration", calibration, "--text", f"{texts}/a.txt"]


def test_inspect_prints_a_row_a_layer(run, inspect, tmp_path):
    path = tmp_path / "new" / "inspection.json"
    out, err = run(*inspect, "--tokens", "250", "--json", str(path), "--plots", str(tmp_path / "charts"))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["0", "1", "mean"]
    content = json.loads(path.read_text())
    assert (content["model_id"], content["tokens"]) == ("tiny", 250)
    assert content["recipe"]["name"] == "bitdecoding-nvfp4"
    layers = content["layers"]
    assert rows[1][1] == f"{layers[1]['raw_keys']:.3f}"
    assert rows[2][4] == f"{(layers[0]['plain']['blocks'] + layers[1]['plain']['blocks']) / 2:.2%}"
    assert rows[0][7] == f"{layers[0]['recipe']['mass']:.2e}"
    assert len(list((tmp_path / "charts").glob("*.png"))) == err.count("wrote ") == 2


def test_inspect_lets_the_model_write_the_text(run, model, calibration, monkeypatch):
    written = functools.partial(compute.calibration_tokens, new_tokens=2)
    monkeypatch.setattr(compute, "calibration_tokens", lambda loaded, prompts, new_tokens: written(loaded, prompts[:2]))
    _, err = run("inspect", model, "--calibration", calibration)
    assert "the model writes the text" in err


def test_inspect_refuses_wrong_input(fail, inspect, tmp_path):
    assert "at least 192" in fail(2, *inspect, "--tokens", "191")
    assert "no NVFP4 probabilities" in fail(2, *inspect, "--recipe", "fp8")
    assert "cannot read" in fail(2, *inspect[:-1], str(tmp_path / "nowhere.txt"))
    assert "is a folder" in fail(2, *inspect, "--json", str(tmp_path))


def test_inspect_names_the_extra_before_any_work(fail, inspect, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(models, "load_model", raising(AssertionError("loaded the model")))
    assert "bitdecoding-fp4[plots]" in fail(2, *inspect, "--plots", str(tmp_path / "charts"))
    assert not (tmp_path / "charts").exists()


# --- info


def test_info(run, cache):
    out, _ = run("info")
    for expected in (f"bitdecoding-fp4 {__version__}", "both in PyTorch", str(cache), *preset_names()):
        assert expected in out


def test_info_as_json(run, cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    content = json.loads(run("info", "--json")[0])
    assert content["versions"]["torch"] == torch.__version__
    cpu, gpu = content["devices"]
    assert (cpu["device"], cpu["compute_capability"]) == ("cpu", None)
    assert (gpu["device"], gpu["name"], gpu["compute_capability"]) == ("cuda:0", "H200", "9.0")
    assert "both in PyTorch" in cpu["arithmetic"] and gpu["arithmetic"].startswith("kernels for sm_90a")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    old = json.loads(run("info", "--json")[0])["devices"][1]["arithmetic"]
    assert "both in PyTorch" in old and "no kernels for compute capability 8.0" in old
    assert list(content["presets"]) == preset_names()
    assert content["cache_folder"] == str(cache)


def test_device_is_a_gpu_where_there_is_one(monkeypatch):
    asked = []
    monkeypatch.setattr(models, "load_model", lambda source, **arguments: asked.append(arguments["device"]))
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)  # noqa: B023 - called at once
        options.open_model("m", None, "auto")
    options.open_model("m", "cpu", "auto")
    assert asked == ["cpu", "cuda", "cpu"]
