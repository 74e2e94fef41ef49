"""YAML and records of any origin: refused before they take the memory, or a file elsewhere."""

from importlib.resources import files

import pytest

from marglik.storage.record_file import read_record, write_record
from marglik.storage.yaml_text import DEEPEST, MOST, MOST_DIGITS, check_yaml


def laughs(levels, each=9):
    """YAML whose last line stands for each**levels values."""
    lines = [f"a0: &a0 [{', '.join(each * ['x'])}]"]
    lines += [f"a{i}: &a{i} [{', '.join(each * [f'*a{i - 1}'])}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (laughs(12), f"more than {MOST:,} values"),
        ("a: " + "[" * (DEEPEST + 1), f"more than {DEEPEST} deep"),
        ("a: &a [1, *a]", r"'\*a' refers to a node that contains it"),
        ("a: {b: -1" + "0" * MOST_DIGITS + "}", "a number of 4,301 digits"),
    ],
)
def test_yaml_that_is_larger_than_it_looks(text, message):
    with pytest.raises(ValueError, match=message):
        check_yaml(text)


def test_yaml_of_people():
    """Presets, aliases, and what is none, which others complain of."""
    for preset in (files("marglik") / "presets").iterdir():
        check_yaml(preset.read_text())
    for text in (laughs(3), "a: " + "[" * 50 + "]" * 50, "a: [", "", "\0", "9" * MOST_DIGITS):
        check_yaml(text)


def test_a_record_speaks_of_files_beside_it_alone(tmp_path):
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("../secret", str(tmp_path / "secret")):
        write_record(folder / "posterior.json", {"format": "x", "version": 1}, {name: "0"})
        with pytest.raises(ValueError, match="which is not beside it. Fit again."):
            read_record(folder / "posterior.json", "x", 1, what="posterior", remedy="Fit again.")
