"""A config comes back as it was written, and every mistake in one is named with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distscale import ConfigError
from distscale.config import changed_keys, dump_config, flatten, load_config

SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_config(text: str, name: str = "run") -> Path:
        path = tmp_path / "x.toml"
        path.write_text(f'[run]\nname = "{name}"\n{text}', encoding="utf-8")
        return path

    return write_config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_load_and_name_their_own_folder(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    assert config.folder == Path("runs") / path.stem


def test_there_are_shipped_configs() -> None:
    assert {path.stem for path in SHIPPED} >= {"fsdp2_fp16", "ddp_fp16", "fsdp2_bf16"}


def test_dump_writes_every_default_and_reads_back_equal(write: Write, tmp_path: Path) -> None:
    config = load_config(write("[train]\nbetas = [0.5, 0.75]\n[scaler]\nmax_norm = inf\n"))
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_config(config), encoding="utf-8")
    assert load_config(resolved) == config
    assert "growth_interval = 2000" in resolved.read_text(encoding="utf-8")


def test_an_absent_max_norm_stays_absent(write: Write, tmp_path: Path) -> None:
    config = load_config(write(""))
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(dump_config(config), encoding="utf-8")
    assert config.scaler.max_norm is None
    assert load_config(resolved).scaler.max_norm is None


def test_overrides_are_toml_values_and_bare_words_are_strings(write: Write) -> None:
    overrides = ["train.lr=1e-3", "run.name=other", "parallel.layout=ddp", "scaler.enabled=false"]
    config = load_config(write("[train]\nlr = 5.0\n"), overrides)
    assert (config.train.lr, config.run.name, config.parallel.layout) == (1e-3, "other", "ddp")
    assert config.scaler.enabled is False


def test_an_empty_override_takes_a_key_out(write: Write) -> None:
    text = "[scaler]\nmax_norm = 1.0\n"
    assert load_config(write(text), ["scaler.max_norm=", "train.lr="]).scaler.max_norm is None


def test_a_whole_number_is_a_float_but_a_fraction_is_no_count(write: Write) -> None:
    assert load_config(write("[train]\nlr = 1\n")).train.lr == 1.0
    with pytest.raises(ConfigError, match=r"train\.batch = 8\.5 cannot be used: it should be a valid integer"):
        load_config(write("[train]\nbatch = 8.5\n"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[train]\nwarmpu = 3\n", r"there is no key train\.warmpu; did you mean train\.warmup\?"),
        ("[train]\nlayers = 3\n", r"there is no key train\.layers; did you mean model\.layers\?"),
        ("[scalar]\nenabled = true\n", r"there is no section scalar; did you mean scaler\?"),
        ("[zzz]\n", r"there is no section zzz; there are run, model, data, train"),
        ("[train]\nzzzzzz = 1\n", r"there is no key train\.zzzzzz; there are batch, accumulation, lr"),
        ("[train]\nbatch = 'eight'\n", r"train\.batch = 'eight' cannot be used: it should be a valid integer"),
        ("[train]\nbatch = true\n", r"train\.batch = True cannot be used"),
        ("[train]\nbatch = 0\n", r"train\.batch = 0 cannot be used: it should be greater than or equal to 1"),
        ("[train]\nlr = nan\n", r"train\.lr = nan cannot be used"),
        ("[train]\nbetas = [0.9, 1.0]\n", r"train: betas = \[0\.9, 1\.0\] must each be at least 0 and below 1"),
        ("[scaler]\nenabled = 'no'\n", r"scaler\.enabled = 'no' cannot be used: it should be a valid boolean"),
        ("[scaler]\ninit_scale = 0\n", r"scaler\.init_scale = 0 cannot be used"),
        ("[scaler]\ninit_scale = inf\n", r"scaler\.init_scale = inf cannot be used"),
        ("[scaler]\nbackoff_factor = 1.0\n", r"scaler\.backoff_factor = 1\.0 cannot be used: it should be less"),
        ("[scaler]\ngrowth_factor = 1.0\n", r"scaler\.growth_factor = 1\.0 cannot be used: it should be greater"),
        ("[scaler]\nmin_scale = 8.0\ninit_scale = 4.0\n", r"init_scale = 4 must lie between min_scale = 8"),
        ("[scaler]\nmax_scale = 2.0\ninit_scale = 4.0\n", r"init_scale = 4 must lie .* max_scale = 2"),
        ("[scaler]\nmax_norm = 0.0\n", r"scaler\.max_norm = 0\.0 cannot be used"),
        ("[scaler]\nenabled = false\nmax_norm = 1.0\n", r'no effect with enabled = false.*policy = "none"'),
        ("[scaler]\npolicy = 'dynamc'\n", r"scaler\.policy = 'dynamc' cannot be used.*'dynamic'"),
        ("[precision]\ndtype = 'fp8'\n", r"precision\.dtype = 'fp8' cannot be used.*'bf16'"),
        ("[model]\nwidth = 130\n", r"width = 130 must be a multiple of heads = 4"),
        ("[model]\nsequence = 1\n", r"model\.sequence = 1 cannot be used: it should be greater than or equal to 2"),
        ("[train]\nwarmup = 401\n", r"train\.warmup = 401 is longer than run\.steps = 400"),
        ("[parallel]\ntimeout_s = 0\n", r"parallel\.timeout_s = 0 cannot be used"),
        ("[parallel]\ntimeout_s = 1e-9\n", r"parallel\.timeout_s = 1e-09 cannot be used: it should be greater"),
        ("[parallel]\ntimeout_s = 1e18\n", r"parallel\.timeout_s = 1e\+18 cannot be used: it should be less"),
        ("[scaler]\nhysteresis = 99999999999\n", r"scaler\.hysteresis = 99999999999 cannot be used: it should be less"),
        ("[train]\nbatch = 99999999999999\n", r"train\.batch = 99999999999999 cannot be used: it should be less"),
        ("seed = 99999999999999999999\n", r"run\.seed = 9{20} cannot be used: it should be less"),
        ("[train]\nbetas = [0.9]\n", r"train\.betas = \[0\.9\] has too few values; add number 2"),
        ("[parallel]\nlayout = 'fsdp3'\n", r"parallel\.layout = 'fsdp3' cannot be used.*'fsdp2' or 'ddp'"),
    ],
)
def test_a_mistake_is_named_with_its_file_key_and_remedy(write: Write, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"x\.toml: .*{sentence}"):
        load_config(write(text))


def test_all_mistakes_are_named_at_once(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("[train]\nbatch = 0\nwarmpu = 3\n[model]\nlayers = 'two'\n"))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("name", ["", "..", "a/b", "../up", ".hidden", "a b"])
def test_a_name_that_is_no_plain_folder_is_refused(write: Write, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name = .* write letters, digits"):
        load_config(write("", name))


def test_files_that_cannot_be_configs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml does not exist"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_bytes(b"[run\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML: .*line 1"):
        load_config(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(broken)
    broken.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"run is missing; add it"):
        load_config(broken)
    broken.write_bytes(b"run = 3\n")
    with pytest.raises(ConfigError, match="run = 3 cannot be used: run is a section"):
        load_config(broken)


@pytest.mark.parametrize("override", ["train.lr", "lr=3", "train.=3", "=3", ".lr=3", "train.lr=1\nwarmup=3"])
def test_an_override_of_another_form_is_refused(write: Write, override: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value"):
        load_config(write(""), [override])


def test_changed_keys_are_dotted(write: Write) -> None:
    old, new = load_config(write("")), load_config(write(""), ["train.lr=1.0", "model.layers=9"])
    assert changed_keys(old, new) == {"model.layers": (4, 9), "train.lr": (2e-3, 1.0)}
    assert changed_keys(old, old) == {}
    assert flatten(new)["run.steps"] == 400


def test_every_field_says_what_it_is(write: Write) -> None:
    for section, info in type(load_config(write(""))).model_fields.items():
        for key, field in info.annotation.model_fields.items():
            assert field.description, f"{section}.{key} has no docstring"
