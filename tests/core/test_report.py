"""The report's JSON is a contract; its table is for people and never shows escape codes."""

import dataclasses
import html
import json
import pickle
import threading
import time

import pytest
from transformers import AutoModel

from hf_zero_stream.reports.load import PHASES, LoadReport, RankReport, Verification
from hf_zero_stream.reports.measures import PhaseClock
from hf_zero_stream.reports.save import PHASES as SAVE_PHASES
from hf_zero_stream.reports.save import SaveReport, SavingRank
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config


def rank_report(rank=0, **changes):
    report = RankReport(
        rank=rank,
        seconds={phase: float(i) for i, phase in enumerate(PHASES)},
        bytes_needed=1000,
        bytes_read=6 * 2**30,
        reads=12,
        partition_bytes=1536,
        staging_bytes=64 * 2**20,
        anonymous_growth_peak=2**40,
        device_peak=0,
        materialised={"model.layers.0.mlp.weight": "op ldexp"},
    )
    return dataclasses.replace(report, **changes)


def load_report(world_size, **changes):
    return LoadReport(world_size=world_size, ranks=tuple(rank_report(rank, **changes) for rank in range(world_size)))


def test_json_structure():
    assert json.loads(load_report(1).to_json()) == {
        "world_size": 1,
        "into": "memory",
        "ranks": [
            {
                "rank": 0,
                "seconds": {
                    "model": 0.0,
                    "index": 1.0,
                    "plan": 2.0,
                    "wait": 3.0,
                    "read": 4.0,
                    "convert": 5.0,
                    "copy": 6.0,
                    "finalise": 7.0,
                    "total": 8.0,
                },
                "bytes_needed": 1000,
                "bytes_read": 6 * 2**30,
                "reads": 12,
                "partition_bytes": 1536,
                "staging_bytes": 64 * 2**20,
                "anonymous_growth_peak": 2**40,
                "device_peak": 0,
                "device_reserved": 0,
                "thread_seconds": {},
                "retries": 0,
                "verification": {
                    "how": "off",
                    "parameters": 0,
                    "left_out": 0,
                    "elements": 0,
                    "bytes_read": 0,
                    "seconds": 0.0,
                    "digest": "",
                },
                "materialised": {"model.layers.0.mlp.weight": "op ldexp"},
            }
        ],
        "recast": [],
        "checkpoint_bytes": 0,
        "stock_reader": "",
        "stock_reason": "",
        "footprint": None,
    }


def test_round_trips():
    report = load_report(3)
    assert report.to_dict() == json.loads(report.to_json(indent=2))
    assert pickle.loads(pickle.dumps(report)) == report, "ranks send each other their parts"


def rows(table):
    """The cells of each row whose first cell is not a header or a rule."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return [row for row in cells if row[0] != "Rank" and set(row[0]) - set("-: ")]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_table_has_a_row_per_rank(world_size):
    table = load_report(world_size).table()
    assert [row[0] for row in rows(table)] == [str(rank) for rank in range(world_size)] * 3


def test_table_summarises_many_ranks():
    ranks = tuple(rank_report(rank, seconds=dict.fromkeys(PHASES, float(rank)), reads=rank) for rank in range(9))
    table = LoadReport(world_size=9, ranks=ranks).table()
    assert [row[:2] for row in rows(table)[:3]] == [["min", "0.00"], ["median", "4.00"], ["max", "8.00"]]
    assert [row[3] for row in rows(table)[3:6]] == ["0", "4", "8"]
    assert "9 ranks, slowest: rank 8, 8.00 s" in table


def test_table_of_threads_where_there_is_a_device():
    spent = {"thread_seconds": {"buffer": 0.5, "read": 2.0, "submit": 1.25}}
    table = load_report(2, device_peak=1, **spent).table()
    _, _, shown = table.partition("Seconds of all reader threads together:\n")
    assert rows(shown)[:2] == [[rank, "0.50", "2.00", "1.25"] for rank in "01"]
    assert "reader threads" not in load_report(2, **spent).table()


def test_table_units_and_throughput():
    seconds_row, reading_row, memory_row = rows(load_report(1).table())
    assert seconds_row == ["0", *(f"{number}.00" for number in range(9))]
    assert reading_row == ["0", "1000 B", "6.0 GiB", "12", "1.5 GiB/s"]
    assert memory_row == ["0", "1.5 KiB", "64.0 MiB", "1.0 TiB", "0 B", "0 B"]
    assert "1.0 MiB" in load_report(1, bytes_needed=2**20 - 1).table()
    assert "0 B/s" in load_report(1, seconds=dict.fromkeys(PHASES, 0.0)).table()


def test_table_is_plain_text_of_80_columns_wherever_it_runs(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    verification = Verification(how="full", parameters=7, elements=50, bytes_read=2048, seconds=0.5, digest="f" * 16)
    many = {
        f"model.layers.{number}.mlp.experts.down_proj": "an operation on values that is not lazy" for number in (0, 2)
    }
    changes = {"verification": verification, "retries": 3, "materialised": many}
    table = load_report(64, **changes).table()
    assert table.isascii()
    assert table.isprintable() or set(table) - {"\n"} == {c for c in table if c.isprintable()}
    assert max(map(len, table.splitlines())) <= 80
    assert all(line == line.rstrip() for line in table.splitlines())


def test_table_tells_of_retries_and_verification():
    plain = load_report(2).table()
    assert "Verified" not in plain and "Tried again" not in plain
    verification = Verification(how="full", parameters=7, elements=50, bytes_read=2048, seconds=0.5, digest="f" * 16)
    report = load_report(2, retries=3, verification=verification)
    assert report.digest == "fffffffffffffffe", "sums are modulo 2**64"
    assert report.to_dict()["ranks"][1]["verification"]["digest"] == "f" * 16
    lines = report.table().splitlines()
    place = lines.index("Verified (full): 100 elements of 7 parameters are what the files hold; 4.0 KiB")
    assert lines[place + 1] == "    read again in 0.50 s; digest fffffffffffffffe"
    place = lines.index("Tried again after passing faults of the file system: 6 times (rank 0: 3, rank 1:")
    assert lines[place + 1] == "    3)"


def materialised_lines(*ranks):
    reports = tuple(rank_report(rank, materialised=dict(entries)) for rank, entries in enumerate(ranks))
    table = LoadReport(world_size=len(ranks), ranks=reports).table()
    assert "Materialised parameters" in table
    heading, *lines = table[table.index("Materialised parameters") :].splitlines()
    return heading, lines


def test_materialised_parameters_are_folded():
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(12) for expert in (0, 2)]
    heading, lines = materialised_lines([(name, "op ldexp") for name in [*names, "0.bias", "head[0].{w}"]])
    assert "(26)" in heading
    assert [line.strip() for line in lines] == [
        "layers.{0...11}.experts.{0, 2}.w: op ldexp",
        "0.bias: op ldexp",
        "head[0].{w}: op ldexp",
    ]


def test_materialised_parameters_with_gaps_are_not_folded():
    _, lines = materialised_lines([("a.0.b.0.w", "r"), ("a.1.b.1.w", "r")])
    assert lines == ["  a.0.b.0.w: r", "  a.1.b.1.w: r"]


def test_materialised_parameters_of_some_ranks_say_so():
    _, lines = materialised_lines([("x", "r"), ("y", "r")], [("x", "r")])
    assert lines == ["  x: r", "  y: r (on 1 of 2 ranks)"]


def test_nothing_materialised_is_not_mentioned():
    assert "Materialised" not in load_report(2, materialised={}).table()


def test_recast_parameters_are_folded_and_survive_json():
    report = dataclasses.replace(load_report(2), recast=("layers.0.gate.weight", "layers.1.gate.weight", "scale"))
    assert report.to_dict()["recast"] == list(report.recast)
    heading, *lines = report.table()[report.table().index("Recast") :].splitlines()
    assert heading.startswith("Recast parameters (3)")
    assert lines == ["  layers.{0...1}.gate.weight", "  scale"]
    assert "Recast" not in load_report(2).table()


def test_reports_are_printed_as_tables_in_a_notebook_too():
    rank = SavingRank(
        rank=0,
        seconds=dict.fromkeys(SAVE_PHASES, 0.25),
        bytes_written=2**20,
        bytes_copied=0,
        rounds=0,
        anonymous_growth_peak=2**10,
    )
    saved = SaveReport(
        folder="a<b", files=("model.safetensors",), ranks=(rank,), verified=False, materialised={}, what="weights"
    )
    loaded = load_report(2)
    for report, beginning in (
        (loaded, "STREAMING LOAD REPORT (2 ranks, slowest: rank 0, 8.00 s)\nInto memory."),
        (saved, "Saved 1.0 MiB of weights in 1 shard to a<b in 0.25 s (1 rank; "),
    ):
        text = str(report)
        assert text == report.table() == f"{report}" and text.startswith(beginning)
        assert max(map(len, text.splitlines())) <= 80
        assert report._repr_html_() == f"<pre>{html.escape(text)}</pre>"
    assert [row[0] for row in rows(str(saved))] == ["0", "0"]


def test_a_load_in_one_line():
    report = dataclasses.replace(load_report(2), into="ZeRO-3 partitions", checkpoint_bytes=2**23)
    line = (
        "loaded 8.0 MiB into ZeRO-3 partitions on 2 ranks in 8.00 s; a rank read 6.0 GiB, and its memory on the host "
        "grew by 1.0 TiB"
    )
    assert report.summary() == line
    assert dataclasses.replace(report, stock_reader="rank 0").summary() == f"{line} (stock: rank 0 reads 8.0 MiB)"


def test_a_report_of_stocks_load_says_so():
    report = LoadReport(world_size=1, ranks=(), stock_reason="it is for one process")
    assert not report.streamed and load_report(1).streamed
    assert str(report) == "Stock transformers loaded this model: it is for one process." and report.digest == ""


def loads_after_the_first(folder):
    """These import nothing."""
    from hf_zero_stream.bindings.streaming import streaming

    with streaming():
        models = [AutoModel.from_pretrained(folder, ds_config=ds_config()) for _ in range(6)]
    return [model.streaming_report for model in models[1:]]


def test_every_second_of_a_load_has_a_name(cluster, zoo_checkpoint):
    reports = run_ranks(2, loads_after_the_first, str(zoo_checkpoint("qwen3_moe")))[0]
    for loads in zip(*(report.ranks for report in reports), strict=True):
        # A share, as machines are slow; and on a busy one a rank may lose its core between two phases, but not in each
        # load.
        without = [2 - sum(load.seconds.values()) / load.seconds["total"] for load in loads]
        assert min(map(abs, without)) <= 0.1, without
        for load in loads:
            assert min(load.seconds[phase] for phase in ("model", "index", "plan", "wait", "read", "finalise")) > 0


def test_the_rest_is_what_no_phase_has_had():
    clock = PhaseClock(PHASES)
    time.sleep(0.02)
    with clock("total"):
        with clock("index"):
            time.sleep(0.01)
        time.sleep(0.01)
        clock.add_rest("model")
        clock.add_rest("plan")
    assert 0.01 <= clock.seconds["model"] < clock.seconds["total"] - clock.seconds["index"]
    assert clock.seconds["plan"] < 0.01


def test_clock_accumulates_and_nests():
    clock = PhaseClock(PHASES)
    with clock("total"):
        for _ in range(2):
            with clock("plan"):
                time.sleep(0.01)
    assert list(clock.seconds) == list(PHASES)
    assert 0.02 <= clock.seconds["plan"] <= clock.seconds["total"]
    assert clock.seconds["read"] == 0.0


def test_clock_counts_a_phase_that_failed():
    clock = PhaseClock(PHASES)
    with pytest.raises(OSError), clock("read"):
        raise OSError("disk")
    assert clock.seconds["read"] > 0.0


def test_clock_is_thread_safe():
    clock = PhaseClock(PHASES)
    threads = [threading.Thread(target=lambda: [clock.add("copy", 1.0) for _ in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.seconds["copy"] == 16000.0


def test_clock_refuses_an_unknown_phase():
    clock = PhaseClock(PHASES)
    with pytest.raises(ValueError, match="expected one of model, index.*got 'raed'"):
        clock.add("raed", 1.0)
    entered = False
    with pytest.raises(ValueError):
        with clock("raed"):
            entered = True
    assert not entered
