"""The resolved configuration is a file like any other: read again it is equal, and it can be changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.config.support import FILES, SMALLEST, make
from trireme.config import Config, from_tree, load_config
from trireme.config.loader import load
from trireme.config.tree import escaped, merge

# What YAML carries: no surrogates, none of the characters that a YAML stream may not hold.
TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Cn")), max_size=12)
AWKWARD = st.sampled_from(
    ["${a}", "\\${a}", "\\\\${run.name}", "${", "$}{", "5e-6", "null", "on", "~", "a: b", "#", "\\"]
)
WORDS = st.one_of(TEXTS, AWKWARD, st.builds(str.__add__, AWKWARD, AWKWARD))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)
TREES = st.fixed_dictionaries(
    {},
    optional={
        "grpo": st.fixed_dictionaries({"seed": st.integers(0, 2**31), "max_num_steps": st.integers(1, 9)}),
        "loss_fn": st.fixed_dictionaries({"reference_policy_kl_penalty": st.floats(0, 1e3)}),
        "data": st.fixed_dictionaries(
            {"dataset_name": WORDS.filter(bool), "system_prompt": WORDS, "dataset": st.dictionaries(TEXTS, VALUES)}
        ),
        "policy": st.fixed_dictionaries(
            {"generation": st.fixed_dictionaries({"stop_strings": st.lists(WORDS.filter(bool))})}
        ),
        "redis": st.fixed_dictionaries({"url": WORDS.map(lambda word: f"redis://:{word}@host")}),
        "logger": st.fixed_dictionaries({"wandb": st.dictionaries(TEXTS, VALUES)}),
    },
)


@given(tree=TREES)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_written_and_read_again_it_is_equal(tmp_path: Path, tree: dict[str, object]) -> None:
    config = from_tree(merge([SMALLEST, escaped(tree)]))
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("text", ["${run.name}", "a ${b} c", "\\${x}", "\\\\${x}", "$${x}", "\\", "\\\\"])
def test_text_that_looks_like_a_reference_stays_text(tmp_path: Path, text: str) -> None:
    config = from_tree(merge([SMALLEST, escaped({"data": {"system_prompt": text}})]))
    assert config.data.system_prompt == text
    config.write(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").data.system_prompt == text


def test_reading_it_again_reports_nothing_anew(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    make("env.math.num_workers=8").write(path)
    assert load(path).notices == ()


def test_a_recipe_survives_it(tmp_path: Path) -> None:
    config = load_config(FILES / "grpo_math_1B_megatron.yaml")
    config.write(tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_the_file_is_for_its_owner_only_and_holds_the_password(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    os.chmod(path, 0o644)
    make("redis.url=redis://user:secret@host:6379/0").write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "secret" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:secret@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:secret@host", "redis://:***@host"),
        ("rediss://secret@host", "rediss://***@host"),
        ("redis://user:se@cret@host", "redis://user:***@host"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://host?password=secret", "redis://host?***"),
        ("redis://host?password=se@cret", "redis://***@cret"),
        ("rediss://user:se/cret@host", "rediss://user:***@host"),
        ("unix://:secret@/run/redis.sock?db=1", "unix://:***@/run/redis.sock?***"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://[secret", "***"),
    ],
)
def test_passwords_are_hidden_where_they_are_shown(url: str, shown: str) -> None:
    masked = make(f"redis.url='{url}'").to_tree(mask=True)
    assert masked["redis"]["url"] == shown
    assert "secret" not in make(f"redis.url='{url}'").to_yaml(mask=True)


def test_override_keeps_what_it_does_not_name() -> None:
    config = make("grpo.seed=5", "data.system_prompt=\\${x}")
    changed = config.override("redis.url=redis://host:1")
    assert changed.redis.url == "redis://host:1"
    assert changed.override("redis.url=null") == config


def test_a_tree_in_python_gives_the_same() -> None:
    assert Config.model_validate(SMALLEST) == make()
    assert Config(**SMALLEST) == make()
