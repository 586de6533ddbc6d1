"""Files of prompts: what is read, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

from services.trainer.data import load_dataset
from services.trainer.data.base import DataError, Split
from tests.unit.data.support import Settings

GOOD = {"prompt": "1 + 1", "answer": "2"}


def write(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def load(split: Split = "train", env: dict[str, object] | None = None, seed: int = 1, **settings: object):  # type: ignore[no-untyped-def]
    return load_dataset(Settings(**settings), env or {}, split, seed)  # type: ignore[arg-type]


def test_rows_of_all_kinds(tmp_path: Path) -> None:
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(
        tmp_path / "a.jsonl",
        GOOD,
        "",
        {"messages": conversation, "answer": 3, "verifier": "exact"},
        {"prompt": "p", "verifier": "mine", "payload": {"tests": [1]}},
    )
    env = {"math": SimpleNamespace(options={"format": "boxed"}), "exact": SimpleNamespace(options={})}
    loaded = load(dataset_name=path, env=env)
    assert [item.messages for item in loaded] == [
        [{"role": "user", "content": "1 + 1"}],
        conversation,
        [{"role": "user", "content": "p"}],
    ]
    tasks = [(item.task.verifier, dict(item.task.payload)) for item in loaded]
    assert tasks == [
        ("math", {"answer": "2", "format": "boxed"}),
        ("exact", {"answer": 3}),
        ("mine", {"tests": [1]}),
    ]
    assert (loaded.name, len(loaded), [item.index for item in loaded]) == (path, 3, [0, 1, 2])
    assert load(dataset_name=path, verifier="exact")[0].task.verifier == "exact"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{not json", "is not JSON"),
        ("[1]", "is a list"),
        ('"text"', "is a str"),
        ({"answer": "2"}, 'has neither of "prompt" and "messages"'),
        ({**GOOD, "messages": []}, 'has both of "prompt" and "messages"'),
        ({"prompt": " ", "answer": "2"}, '"prompt" should be text'),
        ({"prompt": 3, "answer": "2"}, '"prompt" should be text'),
        ({"prompt": "p"}, 'has no "answer"'),
        ({"prompt": "p", "answer": ""}, '"answer" is empty'),
        ({"messages": [], "answer": "2"}, "not empty"),
        ({"messages": "u", "answer": "2"}, "should be a list"),
        ({"messages": [{"role": "robot", "content": "u"}], "answer": "2"}, '"role" of system, user, assistant'),
        ({"messages": [{"role": "user"}], "answer": "2"}, '"content" of text'),
        ({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], "answer": "2"},
         "end with the user's turn"),
        ({"prompt": "a\ud800b", "answer": "2"}, "half a surrogate pair at character 1"),
        ({"messages": [{"role": "user", "content": "\udc00"}], "answer": "2"}, "half a surrogate pair"),
        ({**GOOD, "verifier": 3}, '"verifier" should be the name'),
        ({**GOOD, "payload": 3}, '"payload" should be an object'),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_with_what_is_right(tmp_path: Path, row: object, said: str) -> None:
    """R-08: a row without a usable reference answer never reaches training."""
    path = write(tmp_path / "a.jsonl", GOOD, "", row)
    with pytest.raises(DataError) as error:
        load(dataset_name=path)
    assert f"{path}, row 3: " in str(error.value) and said in str(error.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: is empty; a row is an object"):
        load(dataset_name=write(tmp_path / "a.jsonl", content))


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.jsonl: cannot be read"):
        load(dataset_name=str(tmp_path / "missing.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "answer": "1"}')
    with pytest.raises(DataError, match=r"latin\.jsonl: cannot be read"):
        load(dataset_name=str(tmp_path / "latin.jsonl"))


def test_validation_is_held_out_by_prompt(tmp_path: Path) -> None:
    """Repeated prompts go to one side only, whatever their answers and blanks; the choice depends on the seed alone."""
    rows = [{"prompt": f"prompt {i % 20}" + " " * (i // 20), "answer": str(i)} for i in range(60)]
    path = write(tmp_path / "a.jsonl", *rows)
    train, held = load(dataset_name=path, num_validation=5), load("validation", dataset_name=path, num_validation=5)
    texts = [{item.messages[0]["content"].strip() for item in split} for split in (train, held)]
    assert (len(held), len(texts[1]), len(train)) == (5, 5, 45)
    assert not texts[0] & texts[1] and len(texts[0] | texts[1]) == 20
    again = load("validation", dataset_name=path, num_validation=5)
    assert [i.messages for i in again] == [i.messages for i in held]
    assert [i.messages for i in load("validation", dataset_name=path, num_validation=5, seed=2)] != [
        i.messages for i in held
    ]
    with pytest.raises(DataError, match=r"20 different prompts.*data\.num_validation=20"):
        load(dataset_name=path, num_validation=20)


def test_a_validation_file_is_kept_out_of_training(tmp_path: Path) -> None:
    train_file = write(tmp_path / "t.jsonl", *({"prompt": f"p{i}", "answer": "1"} for i in range(5)))
    validation_file = write(tmp_path / "v.jsonl", *({"prompt": f"p{i}", "answer": "1"} for i in (3, 4, 9)))
    files = {"dataset_name": train_file, "validation_file": validation_file, "num_validation": 2}
    assert [i.messages[0]["content"] for i in load("validation", **files)] == ["p3", "p4"]
    assert [i.messages[0]["content"] for i in load("train", **files)] == ["p0", "p1", "p2"]
    with pytest.raises(DataError, match="nothing is left to train on"):
        load("train", dataset_name=train_file, validation_file=train_file, num_validation=0)


def test_a_local_hugging_face_dataset(tmp_path: Path) -> None:
    """Saved by `datasets`, as one table or with splits; and a folder of files. No network."""
    table = datasets.Dataset.from_list([{"question": f"q{i}", "gold": str(i)} for i in range(6)])
    keys = {"prompt_key": "question", "answer_key": "gold"}
    table.save_to_disk(str(tmp_path / "table"))
    assert load(dataset_name=str(tmp_path / "table"), dataset=keys)[2].task.payload == {"answer": "2"}
    datasets.DatasetDict({"main": table, "test": table.select([5])}).save_to_disk(str(tmp_path / "splits"))
    splits = {**keys, "train_split": "main", "validation_split": "test"}
    train = load(dataset_name=str(tmp_path / "splits"), dataset=splits)
    held = load("validation", dataset_name=str(tmp_path / "splits"), dataset=splits)
    assert (len(train), [i.messages[0]["content"] for i in held]) == (5, ["q5"])
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", GOOD, {"prompt": "2 + 2", "answer": "4"})
    assert [i.task.payload["answer"] for i in load(dataset_name=str(tmp_path / "folder"))] == ["2", "4"]


def test_what_is_wrong_with_a_hugging_face_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = datasets.Dataset.from_list([{"question": "q", "answer": "a"}])
    datasets.DatasetDict({"main": table}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r'no split "train"; it has: main'):
        load(dataset_name=str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r'row 1: has neither of "prompt" and "messages"'):
        load(dataset_name=str(tmp_path / "splits"), dataset={"train_split": "main"})
    with pytest.raises(DataError, match=r'data\.dataset: "prompt_kye" means nothing.*prompt_key'):
        load(dataset_name=str(tmp_path / "splits"), dataset={"prompt_kye": "q"})
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r'"nobody/nothing-at-all".*local folder or a \.jsonl file'):
        load(dataset_name="nobody/nothing-at-all")
