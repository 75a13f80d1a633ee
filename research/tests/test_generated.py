# SPDX-License-Identifier: Apache-2.0
"""research/generated.py: samples follow from seeds, are as long as asked, and hold their answers as often as
RULER's."""

from __future__ import annotations

import json
import lzma
import pathlib
import re
import subprocess
import sys

import pytest
import tokenizers

import generated
from generated import NIAH, TASKS, sample

LENGTH = 3000
UNIT = {"cwe": 30, "fwe": 30, "niah_multikey_3": 40}  # a unit of haystack, in words at most; sentences and lines: 25


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture(scope="module", params=TASKS)
def task(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def made(task: str) -> dict:
    return sample(task, 7, LENGTH, count)


def test_a_seed_gives_the_same_and_another_gives_another(task: str, made: dict):
    assert sample(task, 7, LENGTH, count) == made
    assert sample(task, 8, LENGTH, count)["input"] != made["input"]


def test_it_is_as_long_as_asked(task: str, made: dict):
    assert made["length"] == count(made["input"])
    assert LENGTH - UNIT.get(task, 25) <= made["length"] <= LENGTH


@pytest.mark.parametrize("task", NIAH)
def test_needles_are_there_once_and_questions_name_them(task: str):
    made = sample(task, 7, LENGTH, count)
    context, _, asked = made["input"].rpartition("\n")
    for output in made["outputs"]:
        [key] = re.findall(rf"One of the special magic \w+ for (\S+) is: {output}\.", context)
        assert made["input"].count(output) == 1
        assert asked.count(key) == 2  # in the question and in what the answer begins with
        assert len(re.findall(rf"for {key} is", context)) == NIAH[task].values
    assert len(made["outputs"]) == NIAH[task].values * NIAH[task].queries
    if NIAH[task].values > 1:
        assert made["outputs"] == sorted(made["outputs"], key=context.index)


def test_a_chain_leads_from_its_value_to_all_names():
    made = sample("vt", 7, LENGTH, count)
    text = made["input"].rpartition(generated.VT)[2]
    [value] = re.findall(r"assigned the value (\d+) in the text above", text)
    found = re.findall(rf"VAR (\w+) = {value} ", text)
    for _ in range(4):
        found += re.findall(rf"VAR (\w+) = VAR {found[-1]} ", text)
    assert found == made["outputs"] and len(set(found)) == 5


def test_frequent_words_are_those_that_are_there_most_often():
    text = sample("fwe", 7, LENGTH, count)
    words = re.findall(r"\b[a-z]{6}\b", text["input"].split("coded words. ")[1].split("\nQuestion")[0])
    assert sorted(set(words), key=lambda word: -words.count(word))[:3] == text["outputs"]


def test_common_words_are_listed_30_times_and_others_3_times():
    made = sample("cwe", 7, LENGTH, count)
    listed = re.findall(r"\d+\. (\S+)", made["input"].rpartition("most often.\n")[2].split("\nQuestion")[0])
    counts = {word: listed.count(word) for word in set(listed)}
    assert {counts.pop(word) for word in made["outputs"]} == {30} and set(counts.values()) == {3}


def test_an_essay_that_is_given_is_the_haystack():
    essay = generated.sentences_of("Here is a first sentence. And a second? Yes, and a third!")
    made = sample("niah_single_2", 7, 400, count, essay)
    assert len(essay) == 3 and made["input"].count(essay[1]) > 10


def test_needles_do_not_part_the_essay():
    essay = [f"Sentence {i} is here." for i in range(2000)]
    made = sample("niah_multikey_1", 7, 3000, count, essay)
    text = made["input"].split("afterwards.\n")[1].rpartition("\n")[0]
    left = re.sub(r"One of the special magic numbers for \S+ is: \d+\. ?", "", text)
    assert re.findall(r"Sentence (\d+)", left) == [str(i) for i in range(left.count("Sentence"))]


@pytest.mark.parametrize("slack", [0, 40])
def test_most_units_are_found_with_few_tries(slack: int):
    tried: list[int] = []

    def size(units: int) -> int:
        tried.append(units)
        return 100 + 13 * units + units // 50
    found = generated.fitted(lambda units: units, size, 20_000, slack=slack)
    assert 20_000 - max(slack, 13) <= size(found) <= 20_000 and len(tried) < 14
    if slack == 0:
        assert size(found + 1) > 20_000


def test_what_cannot_fit_is_said():
    with pytest.raises(ValueError, match="8 units have"):
        sample("cwe", 7, 100, count)


def test_a_file_of_every_task_in_which_the_shortest_come_first(tmp_path: pathlib.Path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    subprocess.run([sys.executable, generated.__file__.replace("generated", "unseen"), "--model", tmp_path, "--lengths", "3000", "4000",
                    "--samples", "2", "--out", tmp_path / "all.jsonl.xz"], check=True)
    with lzma.open(tmp_path / "all.jsonl.xz", "rt") as lines:
        found = [json.loads(line) for line in lines]
    assert len({one["key"] for one in found}) == len(found) == 2 * 2 * len(TASKS)
    assert {one["key"].split("/")[2] for one in found[:2 * len(TASKS)]} == set(TASKS)
    sizes = [len(one["input"]) for one in found[:2 * len(TASKS)]]
    assert max(sizes[:4]) < min(sizes[-4:])
    for one in found:
        assert len(words.encode(one["input"]).ids) <= int(one["key"].split("/")[1])
