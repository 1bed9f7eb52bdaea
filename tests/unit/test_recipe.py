"""Recipes: presets, JSON, arithmetic modes, and the combinations that are refused."""

import json

import pydantic
import pytest

from bitdecoding.errors import InvalidInputError, UnsupportedError
from bitdecoding.numerics import ProbabilityRule, ScaleRule
from bitdecoding.recipe import (
    PAGE_SIZE,
    SINK_TOKENS,
    Arithmetic,
    KeyRounding,
    KVFormat,
    ProbabilityFormat,
    QueryFormat,
    QuerySmoothing,
    Recipe,
    Rotation,
    ValueBlocks,
    get_recipe,
    preset_names,
    presets,
)

each_preset = pytest.mark.parametrize("name", preset_names())
FP4_PRESETS = [name for name in preset_names() if get_recipe(name).kv_format.blocks is not None]
OTHER_PRESETS = [name for name in preset_names() if name not in FP4_PRESETS]
OURS = [name for name in FP4_PRESETS if name.startswith("bitdecoding-")]
NVFP4 = {"name": "mine", "kv_format": "nvfp4"}


def test_presets_of_the_paper_and_its_tables_are_there():
    names = preset_names()
    assert len(names) == len(set(names)) >= 18
    expected = {"bf16", "fp8", "trtllm-nvfp4", "saw-int4", "turboquant-4bit", "native-nvfp4-plain"}
    expected |= {f"bitdecoding-{fmt}{part}" for fmt in ("nvfp4", "mxfp4") for part in ("", "-plus", "-page-centered")}
    assert expected < set(names)


@each_preset
def test_preset_validates_and_carries_its_name(name: str):
    recipe = get_recipe(name)
    assert recipe.name == name
    assert Recipe(**recipe.model_dump()) == recipe
    assert recipe.replace() == recipe
    recipe.check_head_dim(128)


@each_preset
def test_preset_has_a_line_of_documentation(name: str):
    assert len(presets()[name]) > 20
    assert "\n" not in presets()[name]


@pytest.mark.parametrize("name", preset_names() + [f"{name}-w16" for name in FP4_PRESETS])
def test_json_round_trip(name: str):
    recipe = get_recipe(name)
    text = recipe.to_json()
    assert Recipe.from_json(text) == recipe
    assert set(json.loads(text)) == set(Recipe.model_fields)


def test_json_may_leave_out_defaults():
    assert Recipe.from_json('{"name": "mine", "kv_format": "mxfp4"}') == Recipe(name="mine", kv_format=KVFormat.MXFP4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"^recipe: not valid JSON"),
        ("[1]", r"^recipe: expected a JSON object, got list"),
        ('{"name": "a", "kv_format": "nvfp4", "kappa": 1}', r"^recipe: unknown field 'kappa'; known fields are name"),
        ('{"name": "a", "kv_format": "fp5"}', r"^recipe: kv_format: "),
        ('{"kv_format": "nvfp4"}', r"^recipe: name: "),
        ('{"name": "a", "kv_format": "nvfp4", "sink_tokens": "many"}', r"^recipe: sink_tokens: "),
    ],
)
def test_bad_json(text: str, message: str):
    with pytest.raises(InvalidInputError, match=message):
        Recipe.from_json(text)


def test_unknown_field():
    with pytest.raises(InvalidInputError, match=r"^recipe: unknown field 'keyrule'; known fields are name, kv_format"):
        Recipe(**NVFP4, keyrule="max6")
    with pytest.raises(InvalidInputError, match=r"^recipe: unknown field 'keyrule'"):
        get_recipe("bf16").replace(keyrule="max6")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_format": "bf16", "key_rule": "max6"}, r"^recipe: key_rule: needs FP4 blocks, kv_format is bf16"),
        ({"kv_format": "int4", "value_rule": "ocp"}, r"^recipe: value_rule: needs FP4 blocks, kv_format is int4"),
        ({"kv_format": "lloyd4", "key_rounding": "ldlq"}, r"^recipe: key_rounding: needs FP4 blocks"),
        ({"kv_format": "fp8", "query_format": "fp4"}, r"^recipe: query_format: needs FP4 blocks"),
        ({"kv_format": "fp8", "query_format": "dual-fp4"}, r"^recipe: query_format: needs FP4 blocks"),
        ({"kv_format": "bf16", "probability_format": "fp4"}, r"^recipe: probability_format: needs FP4 blocks"),
        ({"kv_format": "bf16", "probability_format": "fp4-two-level"}, r"^recipe: probability_format: needs FP4"),
        ({"kv_format": "nvfp4", "key_rule": "search"}, r"^recipe: key_rule: search is not a nvfp4 rule; use max6"),
        ({"kv_format": "mxfp4", "value_rule": "max6"}, r"^recipe: value_rule: max6 is not a mxfp4 rule; use ocp, up"),
        ({"kv_format": "nvfp4", "probability_rule": "up"}, r"^recipe: probability_rule: up is not a nvfp4 rule"),
        ({"kv_format": "mxfp4", "probability_rule": "underflow"}, r"^recipe: probability_rule: underflow is not a mx"),
        ({"kv_format": "nvfp4", "sink_tokens": -1}, r"^recipe: sink_tokens: must be within 0..128, got -1"),
        ({"kv_format": "nvfp4", "sink_tokens": 129}, r"^recipe: sink_tokens: must be within 0..128, got 129"),
        ({"kv_format": "nvfp4", "ldlq_damping": 0}, r"^recipe: ldlq_damping: must be positive and finite, got 0"),
        (
            {"kv_format": "nvfp4", "ldlq_damping": float("nan")},
            r"^recipe: ldlq_damping: must be positive and finite, got nan",
        ),
        (
            {"kv_format": "nvfp4", "probability_c": 0},
            r"^recipe: probability_c: must be a power of two within 1/1024..1024, got 0",
        ),
        (
            {"kv_format": "nvfp4", "probability_c": 3},
            r"^recipe: probability_c: must be a power of two within 1/1024..1024, got 3",
        ),
        ({"kv_format": "fp8", "probability_rule": "max6"}, r"^recipe: probability_rule: needs FP4 blocks"),
        (
            {"kv_format": "nvfp4", "probability_tau": -1},
            r"^recipe: probability_tau: must be positive and finite, got -1",
        ),
        ({"kv_format": "nvfp4", "rotation_block": 16}, r"^recipe: rotation_block: only the hadamard rotation"),
        (
            {"kv_format": "nvfp4", "rotation": "hadamard", "rotation_block": 48},
            r"^recipe: rotation_block: must be a power of two, got 48",
        ),
        ({"kv_format": "nvfp4", "rotation": "random"}, r"^recipe: rotation_seed: the random rotation needs a seed"),
        ({"kv_format": "nvfp4", "rotation": "fourier"}, r"^recipe: rotation: "),
    ],
)
def test_combinations_that_make_no_sense(fields: dict[str, object], message: str):
    with pytest.raises(InvalidInputError, match=message):
        Recipe(name="mine", **fields)


def test_replace_checks_the_result_and_leaves_the_original():
    recipe = get_recipe("bitdecoding-nvfp4")
    changed = recipe.replace(name="no sink", sink_tokens=0)
    assert (changed.name, changed.sink_tokens, recipe.sink_tokens) == ("no sink", 0, SINK_TOKENS)
    assert changed.replace(name=recipe.name, sink_tokens=SINK_TOKENS) == recipe
    with pytest.raises(InvalidInputError, match=r"query_format: needs FP4 blocks"):
        recipe.replace(kv_format="bf16")


def test_recipes_are_immutable_and_hashable():
    recipe = get_recipe("bitdecoding-nvfp4")
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        recipe.sink_tokens = 3
    assert len({recipe, get_recipe("bitdecoding-nvfp4"), get_recipe("bf16")}) == 2


def test_unknown_preset():
    with pytest.raises(InvalidInputError, match=r"^recipe: unknown preset 'bitdecoding'; use one of bf16"):
        get_recipe("bitdecoding")
    with pytest.raises(InvalidInputError, match=r"^recipe: unknown preset 'nothing-w16'"):
        get_recipe("nothing-w16")


@pytest.mark.parametrize("name", FP4_PRESETS)
def test_w16_keeps_the_cache_and_drops_fp4_arithmetic(name: str):
    native, w16 = get_recipe(name), get_recipe(f"{name}-w16")
    assert w16.name == f"{name}-w16"
    assert w16.query_format is QueryFormat.BITS16
    assert w16.query_smoothing is QuerySmoothing.NONE
    assert w16.probability_format is ProbabilityFormat.BITS16
    arithmetic = ("name", "query_format", "query_smoothing", "probability_format")
    assert w16.model_dump(exclude={*arithmetic}) == native.model_dump(exclude={*arithmetic})
    assert w16.with_arithmetic(Arithmetic.W16) == w16


@pytest.mark.parametrize("name", OURS)
def test_native_and_w16_convert_into_each_other(name: str):
    native = get_recipe(name)
    assert get_recipe(f"{name}-w16").with_arithmetic("native") == native
    assert native.with_arithmetic("native") == native
    assert native.query_format is QueryFormat.DUAL_FP4
    assert native.probability_format is ProbabilityFormat.FP4


@pytest.mark.parametrize("name", OTHER_PRESETS)
def test_formats_without_fp4_blocks_have_one_arithmetic(name: str):
    with pytest.raises(UnsupportedError, match=rf"^arithmetic: recipe {name} has no FP4 blocks"):
        get_recipe(f"{name}-w16")


def test_unknown_arithmetic():
    with pytest.raises(InvalidInputError, match=r"^Arithmetic: 'w8' is unknown; use one of native, w16"):
        get_recipe("bitdecoding-nvfp4").with_arithmetic("w8")


@pytest.mark.parametrize(("fmt", "search", "standard"), [("nvfp4", "4over6", "max6"), ("mxfp4", "search", "ocp")])
def test_the_papers_recipe(fmt: str, search: str, standard: str):
    recipe = get_recipe(f"bitdecoding-{fmt}")
    assert recipe.effective_key_rule is ScaleRule(search)
    assert recipe.effective_value_rule is ScaleRule(standard)
    assert recipe.value_blocks is ValueBlocks.TOKENS
    assert recipe.key_smoothing
    assert recipe.rotation is Rotation.HADAMARD
    assert (recipe.sink_tokens, PAGE_SIZE) == (16, 128)
    assert recipe.probability_c == 8
    assert recipe.tau() == 21 / 1024
    assert not recipe.page_centered_keys
    plus = get_recipe(f"bitdecoding-{fmt}-plus")
    assert plus == recipe.replace(name=plus.name, page_centered_keys=True, key_rounding="ldlq")
    assert plus.ldlq_damping == 0.5


def test_plain_presets_use_nothing_but_the_standard_rules():
    for fmt, rule in (("nvfp4", "max6"), ("mxfp4", "ocp")):
        recipe = get_recipe(f"native-{fmt}-plain")
        assert recipe.effective_key_rule is recipe.effective_value_rule is ScaleRule(rule)
        assert recipe.probability_rule is ProbabilityRule(rule)
        assert recipe.probability_c == 1
        assert recipe.query_format is QueryFormat.FP4
        assert (recipe.rotation, recipe.sink_tokens, recipe.key_smoothing) == (Rotation.NONE, 0, False)


def test_rules_in_force():
    recipe = Recipe(**NVFP4, key_rule="max4", value_rule="4over6")
    assert recipe.effective_key_rule is ScaleRule.MAX4
    assert recipe.effective_value_rule is ScaleRule.FOUR_OVER_SIX
    assert get_recipe("bf16").effective_key_rule is get_recipe("bf16").effective_value_rule is None


def test_threshold_in_force():
    recipe = get_recipe("bitdecoding-nvfp4")
    assert recipe.tau(0.5) == 0.5
    assert recipe.replace(probability_tau=0.25).tau(0.5) == 0.25
    assert recipe.replace(probability_tau=0.25).tau() == 0.25


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"key_smoothing": True}, True),
        ({"key_rounding": KeyRounding.LDLQ}, True),
        ({"query_smoothing": QuerySmoothing.TOKEN}, True),
        ({"query_smoothing": QuerySmoothing.GQA}, False),
        ({"page_centered_keys": True, "rotation": Rotation.HADAMARD}, False),
    ],
)
def test_what_needs_a_calibration(changes: dict[str, object], needs: bool):
    assert Recipe(**NVFP4, **changes).needs_calibration is needs


@pytest.mark.parametrize(
    ("fields", "head_dim", "message"),
    [
        ({"kv_format": "mxfp4"}, 80, r"^head_dim: 80 is not a multiple of 32, the mxfp4 block"),
        ({"kv_format": "nvfp4"}, 72, r"^head_dim: 72 is not a multiple of 16, the nvfp4 block"),
        ({"kv_format": "int4"}, 65, r"^head_dim: 65 is no positive even number"),
        ({"kv_format": "nvfp4", "rotation": "hadamard", "rotation_block": 32}, 80, r"^rotation_block: 32 does not"),
    ],
)
def test_head_dims_that_cannot_be_stored(fields: dict[str, object], head_dim: int, message: str):
    with pytest.raises(UnsupportedError, match=message):
        Recipe(name="mine", **fields).check_head_dim(head_dim)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_dims_that_can(head_dim: int):
    get_recipe("bitdecoding-nvfp4").check_head_dim(head_dim)
    if head_dim != 80:
        get_recipe("bitdecoding-mxfp4").check_head_dim(head_dim)


@pytest.mark.parametrize("name", ["", "  "])
def test_a_recipe_has_a_name(name: str) -> None:
    with pytest.raises(InvalidInputError, match="name: must not be empty"):
        Recipe(name=name, kv_format="bf16")


def test_presets_are_described_by_their_names() -> None:
    assert not any("_" in text or "`" in text for text in presets().values())
