"""rollouts.py: what a file says is what the batch holds, and a malformed line is named by file, line and field."""

import json
import math
import os

import pytest
import torch

from cp_returns import layout
from cp_returns.log_probs import slice_responses
from cp_returns.rollouts import RolloutError, read, whole

GOOD = {"prompt_len": 3, "response_len": 4, "loss_mask_spans": [[0, 2], [3, 4]], "reward": 1.5, "group": "g"}


def written(tmp_path, *lines) -> str:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_log_probs_of_trained_tokens_are_put_at_the_trained_tokens(tmp_path):
    full = {"logp": [-1, -2, -9, -3], "ref_logp": [-1.5, -1, -9, -3], "values": [1, 2, 3, 4]}
    short = {"logp": [-1, -2, -3], "ref_logp": [-1.5, -1, -3], "values": [1, 2, 4]}
    batch = read(written(tmp_path, GOOD | full | {"id": "a"}, GOOD | short | {"group": 7}))
    assert batch.total_lengths == [7, 7]
    assert batch.response_lengths == [4, 4]
    assert batch.loss_masks[0].tolist() == [True, True, False, True]
    assert batch.log_probs[0].tolist() == [-1, -2, -9, -3]
    assert batch.log_probs[1].tolist() == [-1, -2, 0, -3]
    assert batch.ref_log_probs[1].tolist() == [-1.5, -1, 0, -3]
    assert batch.values[1].tolist() == [1, 2, 0, 4]
    assert batch.log_probs[1].dtype == torch.float32
    assert batch.ids == ["a", "2"]
    assert batch.rewards == [1.5, 1.5]
    assert len(set(batch.group_ids)) == 2
    assert "SEEDED" not in batch.note


def test_defaults_of_absent_fields(tmp_path):
    """No spans: all trained. No reward: 0; null: missing. No group: one of its own. Blank lines are no samples."""
    line = {"prompt_len": 1, "response_len": 2, "kl": [0.5, 1]}
    batch = read(
        written(tmp_path, line, "", line | {"reward": None}, line | {"reward": 2, "response_len": 0, "kl": []})
    )
    assert [mask.tolist() for mask in batch.loss_masks] == [[True, True], [True, True], []]
    assert batch.rewards[0] == 0
    assert math.isnan(batch.rewards[1])
    assert batch.group_ids == [0, 1, 2]
    assert batch.kl[0].tolist() == [0.5, 1]
    assert batch.log_probs is None
    assert [mask.tolist() for mask in batch.trained_masks] == [[True, True], [False, False], []]


def test_other_fields_are_ignored(tmp_path):
    """Those of the real files, and the text that a line's tokens stand for."""
    names = "source model tokenizer length_kind turns trained_tokens unit trained prompt response tokens uid"
    line = (
        GOOD | dict.fromkeys(names.split(), "x") | {"logp": [-1] * 3, "ref_logp": [-1] * 3, "ref_logp_int4": [-2] * 3}
    )
    batch = read(written(tmp_path, line))
    assert batch.log_probs[0].tolist() == [-1, -1, 0, -1]
    assert batch.rewards == [1.5]


def test_shapes_without_log_probs_get_seeded_ones_and_the_note_says_so(tmp_path):
    path = written(tmp_path, GOOD, GOOD)
    batch, again, other = read(path, seed=1), read(path, seed=1), read(path, seed=2)
    assert batch.note.startswith("log-probs SEEDED (seed 1)")
    assert all(torch.equal(a, b) for a, b in zip(batch.log_probs, again.log_probs, strict=True))
    assert not torch.equal(batch.log_probs[0], other.log_probs[0])
    assert not torch.equal(batch.log_probs[0], batch.log_probs[1])
    assert all(bool((x <= 0).all()) for x in (*batch.log_probs, *batch.ref_log_probs))


def test_ref_picks_the_reference(tmp_path):
    lists = {"logp": [-1, -1, -1], "ref_logp_int8": [-2, -2, -2], "ref_logp_int4": [-3, -3, -3]}
    path = written(tmp_path, GOOD | lists)
    assert read(path, ref="int8").ref_log_probs[0].tolist() == [-2, -2, 0, -2]
    assert read(path, ref="int4").ref_log_probs[0].tolist() == [-3, -3, 0, -3]
    with pytest.raises(RolloutError, match=r"line 1, field 'ref_logp': is missing .*--ref int4\|int8"):
        read(path)
    with pytest.raises(RolloutError, match="field 'ref_logp_int2': is missing"):
        read(path, ref="int2")


BAD = {
    "not json": ('{"prompt_len": 3,', r"line 2, column \d+: not JSON"),
    "not an object": ("[1, 2]", r"line 2: is \[1, 2\]; expected an object"),
    "no prompt": ({"response_len": 4}, "line 2, field 'prompt_len': is missing; expected an integer of at least 1"),
    "empty prompt": (GOOD | {"prompt_len": 0}, "field 'prompt_len': is 0; expected an integer of at least 1"),
    "float length": (GOOD | {"response_len": 4.0}, "field 'response_len': is 4.0; expected an integer"),
    "bool length": (GOOD | {"response_len": True}, "field 'response_len': is True; expected an integer"),
    "span past the end": (GOOD | {"loss_mask_spans": [[0, 5]]}, "item 0 is \\[0, 5\\]; expected .* response_len = 4"),
    "spans overlap": (GOOD | {"loss_mask_spans": [[0, 2], [1, 3]]}, "'loss_mask_spans': item 1 is \\[1, 3\\]"),
    "span of three": (GOOD | {"loss_mask_spans": [[0, 1, 2]]}, "'loss_mask_spans': item 0 is"),
    "spans a number": (GOOD | {"loss_mask_spans": 3}, "'loss_mask_spans': item 0 is 3"),
    "infinite reward": (GOOD | {"reward": math.inf}, "field 'reward': is inf; expected a finite number"),
    "reward beyond float32": (GOOD | {"reward": 1e39}, "field 'reward': is 1e\\+39; expected a finite number"),
    "reward of 400 digits": (GOOD | {"reward": int("9" * 400)}, "field 'reward': is 99.*; expected a finite number"),
    "reward of 5,000 digits": (
        '{"prompt_len": 3, "response_len": 4, "reward": ' + "9" * 5000 + "}",
        "'reward': is inf",
    ),
    "reward not a number": (GOOD | {"reward": math.nan}, "field 'reward': is nan; expected .* or null where"),
    "prompt too long": (GOOD | {"prompt_len": 10**30}, "field 'prompt_len': is 10+; expected .* at most 100,000,000"),
    "no memory for it": (GOOD | {"response_len": 10**13}, "field 'response_len': is 10+; expected .* at most 100,000,"),
    "nested": ("[" * 100_000, "line 2: is nested too deeply"),
    "kl beside logp": (GOOD | {"kl": [0] * 3, "logp": [0] * 3}, "field 'kl': stands beside logp; expected one or"),
    "reference alone": (GOOD | {"ref_logp": [0] * 3}, "field 'logp': is missing; expected .* ref_logp goes with"),
    "value beyond float32": (GOOD | {"kl": [0, 1e39, 0]}, "field 'kl': item 1 is 1e\\+39; expected a finite number"),
    "kl of 400 digits": (GOOD | {"kl": [0, 0, -int("9" * 400)]}, "field 'kl': item 2 is -99.*; expected a finite"),
    "misspelt": (GOOD | {"rewrd": 1}, "field 'rewrd': unknown, and close to 'reward'"),
    "misspelt mask": (GOOD | {"loss_mask_span": []}, "field 'loss_mask_span': unknown, and close to 'loss_mask_spans'"),
    "in capitals": (GOOD | {"KL": [0] * 3}, "field 'KL': unknown, and close to 'kl'"),
    "a dump's name": (GOOD | {"log_probs": [0] * 3}, "field 'log_probs': unknown, and close to 'logp'"),
    "another reference": (GOOD | {"ref_logprobs": [0] * 3}, "field 'ref_logprobs': unknown, and close to 'ref_logp'"),
    "half a surrogate": (GOOD | {"id": "\ud800"}, r"field 'id': is '\\ud800'; expected a string of Unicode text"),
    "reward a string": (GOOD | {"reward": "1"}, "field 'reward': is '1'"),
    "group a list": (
        GOOD | {"group": [1]},
        "field 'group': is \\[1\\]; expected a string of Unicode text or an integer",
    ),
    "logp alone": (GOOD | {"logp": [-1, -1, -1]}, "field 'ref_logp': is missing"),
    "kl too long": (GOOD | {"kl": [0] * 5}, "'kl': has 5 numbers; expected .* response_len = 4 .* 3 trained"),
    "kl a number": (GOOD | {"kl": 0.1}, "field 'kl': is 0.1; expected a list"),
    "nan value": (GOOD | {"kl": [0, math.nan, 0, 0]}, "field 'kl': item 1 is nan; expected a finite number"),
    "word in list": (GOOD | {"kl": [0, "x", 0]}, "field 'kl': item 1 is 'x'; expected a finite number"),
    "other lists": (GOOD | {"kl": [0] * 4}, "line 2: has the lists kl; expected .* first sample: none"),
}


@pytest.mark.parametrize(("line", "expected"), BAD.values(), ids=BAD.keys())
def test_a_malformed_line_is_named(tmp_path, line, expected):
    path = written(tmp_path, GOOD, line)
    with pytest.raises(RolloutError, match=expected) as caught:
        read(path)
    assert str(caught.value).startswith(path)


def test_a_file_that_is_absent_or_not_text(tmp_path):
    with pytest.raises(RolloutError, match="no such file"):
        read(tmp_path / "absent.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RolloutError, match="not UTF-8"):
        read(tmp_path / "binary.jsonl")
    with pytest.raises(RolloutError, match="is a directory; expected a file"):
        read(tmp_path)
    with pytest.raises(RolloutError, match=r"/proc/self/mem: cannot be read \("):
        read("/proc/self/mem")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_a_sample_is_refused(tmp_path, text):
    (tmp_path / "empty.jsonl").write_text(text)
    with pytest.raises(RolloutError, match=r"empty\.jsonl: holds no sample"):
        read(tmp_path / "empty.jsonl")


# slime's train dumps


SAMPLE = {
    "response_lengths": 3,
    "total_lengths": 5,
    "log_probs": torch.tensor([-1.0, -2, -3]),
    "ref_log_probs": torch.tensor([-1.5, -2, -2]),
    "loss_masks": torch.tensor([1, 0, 1]),
    "rewards": 2.0,
    "values": torch.tensor([0.5, 0, 1]),
    "tokens": torch.arange(5),
}


def singular(sample: dict) -> dict:
    names = {"response_lengths": "response_length", "total_lengths": "total_length", "loss_masks": "loss_mask"}
    return {(names | {"rewards": "reward"}).get(name, name): value for name, value in sample.items()}


def saved(tmp_path, dump) -> str:
    path = tmp_path / "train_0_0.pt"
    torch.save(dump, path)
    return str(path)


def test_slime_dumps_of_all_spellings_read_alike(tmp_path):
    """`samples` with slime's plural names, with singular ones, and the older `rollout_data` of lists."""
    columns = {name: [value, value] for name, value in SAMPLE.items()}
    for dump in (
        {"format_version": 2, "samples": [SAMPLE, SAMPLE]},
        {"samples": [singular(SAMPLE), singular(SAMPLE)]},
        {"rollout_id": 0, "rank": 0, "rollout_data": columns | {"num_microbatches": [1]}},
    ):
        batch = read(saved(tmp_path, dump))
        assert batch.total_lengths == [5, 5]
        assert batch.response_lengths == [3, 3]
        assert batch.loss_masks[1].tolist() == [True, False, True]
        assert batch.log_probs[1].tolist() == [-1, -2, -3]
        assert batch.ref_log_probs[1].tolist() == [-1.5, -2, -2]
        assert batch.values[0].tolist() == [0.5, 0, 1]
        assert batch.rewards == [2, 2]


def test_a_slime_dump_without_a_reference_has_no_kl(tmp_path):
    alone = {name: value for name, value in SAMPLE.items() if name != "ref_log_probs"}
    assert read(saved(tmp_path, {"samples": [alone]})).kl[0].tolist() == [0, 0, 0]
    assert read(saved(tmp_path, {"samples": [alone | {"kl": torch.ones(3)}]})).kl[0].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:Casting complex")  # only a warning outside of the tests
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"log_probs": torch.zeros(2)},
            r"sample 0, field 'log_probs': has shape \[2\]; expected the whole response, \[3\]",
        ),
        ({"loss_masks": torch.tensor([1, 0, 0.5])}, "sample 0, field 'loss_mask'"),
        ({"loss_masks": "101"}, "sample 0, field 'loss_mask': is '101'; expected numbers, one a token"),
        ({"loss_masks": [[1], [1, 0]]}, r"sample 0, field 'loss_mask': is \[\[1\], \[1, 0\]\]; expected numbers"),
        ({"log_probs": "abc"}, "sample 0, field 'log_probs': is 'abc'; expected numbers, one a token"),
        ({"log_probs": {}}, "sample 0, field 'log_probs': is {}; expected numbers"),
        (
            {"log_probs": torch.zeros(3, dtype=torch.complex64)},
            "sample 0, field 'log_probs': is tensor.*; expected num",
        ),
        ({"log_probs": torch.zeros(3).to_sparse()}, "sample 0, field 'log_probs': is tensor.*"),
        ({"values": torch.tensor([0, 0, 1e39], dtype=torch.float64)}, "field 'values': token 2 is inf; expected a fin"),
        ({"rewards": torch.ones(2)}, r"sample 0, field 'reward': is tensor\(\[1., 1.\]\); expected a finite number"),
        ({"rewards": 1e39}, "sample 0, field 'reward': is 1e\\+39; expected a finite number"),
        ({"group_index": [1]}, r"sample 0, field 'group_index': is \[1\]; expected a string"),
        ({"group_index": {}}, "sample 0, field 'group_index': is {}; expected a string"),
        ({"response_lengths": None}, "sample 0, field 'response_length': is None"),
        ({"total_lengths": 3}, "sample 0, field 'total_length': is 3; expected an integer of at least 4"),
        ({"rewards": math.inf}, "sample 0, field 'reward': is inf"),
    ],
)
def test_a_bad_sample_of_a_dump_is_named(tmp_path, change, expected):
    with pytest.raises(RolloutError, match=expected):
        read(saved(tmp_path, {"samples": [SAMPLE | change]}))
    with pytest.raises(RolloutError, match="field 'samples'"):
        read(saved(tmp_path, {"weights": torch.zeros(2)}))


def test_numbers_of_a_dump_may_be_tensors(tmp_path):
    """Equal group_index tensors are one group, and NaN is a reward that a tensor has no null for."""
    sample = SAMPLE | {"group_index": torch.tensor(3), "response_lengths": torch.tensor(3)}
    batch = read(saved(tmp_path, {"samples": [sample, sample | {"rewards": torch.tensor(math.nan)}]}))
    assert batch.group_ids == [0, 0]
    assert batch.rewards[0] == 2
    assert math.isnan(batch.rewards[1])
    columns = {name: [value, value] for name, value in SAMPLE.items()}
    columns |= {"rewards": torch.tensor([1.0, 2.0]), "response_lengths": torch.tensor([3, 3])}
    assert read(saved(tmp_path, {"rollout_data": columns})).rewards == [1, 2]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, "holds no sample"),
        ({"response_lengths": 3}, "field 'response_lengths': is 3; expected a list with one entry a sample"),
        (
            {"response_lengths": [3, 3], "rewards": [1.0]},
            "field 'rewards': has length 1; expected one entry a sample, 2",
        ),
        ({"rewards": [1.0]}, "sample 0, field 'response_length': is missing"),
    ],
)
def test_bad_columns_of_a_dump_are_named(tmp_path, columns, expected):
    with pytest.raises(RolloutError, match=expected):
        read(saved(tmp_path, {"rollout_data": columns}))


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_hostile_dump_does_not_run(tmp_path):
    trap = tmp_path / "ran"
    path = saved(tmp_path, {"samples": [SAMPLE | {"extra": Hostile(str(trap))}]})
    with pytest.raises(RolloutError, match="nothing in it was run"):
        read(path)
    assert not trap.exists()
    (tmp_path / "garbage.pt").write_bytes(b"not a dump")
    with pytest.raises(RolloutError, match="not loaded"):
        read(tmp_path / "garbage.pt")


def test_shards_and_whole_are_inverses():
    """Tokens numbered through the batch: each rank gets the numbers of its tokens, and whole() puts them back."""
    lengths = [3, 0, 1, 17]
    full = list(torch.arange(sum(lengths)).split(lengths))
    plan = layout.zigzag([n + 4 for n in lengths], lengths, 3)
    local = [slice_responses(full, plan, rank) for rank in range(3)]
    for rank in range(3):
        owned = [x[torch.from_numpy(plan.token_owners(i)) == rank] for i, x in enumerate(full)]
        assert [x.tolist() for x in local[rank]] == [x.tolist() for x in owned]
    assert [x.tolist() for x in whole(local, plan)] == [x.tolist() for x in full]
    empty = layout.zigzag([], [], 3)
    assert whole([slice_responses([], empty, rank) for rank in range(3)], empty) == []
