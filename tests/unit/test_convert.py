"""Conversions of the settings of a loss scale: every pair of formats, what they cannot hold, and what cannot be meant.

Run as a script this file writes the golden files, tests/unit/convert/*.golden, anew.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given

from distscale import ConfigError, cli, policy
from distscale.commands import texts
from distscale.config import load_config
from distscale.convert import FORMATS, convert, recognize, sources
from distscale.convert.rule import ScalingRule, differences
from distscale.policy import DynamicScale
from distscale.sections import ScalerSection

FOLDER = Path(__file__).with_name("convert")


def golden(source: str) -> str:
    """One file of ``source``, converted to every format."""
    text = (FOLDER / f"{source}.txt").read_text()
    parts = []
    for target in FORMATS:
        converted = convert(text, target, where=f"{source}.txt")
        assert converted.source == source
        notes = "".join(f"note: {note}\n" for note in converted.notes)
        parts.append(f"==== {source} to {target}\n{converted.text}{notes}")
    return "\n".join(parts)


@pytest.mark.parametrize("source", FORMATS)
def test_each_pair_gives_what_its_golden_file_says(source: str) -> None:
    assert golden(source) == (FOLDER / f"{source}.golden").read_text()


# --- what is written is read back ---

COUNTS = st.integers(1, 5000) | st.just(policy.MAX_COUNT)
SCALES = st.integers(-126, 126).map(lambda power: 2.0**power) | st.floats(policy.MIN_SCALE, policy.MAX_SCALE)


@st.composite
def rules(draw: st.DrawFn) -> ScalingRule:
    low, start, high = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
    rule = ScalingRule(
        dtype=draw(st.sampled_from(["fp16", "fp16", "bf16", "fp32"])),
        mode=draw(st.sampled_from(["dynamic", "dynamic", "static", "none"])),
        init_scale=start,
        growth_factor=draw(st.just(2.0) | st.floats(1.0, 1e6, exclude_min=True)),
        backoff_factor=draw(st.just(0.5) | st.floats(0.0, 1.0, exclude_min=True, exclude_max=True)),
        growth_interval=draw(COUNTS),
        growth_delay=draw(st.integers(0, 3)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_refill=draw(st.none() | st.integers(1, 20)),
        min_scale=low if draw(st.booleans()) and low > policy.MIN_SCALE else None,
        max_scale=high if draw(st.booleans()) and high < policy.MAX_SCALE else None,
        at_floor=draw(st.sampled_from(["raise", "skip"])),
        max_consecutive_skips=draw(st.none() | st.integers(1, 1000)),
        skips_nonfinite=draw(st.booleans()),
        max_norm=draw(st.none() | st.sampled_from([0.0, 1e-5, 1.0, math.inf])),
    )
    return rule.simplest()


@pytest.mark.parametrize("name", FORMATS)
@given(rule=rules())
def test_what_a_format_holds_it_reads_back_and_what_it_does_not_is_told(name: str, rule: ScalingRule) -> None:
    module = FORMATS[name]
    held = module.hold(rule)
    text = module.render(held)
    values = module.find(text, "it") if text else {}  # Megatron's FP32 is no argument at all
    assert values is not None
    assert module.read(values, "it").rule == held
    assert module.hold(held) == held
    told = {note.partition(":")[0] for note in differences(rule, held, name, module.REASONS)}
    differ = {
        field.name for field in dataclasses.fields(rule) if getattr(rule, field.name) != getattr(held, field.name)
    }
    # One note says it for several fields where one of them makes the others idle.
    idle = {"max_norm"} if rule.max_norm == 0 and held.max_norm is None else set()
    idle |= {"hysteresis_refill"} if "hysteresis" in differ and held.hysteresis == 1 else set()
    idle |= {"max_consecutive_skips"} if "at_floor" in differ else set()
    if "mode" in differ:
        idle |= differ - {"mode", "at_floor", "skips_nonfinite", "max_consecutive_skips", "max_norm", "dtype"}
        told -= {"init_scale"}
    assert told == differ - idle


# --- what is written means to the target what was meant ---

PLAIN = ScalingRule(
    init_scale=4096.0,
    growth_interval=500,
    hysteresis=2,
    min_scale=1.0,
    max_scale=2.0**24,
    at_floor="raise",
    max_norm=0.5,
)


def test_the_toml_is_a_scaler_section_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for rule in (
        PLAIN,
        dataclasses.replace(PLAIN, growth_delay=1, hysteresis_refill=7, at_floor="skip", max_scale=None),
    ):
        held = FORMATS["toml"].hold(rule)
        file.write_text('[run]\nname = "a"\n' + FORMATS["toml"].render(held))
        config = load_config(file)
        assert config.precision.dtype == "fp16"
        fields = {field.name for field in dataclasses.fields(DynamicScale)}
        scale = DynamicScale(**{name: value for name, value in config.scaler.model_dump().items() if name in fields})
        assert scale == DynamicScale(
            4096.0,
            growth_interval=500,
            hysteresis=2,
            hysteresis_refill=rule.hysteresis_refill,
            growth_delay=rule.growth_delay,
            min_scale=1.0,
            max_scale=rule.max_scale or policy.MAX_SCALE,
        )
        assert config.scaler.max_norm == 0.5
        assert config.scaler.max_consecutive_skips == (100 if rule.at_floor == "raise" else policy.MAX_COUNT)


def test_the_toml_has_no_keys_that_are_idle() -> None:
    head = '[precision]\ndtype = "fp16"\n\n[scaler]\n'
    for mode, scale in (("none", ""), ("static", "init_scale = 8.0\n")):
        text = f'{head}policy = "{mode}"\n{scale}max_consecutive_skips = 7\n'
        assert convert(text, "toml").text == text


def test_a_scaler_is_written_in_fp16_only() -> None:
    source = '[precision]\ndtype = "bf16"\n[scaler]\nmax_norm = 0.5'
    assert convert(source, "accelerate").text == 'Accelerator(\n    mixed_precision="bf16",\n)\n'
    assert convert(source, "colossalai").text == 'LowLevelZeroPlugin(\n    precision="bf16",\n    max_norm=0.5,\n)\n'
    assert convert(source, "nemo").text == "trainer:\n  precision: bf16-mixed\n  gradient_clip_val: 0.5\n"
    assert convert(source, "nemo2").text == 'MegatronMixedPrecision(\n    precision="bf16-mixed",\n)\n'


def test_every_key_of_the_scaler_section_is_converted() -> None:
    for key in ScalerSection.model_fields:
        with pytest.raises(ConfigError, match=rf"scaler\.{key}s; did you mean"):
            convert(f"[scaler]\n{key}s = 1", "toml")


def test_megatrons_arguments_parse_as_megatron_parses_them() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fp16", action="store_true")
    for name in ("--loss-scale", "--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--clip-grad"):
        parser.add_argument(name, type=float)
    parser.add_argument("--hysteresis", type=int)
    megatron = FORMATS["megatron"]
    parsed = parser.parse_args(shlex.split(megatron.render(megatron.hold(PLAIN)).replace("\\\n", "")))
    assert vars(parsed) == {
        "fp16": True,
        "loss_scale": None,
        "initial_loss_scale": 4096.0,
        "min_loss_scale": 1.0,
        "loss_scale_window": 500.0,
        "clip_grad": 0.5,
        "hysteresis": 2,
    }


def test_accelerates_own_classes_take_the_call() -> None:
    from accelerate.utils import GradScalerKwargs

    accelerate = FORMATS["accelerate"]
    made: dict[str, Any] = {}
    code = accelerate.render(accelerate.hold(PLAIN))
    eval(code, {"Accelerator": lambda **arguments: made.update(arguments), "GradScalerKwargs": GradScalerKwargs})
    assert made["mixed_precision"] == "fp16"
    assert made["kwargs_handlers"] == [GradScalerKwargs(init_scale=4096.0, growth_interval=500)]


def test_small_and_large_numbers_stay_numbers_in_yaml() -> None:
    nemo = FORMATS["nemo"]
    for number in (1e-5, 1e16, policy.MIN_SCALE, 2.0**126):
        rule = nemo.hold(ScalingRule(init_scale=max(number, policy.MIN_SCALE), max_norm=number))
        read = yaml.safe_load(nemo.render(rule))
        assert read["trainer"]["gradient_clip_val"] == number
        assert read["model"]["native_amp_init_scale"] == rule.init_scale


# --- what sources leave open ---


def rule_of(text: str, source: str | None = None) -> ScalingRule:
    name = source or recognize(text, "it")
    values = FORMATS[name].find(text, "it")
    assert values is not None
    return FORMATS[name].read(values, "it").rule


DEEPSPEEDS = ScalingRule(
    growth_interval=1000, growth_delay=1, hysteresis=2, min_scale=1.0, at_floor="raise", max_norm=1.0
)
MEGATRONS = ScalingRule(init_scale=2.0**32, growth_interval=1000, hysteresis=2, min_scale=1.0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"fp16": {"enabled": true}, "train_batch_size": 8}', DEEPSPEEDS),
        ('{"fp16": {"enabled": true}}', dataclasses.replace(DEEPSPEEDS, max_norm=None)),
        ("--fp16", MEGATRONS),
        ("--fp16 --train-iters 5", dataclasses.replace(MEGATRONS, max_norm=1.0)),
        ("MegatronMixedPrecision()", MEGATRONS),
        (
            "native_amp_growth_interval: 1000",
            ScalingRule(init_scale=2.0**32, growth_interval=1000, hysteresis=2, hysteresis_refill=1),
        ),
        (
            "GeminiPlugin()",
            ScalingRule(growth_interval=1000, hysteresis=2, min_scale=1.0, max_scale=2.0**32, max_norm=0.0),
        ),
        ("GradScalerKwargs()", ScalingRule()),
        ("max_grad_norm: 2.0\nfp16: true", ScalingRule(max_norm=2.0)),
        ("TrainingArguments('out', fp16=True)", ScalingRule(max_norm=1.0)),
        ('{"fp16": false, "bf16": null}', ScalingRule("fp32", "none", skips_nonfinite=False, max_norm=1.0).simplest()),
        ("[scaler]", ScalingRule(at_floor="raise", max_consecutive_skips=100, max_norm=0.0)),
    ],
)
def test_what_is_not_said_has_the_default_of_its_source(text: str, rule: ScalingRule) -> None:
    assert rule_of(text) == rule


TINY = ScalingRule(init_scale=policy.MIN_SCALE, growth_interval=1000, hysteresis=2, max_scale=2.0**32, max_norm=0.0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"bf16": {"enabled": true}}', ScalingRule("bf16", "none", 1.0)),
        ('{"bf16": {"enabled": true}, "bfloat16": {"enabled": false}}', ScalingRule("bf16", "none", 1.0)),
        ('{"fp16": {"enabled": true, "loss_scale": 0}}', dataclasses.replace(DEEPSPEEDS, max_norm=None)),
        ("--fp16 --loss-scale 0", MEGATRONS),
        ("# --bf16\n--fp16 # or --bf16\n--loss-scale 128", ScalingRule("fp16", "static", 128.0)),
        ('{"bfloat16": {"enabled": true, "check_grad_overflow": false}}', "applied"),
        ('{"fp16": {"enabled": "auto"}, "bf16": {"enabled": true}}', ScalingRule("bf16", "none", 1.0)),
        ('{"fp16": {"enabled": true, "loss_scale": 128}}', ScalingRule("fp16", "static", 128.0)),
        ("--bf16 --loss-scale 1", ScalingRule("bf16", "none", 1.0)),
        ("--bf16 --initial-loss-scale 4096", "applied"),
        ("--fp16 --loss-scale 128", ScalingRule("fp16", "static", 128.0)),
        ("trainer: {precision: bf16-mixed}\nmodel: {native_amp_init_scale: 8}", "applied"),
        ('LowLevelZeroPlugin(precision="bf16")', "applied"),
        (
            "HybridParallelPlugin(initial_scale=8, min_scale=8, max_scale=8)",
            ScalingRule("fp16", "static", 8.0, max_norm=0.0),
        ),
        ('Accelerator(mixed_precision="bf16")', "applied"),
        ("Seq2SeqTrainingArguments(bf16=True)", "applied"),
        ("fp16_opt_level: O3\nfp16_backend: apex\nfp16: true", "applied in fp16"),
        ("[scaler]\nenabled = false", ScalingRule("fp16", "none", 1.0, skips_nonfinite=False, max_norm=0.0)),
        (
            '[scaler]\npolicy = "static"\ninit_scale = 8\nmin_scale = 16\nmax_consecutive_skips = 7',
            ScalingRule("fp16", "static", 8.0, at_floor="raise", max_consecutive_skips=7, max_norm=0.0),
        ),
        ('[precision]\ndtype = "fp16"', rule_of("[scaler]")),
        ("torch.distributed.fsdp.ShardedGradScaler(init_scale=8.0)", ScalingRule(init_scale=8.0)),
        ("torch.amp.GradScaler('cuda', init_scale=8.0)", ScalingRule(init_scale=8.0)),
        (
            "mixed_precision: no\ndistributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: 0.5}",
            ScalingRule("fp32", "none", 1.0, skips_nonfinite=False, max_norm=0.5),
        ),
        ('MoeHybridParallelPlugin(precision="fp32", max_norm=2)', rule_of("max_grad_norm: 2")),
        (
            "HybridParallelPlugin(growth_factor=4.0, backoff_factor=0.25, min_scale=None, max_scale=None, max_norm=1)",
            ScalingRule(growth_factor=4.0, backoff_factor=0.25, growth_interval=1000, hysteresis=2, max_norm=1.0),
        ),
        (
            "native_amp_init_scale: 8",
            ScalingRule(init_scale=8.0, growth_interval=1000, hysteresis=2, hysteresis_refill=1),
        ),
        (
            "make(initial_scale=8.0, hysteresis=0, min_scale=0, max_scale=0)",
            ScalingRule(init_scale=8.0, growth_interval=1000, max_norm=0.0),
        ),
        ("GradScalerKwargs(init_scale=2**126)", ScalingRule(init_scale=2.0**126)),
        ("make()(init_scale=2.0, initial_scale=2.0**-126, min_scale=0)", TINY),
        ("GradScalerKwargs(growth_factor=4.0)", ScalingRule(growth_factor=4.0)),
        ("GradScalerKwargs(enabled=False)", ScalingRule("fp16", "none", 1.0, skips_nonfinite=False)),
    ],
)
def test_a_scale_that_stays_and_no_scale_at_all(text: str, rule: ScalingRule | str) -> None:
    read = rule_of(text)
    if isinstance(rule, str):
        dtype = "fp16" if rule == "applied in fp16" else "bf16"
        assert (read.dtype, read.mode, read.skips_nonfinite) == (dtype, "none", False)
    else:
        assert read == rule


def test_accelerate_config_has_the_scale_of_its_engine() -> None:
    config = "compute_environment: LOCAL_MACHINE\nmixed_precision: fp16\ndistributed_type: "
    assert rule_of(config + "FSDP") == ScalingRule()
    assert rule_of(config + "MEGATRON_LM") == dataclasses.replace(MEGATRONS, max_norm=1.0)
    engine = "DEEPSPEED\ndeepspeed_config: {zero_stage: 2, gradient_clipping: 0.5}"
    assert rule_of(config + engine) == dataclasses.replace(DEEPSPEEDS, max_norm=0.5)
    with pytest.raises(ConfigError, match=r"deepspeed_config_file; convert that file, ds\.json"):
        rule_of(config + "DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: ds.json}")
    assert rule_of("mixed_precision: no\ndistributed_type: NO").dtype == "fp32"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        *((f"fp16_{name}: 4", "nemo2") for name in ("loss_scale", "initial_loss_scale", "min_loss_scale")),
        *((f"fp16_{name}: 4", "nemo2") for name in ("loss_scale_window", "hysteresis")),
        *((f"trainer: {{precision: {name}}}", "nemo") for name in ("bf16", "bf16-mixed", "32", "fp32", "32-true")),
        *((f"fp16: true\nfp16_backend: {name}", "transformers") for name in ("auto", "amp", "cuda_amp", "cpu_amp")),
        ("bf16: true", "transformers"),
    ],
)
def test_a_single_key_tells_the_format(text: str, source: str) -> None:
    assert recognize(text, "it") == source
    rule_of(text)


def test_training_arguments_have_the_scale_of_their_engine() -> None:
    def of(**arguments: Any) -> ScalingRule:
        return rule_of(json.dumps({"fp16": True, **arguments}))

    assert of(fsdp="full_shard auto_wrap", max_grad_norm=None) == ScalingRule(max_norm=0.0)
    assert of(half_precision_backend="apex") == ScalingRule(max_scale=2.0**24, max_norm=1.0)
    assert of(half_precision_backend="apex", fp16_opt_level="O0").dtype == "fp32"
    assert rule_of("TrainingArguments(bf16=True, **kw)").dtype == "bf16"
    assert rule_of("fp16: true\n1: 2").dtype == "fp16"
    assert rule_of("TrainingArguments(fp16=False, bf16=False, **kw)").dtype == "fp32"
    assert of(half_precision_backend="cpu_amp", fp16_opt_level="O3") == ScalingRule(max_norm=1.0)
    assert of(half_precision_backend="apex", fp16_backend="amp") == ScalingRule(max_norm=1.0)
    assert of(half_precision_backend="apex", fp16_backend="auto").max_scale == 2.0**24
    assert of(half_precision_backend="amp", fp16_backend="apex").max_scale == 2.0**24
    assert of(half_precision_backend="apex", fp16_backend="amp", deepspeed={"fp16": {}, "steps": 1}).dtype == "fp32"
    # What Transformers fills in: "auto", and a block that is not there.
    auto = {"enabled": "auto", "loss_scale_window": 50}
    filled = dataclasses.replace(DEEPSPEEDS, growth_interval=50, max_norm=0.5)
    assert of(deepspeed={"fp16": auto, "gradient_clipping": "auto"}, max_grad_norm=0.5) == filled
    assert of(deepspeed={"zero_optimization": {"stage": 3}}) == DEEPSPEEDS
    assert of(deepspeed={"fp16": auto}) == dataclasses.replace(filled, max_norm=1.0)  # it is the whole JSON
    as_text = ' {"fp16": {"enabled": "True", "loss_scale_window": "50"}, "gradient_clipping": "0.5", "steps": []}'
    assert of(deepspeed=as_text, max_grad_norm=0.5) == filled
    assert of(fp16=False, deepspeed={"fp16": auto, "bf16": {"enabled": "auto"}}).dtype == "fp32"
    assert of(fp16=False, fp16_full_eval=True, deepspeed={"fp16": auto, "bf16": {"enabled": False}}).dtype == "fp16"
    assert of(fp16=False, bf16=True, deepspeed={"bf16": {"enabled": True}}).dtype == "bf16"


def test_notes_say_what_was_not_looked_at_and_what_others_decide() -> None:
    text = json.dumps(
        {
            "distscale": {},
            "zero_optimization": {"stage": 0},
            "fp16": {"enabled": True, "min_loss_scale": 0.25, "auto_cast": True},
            "optimizer": {},
            "steps_per_print": 10,
        }
    )
    notes = "\n".join(convert(text, "toml").notes)
    for part in ("optimizer, steps_per_print", '"distscale"', "stage is 0", "min_loss_scale is no whole", "auto_cast"):
        assert part in notes
    text = json.dumps({"fp16": False, "fsdp": ["full_shard"], "tf32": True, "fp16_opt_level": "O2", "seed": 1})
    notes = "\n".join(convert(text, "toml").notes)
    for part in (
        "fsdp is about the engine",
        "tf32 is about",
        "looked at: seed",
        "fp16_opt_level counts",
        "clips at 1.0",
    ):
        assert part in notes
    assert "--lr, --seed and 1 more" in "\n".join(
        convert(
            "--fp16 " + " ".join(f"--a{letter} 1" for letter in "abcdefghij") + " --lr 1 --seed 2 --more", "toml"
        ).notes
    )


DEEPSPEED_KEYS = {
    "fp16": {"enabled": True, "auto_cast": False, "fp16_master_weights_and_grads": True},
    "bf16": {
        "enabled": False,
        "immediate_grad_update": True,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    },
}


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (  # each of DeepSpeed's keys is known; those about the engine are told
            json.dumps(DEEPSPEED_KEYS),
            [
                "fp16.fp16_master_weights_and_grads = true is",
                "bf16.bf16_master_weights_and_grads = true is",
                "bf16.bf16_optimizer_states = true is",
            ],
        ),
        ('{"bfloat16": {"enabled": true}}', []),
        ('{"bf16": {"enabled": true, "check_grad_overflow": false}}', ["bf16.check_grad_overflow = false"]),
        ('{"bf16": {"enabled": false}}', []),
        (
            '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 1}, "torch_autocast": {"enabled": false}}',
            ["gradient_clipping is not there"],
        ),
        (
            '{"fp16": {"enabled": true}, "zero_optimization": {}}',
            ["gradient_clipping is not there", "zero_optimization.stage is 0"],
        ),
        ('{"fp16": {"enabled": true}, "zero_optimization": true}', ["gradient_clipping is not there"]),
        ('{"zero_optimization": true}', ["gradient_clipping is not there"]),
        (
            '{"train_micro_batch_size_per_gpu": 1}',
            ["not looked at: train_micro_batch_size_per_gpu", "gradient_clipping"],
        ),
        ('{"train_batch_size": 1}', ["not looked at: train_batch_size", "gradient_clipping"]),
        ("--hysteresis 2", ["neither --fp16 nor --bf16 is there"]),
        ("native_amp_init_scale: 8", ["trainer.precision is not there"]),
        ("trainer: {precision: 16}\nmodel: {native_amp_init_scale: 8}", []),
        ("MegatronMixedPrecision()", ["precision is not there", "clipping is in OptimizerConfig"]),
        (
            "GeminiPlugin(initial_scale=8, min_scale=1, max_scale=16, growth_factor=2, backoff_factor=0.5, "
            "growth_interval=9, hysteresis=1, precision='fp16', max_norm=1)",
            [],
        ),
        ("GradScalerKwargs()", ["mixed_precision is not there", "the scale is the default of torch.amp.GradScaler"]),
        ("GradScalerKwargs(init_scale=8.0)", ["mixed_precision is not there"]),
        (
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: fp16",
            ["the scale is the default of torch.amp.GradScaler"],
        ),
        ("compute_environment: LOCAL_MACHINE", ["mixed_precision is not there", "the scale is the default"]),
        ("distributed_type: DEEPSPEED", []),
        ("distributed_type: DEEPSPEED\nmixed_precision: bf16", []),
        ("distributed_type: DEEPSPEED\nmixed_precision: fp16", ["the scale is DeepSpeed's default"]),
        ('{"fp16": true, "max_grad_norm": 1, "fp16_opt_level": "O1", "fsdp": "", "tf32": null}', []),
        (
            '{"fp16": true, "deepspeed": {"fp16": {"enabled": "auto"}}}',
            ["gradient_clipping is not there: DeepSpeed clips at 1.0", "zero_optimization.stage is 0"],
        ),
        ('{"fp16": true, "max_grad_norm": 1, "per_device_train_batch_size": 1}', ["not looked at: per_device"]),
        (  # as many as are shown
            "--fp16 --clip-grad 1 " + " ".join(f"--a{letter} 1" for letter in "abcdefghijkl"),
            ["not looked at: " + ", ".join(f"--a{letter}" for letter in "abcdefghijkl")],
        ),
    ],
)
def test_a_source_has_the_notes_that_are_due_and_no_other(text: str, notes: list[str]) -> None:
    source = recognize(text, "it")
    found = FORMATS[source].read(FORMATS[source].find(text, "it") or {}, "it").notes
    assert len(found) == len(notes)
    assert all(any(note in line for line in found) for note in notes)
    assert not any(line.endswith("more") for line in found)


@pytest.mark.parametrize(
    ("text", "target", "result", "notes"),
    [
        (
            'Accelerator(mixed_precision="bf16")',
            "deepspeed",
            {"bf16": {"enabled": True, "check_grad_overflow": False}},
            [],
        ),
        ('{"fp16": {"enabled": true, "loss_scale": 8}}', "deepspeed", {"fp16": {"enabled": True, "loss_scale": 8}}, []),
        (
            '[precision]\ndtype = "fp32"\n[scaler]\npolicy = "none"',
            "deepspeed",
            {"fp16": {"enabled": False}, "bf16": {"enabled": False}, "gradient_clipping": 0},
            ["skips_nonfinite: skipped becomes applied in deepspeed", "at_floor: end the run becomes skip for ever"],
        ),
        (
            "--bf16 --clip-grad 0",
            "transformers",
            {"fp16": False, "bf16": True, "max_grad_norm": 0},
            ["--bf16 without --loss-scale"],
        ),
    ],
)
def test_what_is_written_in_json_and_why(text: str, target: str, result: Any, notes: list[str]) -> None:
    converted = convert(text, target)
    assert json.loads(converted.text) == result
    assert [any(line.startswith(note) for note in notes) for line in converted.notes] == [True] * len(notes)


@pytest.mark.parametrize("name", FORMATS)
def test_clipping_and_a_start_are_kept_without_a_dynamic_scale(name: str) -> None:
    for rule in (
        ScalingRule("bf16", "none", 1.0, skips_nonfinite=False, max_norm=0.5),
        ScalingRule("fp32", "none", 1.0, skips_nonfinite=False, max_norm=0.5),
        ScalingRule("fp16", "static", 8.0, max_norm=0.5),
    ):
        held = FORMATS[name].hold(rule)
        assert held.dtype == rule.dtype
        assert held.max_norm == (None if name in ("nemo2", "accelerate") else 0.5)
        if name != "transformers":
            assert held.init_scale == rule.init_scale
        if rule.mode == "static" and name in ("nemo", "accelerate"):
            assert held.growth_interval == policy.MAX_COUNT  # dynamic, for there is no other


def test_the_largest_floor_is_held_by_deepspeed() -> None:
    top = ScalingRule(init_scale=2.0**126, min_scale=2.0**125 + 2.0**120)
    held = FORMATS["deepspeed"].hold(top)
    assert (held.init_scale, held.min_scale) == (2.0**126, top.min_scale)
    with pytest.raises(ConfigError, match=r"gives 2\.5, above the start 2"):
        convert('{"fp16": {"enabled": true, "initial_scale_power": 1, "min_loss_scale": 2.5}}', "toml")


def test_a_rule_has_its_start_within_its_bounds_and_no_idle_fields() -> None:
    with pytest.raises(ConfigError, match="the start 8 must lie between the floor 0 and the cap 4"):
        ScalingRule(init_scale=8.0, max_scale=4.0)
    assert ScalingRule("bf16", "none", skips_nonfinite=False, at_floor="raise").simplest().at_floor == "skip"


# --- what cannot be meant ---


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"fp16": {"enabled": true, "hysteresis": 0}}', r"fp16.hysteresis = 0 .* a whole number from 1"),
        ('{"fp16": {"enabled": true, "histeresis": 2}}', r"no key fp16.histeresis; did you mean fp16.hysteresis\?"),
        ('{"fp16": {"enabled": true, "initial_scale_power": 2000}}', r"initial_scale_power = 2000 .* from 0 to 126"),
        ('{"fp16": {"enabled": true, "initial_scale_power": 2, "min_loss_scale": 8}}', r"gives 8, above the start 4"),
        ('{"fp16": {"enabled": true, "loss_scale": -1}}', r"loss_scale = -1 .* at least 0 \(0: dynamic\)"),
        ('{"fp16": {"enabled": true, "loss_scale": Infinity}}', r"loss_scale = inf .* at least 0 \(0: dynamic\)"),
        ("--fp16 --loss-scale -1", r"--loss-scale = '-1' .* at least 0 \(0: dynamic\)"),
        ("--fp16 --loss-scale inf", r"--loss-scale = 'inf' .* at least 0 \(0: dynamic\)"),
        ('{"fp16": {"enabled": true, "loss_scale": true}}', r"loss_scale = True cannot be used"),
        ('{"fp16": {"enabled": true, "loss_scale": 1e99}}', r"between 2\^-126 and 2\^126"),
        ('{"fp16": {"enabled": "yes"}}', r"fp16.enabled = 'yes' .* true or false"),
        ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', r"both true"),
        ('{"fp16": 1, "bf16": {}}', r"fp16 = 1 .* a section of keys"),
        ('{"torch_autocast": {"enabled": true}, "train_batch_size": 1}', r"torch_autocast.enabled .*--from accelerate"),
        ('{"fp16": {"enabled": true}', r" is not valid JSON: .* line 1 column 27"),
        ("--fp16 --bf16", r"--fp16 and --bf16 are both there"),
        ("--fp16 --loss-scale-window 10.5", r"--loss-scale-window = '10.5' .* a whole number"),
        ("--fp16 --hysteresis two", r"--hysteresis = 'two' cannot be used"),
        ("--fp16 --initial-loss-scale $SCALE", r"the expression \$SCALE cannot be used"),
        ("--fp16 --initial-loss-scale", r"--initial-loss-scale = True cannot be used"),
        ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", r"--min-loss-scale gives 4, above the start 2"),
        ("model: {native_amp_init_scale: -1}", r"model.native_amp_init_scale = -1 cannot be used"),
        ("native_amp_init_scale: ${scale}", r"cannot be used"),
        ("precision: 8\nnative_amp_init_scale: 4", r"precision = 8 .* one of 16, fp16"),
        ("LowLevelZeroPlugin(growth_factor=1)", r"growth_factor = 1 .* above 1"),
        ("LowLevelZeroPlugin(initial_scale=args.scale)", r"the expression args.scale cannot be used"),
        ("LowLevelZeroPlugin(initial_scale=8, max_scale=4)", r"max_scale gives 4, below the start 8"),
        ("GradScalerKwargs(backoff_factor=1.0)", r"backoff_factor = 1.0 .* between 0 and 1"),
        ("GradScalerKwargs(1024.0)", r"line 1 gives GradScalerKwargs numbers by position"),
        (
            "GradScalerKwargs()\nGradScalerKwargs()",
            r"several: GradScalerKwargs in line 1 and GradScalerKwargs in line 2",
        ),
        ('Accelerator(mixed_precision="fp8")', r"'fp8' .* not converted"),
        ('{"fp16": true, "bf16": true}', r"fp16 and bf16 are both true"),
        ('{"fp16": "yes", "max_grad_norm": 1}', r"fp16 = 'yes' .* true or false"),
        ('{"fp16": true, "fp16_backend": "apec"}', r"fp16_backend = 'apec' .* one of auto, apex"),
        ("TrainingArguments(output_dir=out, **kw)", r"fp16 or bf16 may be in \*\*kw, .* write both as arguments"),
        ("TrainingArguments(fp16=False, **f(x))", r"fp16 or bf16 may be in \*\*f\(x\), "),
        ('{"fp16": true, "deepspeed": "ds.json"}', r"the file that deepspeed names; convert that file, ds\.json"),
        ('{"bf16": true, "half_precision_backend": "apex"}', r"bf16 is true and the backend is apex"),
        ('{"bf16": true, "fp16_backend": "apex", "deepspeed": {"steps": 1}}', r"bf16 is true and the backend is apex"),
        (
            '{"fp16": true, "fp16_backend": "apex", "deepspeed": {"fp16": {"enabled": "auto"}}}',
            r"the backend is apex, and deepspeed is there, .* take the backend auto",
        ),
        (
            '{"fp16": false, "fp16_full_eval": true, "fp16_backend": "apex", "deepspeed": {"steps": 1}}',
            r"the backend is apex, and deepspeed is there",
        ),
        ("TrainingArguments(fp16=True, deepspeed=ds)", r": deepspeed = the expression ds cannot be used"),
        (
            "fp16: true\ndeepspeed: true",
            r": deepspeed = True cannot be used: it must be a section, or the name of a file",
        ),
        ("TrainingArguments(fp16=True, deepspeed='{')", r": deepspeed is not valid JSON: .* line 1 column 2"),
        (
            '{"fp16": true, "deepspeed": {"gradient_clipping": "1.0"}}',
            r"gradient_clipping = '1.0' contradicts max_grad_norm = 1.0",
        ),
        ('{"fp16": true, "deepspeed": {"fp16": {"enabled": false}}}', r"deepspeed.fp16.enabled = False contradicts"),
        ('{"fp16": true, "deepspeed": {"bf16": {"enabled": true}}}', r"bf16.enabled = True contradicts bf16 = False"),
        ('{"fp16": true, "deepspeed": {"gradient_clipping": 2}}', r"gradient_clipping = 2 contradicts .* = 1.0"),
        ('{"fp16": true, "deepspeed": {"fp16": {"histeresis": 2}}}', r": deepspeed: there is no key fp16.histeresis"),
        ("[scaler]\ngrowth_intervall = 1", r"did you mean scaler.growth_interval\?"),
        ("[scaler]\nhysteresis_refill = 1", r"hysteresis_refill = 1 .* from 2"),
        ("[scaler]\ninit_scale = 8\nmin_scale = 16", r"scaler.min_scale gives 16, above the start 8"),
        ("[scaler]\ngrowth_interval = 2147483647\ngrowth_delay = 1", r"growth_delay = 1 .* from 0 to 0"),
        ("[scaler]\nzzz = 1", r"there is no key scaler.zzz; there are enabled, policy"),
        ("[scaler]\ngrowth_factor = inf", r"growth_factor = inf .* above 1"),
        ("[scaler]\nbackoff_factor = 0", r"backoff_factor = 0 .* between 0 and 1"),
        ("native_amp_init_scale: -1", r": native_amp_init_scale = -1"),
        ("trainer: {precision: bf16, gradient_clip_val: -1}", r": trainer.gradient_clip_val = -1"),
        ("precision: bf16\nnative_amp_init_scale: 8\ngradient_clip_val: -1", r": gradient_clip_val = -1"),
        ("trainer: fast\nmodel: gpt", r"it has no key of any known format"),
        ('[run]\nname = "a"', r"it has no key of any known format"),
        ('[scaler]\npolicy = "dinamic"', r"one of dynamic, static, none"),
        ("hello", r"the format cannot be told, it has no key of any known format; say --from, one of toml, "),
        ('{"initial_scale": 8, "init_scale": 8}', r"it may be colossalai or accelerate"),
    ],
)
def test_a_mistake_names_the_key_and_what_is_allowed(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)^it.*{error}"):
        convert(text, "toml", where="it")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "auto", "1e3", "no", "${x}"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "stage"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("source", FORMATS)
@given(data=st.data())
def test_whatever_the_values_are_nothing_but_a_sentence_is_raised(source: str, data: st.DataObject) -> None:
    values: Any = FORMATS[source].find((FOLDER / f"{source}.txt").read_text(), "it")
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    extra = {
        "deepspeed": ["torch_autocast"],
        "transformers": ["deepspeed", "fp16_backend"],
        "accelerate": ["distributed_type", "megatron_lm_config", "enabled"],
    }
    for key in data.draw(st.lists(st.sampled_from([*values, *extra.get(source, [])]), max_size=3)):
        inner = values.get(key)
        if isinstance(inner, dict) and inner and data.draw(st.booleans()):
            inner[data.draw(st.sampled_from(list(inner)))] = data.draw(JUNK)
        else:
            values[key] = data.draw(JUNK)
    with contextlib.suppress(ConfigError):
        rule = FORMATS[source].read(values, "it").rule
        for target, module in FORMATS.items():
            differences(rule, module.hold(rule), target, module.REASONS)


def test_a_source_that_is_said_must_be_it() -> None:
    assert rule_of('{"initial_scale": 8, "init_scale": 16}', "accelerate").init_scale == 16
    with pytest.raises(ConfigError, match="no key of megatron"):
        convert("[scaler]", "deepspeed", "megatron")


def test_a_script_is_read_and_not_run_and_its_arithmetic_is_bounded() -> None:
    values = sources.calls("f(a=2**16, b=-1, c=9**9**9, d=1/0, e=[1], g=open('x'), **h)")[0].values
    assert sources.calls("m.f(a=3 * 2, b=1 / 4, c=1 << 4)")[0][::2] == ("f", {"a": 6, "b": 0.25, "c": 16})
    assert (values["a"], values["b"], values["e"]) == (65536, -1, [1])
    assert all(isinstance(values[key], sources.Expression) for key in ("c", "d", "g", "**h"))


def test_without_pyyaml_json_still_works_and_yaml_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="needs PyYAML: pip install PyYAML"):
        convert("native_amp_init_scale: 8.0", "toml")
    assert convert('{"native_amp_init_scale": 8.0}', "toml").source == "nemo"
    assert convert("GradScalerKwargs()\nif x:\n  pass\nelse:\n  pass", "toml").source == "accelerate"


# --- the command ---


def test_the_command_prints_the_result_and_the_notes_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["distscale", "convert", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code

    assert get_args(texts._FormatName) == tuple(FORMATS)
    file, target = tmp_path / "ds.json", tmp_path / "out.toml"
    file.write_text('{"fp16": {"enabled": true}}')
    assert run(str(file), "--to", "megatron") == 0
    out, err = capsys.readouterr()
    assert out.startswith("--fp16 \\\n--initial-loss-scale 65536.0")
    assert err.startswith(f"note: {file} was read as deepspeed\nnote: growth_delay: 1 becomes 0 in megatron; ")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(file.read_text()))
        assert run("-", "--to", "toml", "--from", "deepspeed", "--output", str(target)) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "read as" not in err
    assert target.read_text() == convert(file.read_text(), "toml").text

    assert "would lose all its other parts" in run(str(file), "--to", "deepspeed", "--output", str(file))
    assert file.read_text() == '{"fp16": {"enabled": true}}'
    assert "cannot be read: No such file" in run(str(tmp_path / "none"), "--to", "toml")
    assert "cannot be written to" in run(str(file), "--to", "toml", "--output", str(tmp_path / "no" / "out"))
    file.write_bytes(b"\xff\xfe")
    assert "not text in UTF-8" in run(str(file), "--to", "toml")


if __name__ == "__main__":
    for each in FORMATS:
        (FOLDER / f"{each}.golden").write_text(golden(each))
