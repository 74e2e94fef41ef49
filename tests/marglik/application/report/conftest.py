"""Runs to report on: copies of the small run, with other contents."""

import json
import shutil

import pytest

from marglik.storage.record_files import read_record, write_record

EVIL = "</script><img src=x onerror=alert(1)>"
"""A name that is markup."""


@pytest.fixture(scope="session")
def change():
    """A function that changes the content of a record in place."""

    def changed(path, apply):
        content = read_record(path)
        apply(content)
        write_record(path, content)

    return changed


@pytest.fixture(scope="session")
def copied(evaluated, tmp_path_factory):
    """A function that copies the run, with other options in its config.yaml."""

    def copy(name, **options):
        folder = shutil.copytree(evaluated, tmp_path_factory.mktemp("copies") / name)
        if options:
            (folder / "config.yaml").write_text(json.dumps(options))
            write_record(folder / "results.json", read_unchecked(folder / "results.json"))
        return folder

    return copy


@pytest.fixture(scope="session")
def evil(copied, change):
    """A run in which every name is markup."""
    folder = copied("evil", **{EVIL: EVIL})

    def rename(of):
        entry = next(iter(of["predictives"].values()))
        of |= {"data": EVIL, "classes": [EVIL] * 3}
        of["environment"] |= {"device": EVIL, "versions": {EVIL: EVIL}}
        of["ood"] |= {"name": EVIL, "note": EVIL}
        of["uncertain"]["predictive"] = EVIL
        of["predictives"] = {EVIL: entry}

    def rename_results(of):
        of["identity"] |= {"data": EVIL, "model": EVIL}
        of["environment"] |= {"device": EVIL}
        of["weight_decay"] = {EVIL: next(iter(of["weight_decay"].values()))}
        of["suspicious_labels"] = {"unknown": EVIL}

    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for record in [record for record in log if record["kind"] == "update"]:
        record |= {"weight_decay": {EVIL: 0.1, "%{y} <b>bold</b>": 0.2}, "seconds": {EVIL: 1.0}}
    (folder / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    write_record(folder / "results.json", read_unchecked(folder / "results.json"))
    change(folder / "evaluation.json", rename)
    change(folder / "results.json", rename_results)
    return folder


def read_unchecked(path):
    """A record whose files were changed since."""
    found = json.loads(path.read_text())
    del found["sha256"]
    return found
