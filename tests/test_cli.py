"""The command line: bad input is one line and exit code 2, and nothing half-written."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, BertConfig, MambaConfig

import ragcache
from ragcache.console import IndexingProgress, printable
from ragcache.model.resolve import resolve
from ragcache.states.store import StateStore
from tests.cli.runner import Outcome, run_command
from tests.encodings import states_of
from tests.unprivileged import reachable_folder, read_only

Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process, as the installed script does."""

    def run_cli(*arguments: object) -> Outcome:
        return run_command(arguments, monkeypatch, capsys)

    return run_cli


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "ferry.md").write_text("The ferry leaves Northport at seven and takes half an hour.")
    (folder / "tower.txt").write_text("The lighthouse was lit in 1871 and is thirty-one metres tall.")
    return folder


@pytest.fixture
def tiny(tiny_folder: Callable[[str], Path]) -> list[object]:
    return ["--model", tiny_folder("llama"), "--dtype", "float32"]


@pytest.fixture
def store(run: Run, corpus: Path, tmp_path: Path, tiny: list[object]) -> Path:
    path = tmp_path / "store"
    assert run("index", corpus, "--store", path, *tiny).code == 0
    return path


def check_refused(outcome: Outcome, message: str) -> None:
    assert outcome.code == 2, outcome
    lines = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, outcome.err
    assert outcome.err.strip().endswith(lines[0])
    assert message in lines[0]
    assert "Traceback" not in outcome.err


def test_index_query_stats(run: Run, corpus: Path, store: Path) -> None:
    again = run("index", corpus, "--store", store)
    assert "0 added, 0 updated, 2 unchanged, 0 removed" in again.out

    (corpus / "ferry.md").unlink()
    (corpus / "tower.txt").write_text("The lighthouse was blown up.")
    changed = run("index", corpus, "--store", store)
    assert "0 added, 1 updated, 0 unchanged, 1 removed" in changed.out

    answer = json.loads(run("query", "How tall is it?", "--store", store, "--json", "--max-tokens", 3).out)
    assert [s["chunk_id"] for s in answer["sources"]] == ["corpus/tower.txt#0"]
    assert answer["tokens"]["restored"] > 0
    assert answer["reuse"] == "composed"

    printed = run("query", "How tall is it?", "--store", store, "--max-tokens", 3, "--reuse", "none")
    assert "corpus/tower.txt#0" in printed.out
    assert "0 tokens restored" in printed.out

    options = ("--repair", "query", "--repair-ratio", 0.5, "--repair-ms", 1e-6, "--order", "given")
    repaired = run("query", "How tall?", "--store", store, "--json", "--encodings", "alone", *options)
    assert json.loads(repaired.out)["tokens"]["repaired"] == 0
    check_refused(run("query", "How tall?", "--store", store, "--repair", "all"), "repair")

    stats = json.loads(run("stats", "--store", store, "--json").out)
    assert (stats["documents"], stats["chunks"]) == (1, 1)
    assert "documents" in run("stats", "--store", store).out


class TestUpkeep:
    """Commands that look after a store; what they do is in tests/test_maintenance.py."""

    @pytest.fixture(autouse=True)
    def _one_encoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAGCACHE_ENCODINGS", "alone")

    def test_forms_containers_folders_and_limits(
        self, run: Run, corpus: Path, tmp_path: Path, tiny: list[object]
    ) -> None:
        store, disk = tmp_path / "store", tmp_path / "disk"
        options = ["--states", "hidden", "--codec", "int4", "--format", "parquet", "--state-folder", disk]
        limits = ["--budget-mb", 100, "--free-mb", 1]
        assert run("index", corpus, "--store", store, *tiny, *options, *limits).code == 0
        assert sorted(path.suffix for path in disk.rglob("*") if path.is_file()) == [".parquet", ".txt"]
        stats = json.loads(run("stats", "--store", store, "--json").out)
        assert (stats["models"][0]["form"], stats["models"][0]["codec"]) == ("hidden", "int4")
        # All of it is remembered.
        assert "2 unchanged" in run("index", corpus, "--store", store).out

    def test_space_that_is_short_is_said(self, run: Run, corpus: Path, tmp_path: Path, tiny: list[object]) -> None:
        check_refused(run("index", corpus, "--store", tmp_path / "s", *tiny, "--free-mb", 10**9), "smaller free_meg")
        nearly_all = shutil.disk_usage(tmp_path).total // 2**20
        outcome = run("index", corpus, "--store", tmp_path / "s", *tiny, "--free-mb", nearly_all)
        assert outcome.code == 0
        assert "2 encodings of chunks have no states" in outcome.err
        assert "2 chunks, for lack of space" in run("stats", "--store", tmp_path / "s").out

    def test_hits_and_misses(self, run: Run, store: Path) -> None:
        run("query", "How tall is it?", "--store", store, "--max-tokens", 1, "--top-k", 2)
        for shard in (store / "shards").glob("[0-9a-f]*.arrow"):
            shard.unlink()
        run("query", "How tall is it?", "--store", store, "--max-tokens", 1, "--top-k", 2, "--json")
        stats = json.loads(run("stats", "--store", store, "--json").out)
        assert (stats["hits"], stats["misses"]) == (2, {"missing": 2})
        assert "2 missing" in run("stats", "--store", store).out

    def test_delete_and_compact(self, run: Run, corpus: Path, store: Path) -> None:
        check_refused(run("delete", "corpus/nothing.md", "--store", store), "nothing was removed")
        check_refused(run("delete", "--store", store), "nothing to delete")
        check_refused(run("delete", "--store", store, "--where", "page"), "KEY=VALUE")
        check_refused(run("delete", "--store", store, "--where", "page=3"), "no document with metadata")
        check_refused(run("delete", "--store", store, "--model", "f" * 12), "ragcache stats shows")
        assert "1 removed" in run("delete", "corpus/ferry.md", "--store", store).out
        assert "1 shards copied" in run("compact", "--store", store, "--threshold", 0).out
        fingerprint = json.loads(run("stats", "--store", store, "--json").out)["models"][0]["fingerprint"]
        assert "1 chunks' states removed" in run("delete", "--store", store, "--model", fingerprint[:12]).out
        check_refused(run("delete", "x", "--store", store, "--model", fingerprint[:12]), "not both")

    def test_verify_and_repair(self, run: Run, store: Path) -> None:
        sound = run("verify", "--store", store)
        assert (sound.code, "everything is as it was written" in sound.out) == (0, True)
        (shard,) = StateStore.open(store).catalog.shards()
        states = states_of(StateStore.open(store).catalog.chunks_by_id(["corpus/ferry.md#0"])[0])
        assert states is not None
        content = bytearray(shard.read_bytes())
        content[states.ranges[1].offset] ^= 1
        shard.write_bytes(content)
        found = run("verify", "--store", store)
        assert found.code == 1
        assert "chunk corpus/ferry.md#0" in found.out
        assert "--repair" in found.out
        faults = json.loads(run("verify", "--store", store, "--json").out)["faults"]
        assert [(it["part"], it["reason"]) for it in faults] == [("chunk", "checksum")]
        assert "1 faults repaired" in run("verify", "--store", store, "--repair").out
        assert run("verify", "--store", store).code == 0

    def test_rebuild(self, run: Run, store: Path) -> None:
        answer = run("query", "How tall is it?", "--store", store, "--json", "--max-tokens", 3)
        (store / "catalog.sqlite").write_bytes(b"rubbish" * 1000)
        check_refused(run("query", "How tall is it?", "--store", store), "ragcache rebuild")
        outcome = run("rebuild", "--store", store)
        assert "2 documents, 2 chunks, 2 of them with states" in outcome.out
        assert "the old catalog is kept in" in outcome.err
        again = run("query", "How tall is it?", "--store", store, "--json", "--max-tokens", 3)
        for part in ("answer", "sources", "tokens", "misses"):
            assert json.loads(again.out)[part] == json.loads(answer.out)[part]

    @pytest.mark.parametrize("command", ["stats", "verify", "compact", "rebuild"])
    def test_no_store(self, run: Run, tmp_path: Path, command: str) -> None:
        check_refused(run(command, "--store", tmp_path / "nothing"), "no store" if command != "rebuild" else "journal")
        assert not list(tmp_path.iterdir())


class TestBadInput:
    def test_unknown_model(self, run: Run, corpus: Path, tmp_path: Path) -> None:
        outcome = run("index", corpus, "--store", tmp_path / "s", "--model", "nobody/no-such-model")
        check_refused(outcome, "model 'nobody/no-such-model' is not on this machine")
        assert not (tmp_path / "s").exists()

    def test_unknown_embedding_model(self, run: Run, corpus: Path, tmp_path: Path, tiny: list[object]) -> None:
        outcome = run("index", corpus, "--store", tmp_path / "s", *tiny, "--embedding-model", "nobody/nothing")
        check_refused(outcome, "nobody/nothing")
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize(
        "config",
        [
            MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4),
            BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
        ],
        ids=["mamba", "encoder"],
    )
    def test_unsupported_family(self, run: Run, corpus: Path, tmp_path: Path, config: object) -> None:
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
        outcome = run("index", corpus, "--store", tmp_path / "s", "--model", tmp_path / "model")
        check_refused(outcome, "is not supported")
        assert not (tmp_path / "s").exists()

    def test_empty_source(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        check_refused(run("index", tmp_path / "empty", "--store", tmp_path / "s"), "holds no documents")
        assert not (tmp_path / "s").exists()

    def test_missing_source(self, run: Run, tmp_path: Path) -> None:
        check_refused(run("index", tmp_path / "gone", "--store", tmp_path / "s"), "does not exist")

    def test_unreadable_file(self, run: Run, corpus: Path, tmp_path: Path) -> None:
        (corpus / "dangling.md").symlink_to(corpus / "gone.md")
        check_refused(run("index", corpus, "--store", tmp_path / "s"), "dangling.md cannot be read")
        assert not (tmp_path / "s").exists()

    def test_binary_file(self, run: Run, corpus: Path, tmp_path: Path) -> None:
        (corpus / "zip.txt").write_bytes(b"PK\x03\x04\xff\xfe\x00")
        check_refused(run("index", corpus, "--store", tmp_path / "s"), "zip.txt is not UTF-8")
        assert not (tmp_path / "s").exists()

    def test_a_store_of_another_model(
        self, run: Run, corpus: Path, store: Path, tiny_folder: Callable[[str], Path]
    ) -> None:
        other = ["--model", tiny_folder("qwen3")]
        before = run("stats", "--store", store, "--json").out
        check_refused(run("query", "x", "--store", store, *other), "holds states of another model")
        check_refused(run("index", corpus, "--store", store, *other), "holds states of another model")
        check_refused(
            run("query", "x", "--store", store, "--dtype", "bfloat16"), "dtype float32 in the store, bfloat16"
        )
        assert run("stats", "--store", store, "--json").out == before

    def test_a_file_as_store(self, run: Run, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        for arguments in (["index", corpus], ["query", "x"], ["stats"], ["serve"]):
            check_refused(run(*arguments, "--store", tmp_path / "file"), "is a file")
        assert (tmp_path / "file").read_text() == "mine"

    def test_no_store(self, run: Run, tmp_path: Path) -> None:
        for arguments in (["query", "x"], ["stats"], ["serve"]):
            check_refused(run(*arguments, "--store", tmp_path / "gone"), "no store at")
        assert not (tmp_path / "gone").exists()

    def test_someone_elses_folder(self, run: Run, corpus: Path) -> None:
        check_refused(run("index", corpus, "--store", corpus), "is not a ragcache store")

    def test_a_place_without_permission(
        self, run: Run, corpus: Path, tmp_path: Path, tiny: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with reachable_folder() as folder:
            place = folder / "place"
            place.mkdir()
            # The other user may reach neither this one's packages nor its home.
            for name, path in (("corpus", corpus), ("model", tiny[1]), ("embedder", resolve("all-minilm-l6-v2"))):
                shutil.copytree(str(path), folder / name)
            for variable in ("RAGCACHE_CACHE_FOLDER", "LLAMA_INDEX_CACHE_DIR"):
                monkeypatch.setenv(variable, str(folder / "cache"))
            models = ("--model", folder / "model", "--embedding-model", folder / "embedder")
            arguments = ("index", folder / "corpus", *models, *tiny[2:])
            # Everything is imported by then: another user may not reach the interpreter's own folder.
            assert run(*arguments, "--store", folder / "first").code == 0
            for path in folder.rglob("*"):
                path.chmod(0o777)
            with read_only(place):
                check_refused(run(*arguments, "--store", place / "s"), "cannot make a store")
            assert not list(place.iterdir())

    def test_below_a_file(self, run: Run, corpus: Path, tmp_path: Path, tiny: list[object]) -> None:
        (tmp_path / "file").touch()
        check_refused(run("index", corpus, "--store", tmp_path / "file" / "s", *tiny), "cannot make a store")

    @pytest.mark.parametrize(
        ("option", "value"),
        [("--codec", "int5"), ("--chunk-tokens", "1"), ("--dtype", "int8"), ("--device", "tpu")],
    )
    def test_bad_settings(self, run: Run, corpus: Path, tmp_path: Path, option: str, value: str) -> None:
        outcome = run("index", corpus, "--store", tmp_path / "s", option, value)
        check_refused(outcome, value)
        assert not (tmp_path / "s").exists()

    @pytest.mark.parametrize("command", [["index"], ["query", "x"], ["serve"], ["verify", "--repair"]])
    def test_a_device_that_is_not_there(
        self, run: Run, corpus: Path, store: Path, tiny: list[object], command: list[object]
    ) -> None:
        arguments = ["index", corpus, *tiny] if command == ["index"] else command
        check_refused(run(*arguments, "--store", store, "--device", "cuda:99"), "device 'cuda:99' is not available")

    @pytest.mark.parametrize("command", [["query", "x"], ["serve"], ["verify", "--repair"]])
    def test_another_precision_than_the_stores(self, run: Run, store: Path, command: list[object]) -> None:
        outcome = run(*command, "--store", store, "--dtype", "float16")
        check_refused(outcome, "dtype float32 in the store, float16 loaded")

    def test_another_adapter_than_the_stores(
        self, run: Run, corpus: Path, tmp_path: Path, tiny: list[object], tiny_folder: Callable[[str], Path]
    ) -> None:
        pytest.importorskip("peft", reason='peft is not installed: pip install "ragcache[lora]"')
        from tests.model.test_adapters import save_adapter

        adapter = save_adapter(tiny_folder("llama"), tmp_path / "adapter")
        assert run("index", corpus, "--store", tmp_path / "s", *tiny, "--adapter", adapter).code == 0
        assert run("query", "When?", "--store", tmp_path / "s", "--max-tokens", 2).code == 0
        outcome = run("query", "When?", "--store", tmp_path / "s", "--adapter", "")
        check_refused(outcome, "adapter")
        check_refused(run("query", "x", "--store", tmp_path / "s", "--adapter", "./gone"), "'./gone' does not exist")

    def test_bad_query_options(self, run: Run, store: Path) -> None:
        for option, value in (("--reuse", "some"), ("--top-k", "0"), ("--temperature", "-1")):
            check_refused(run("query", "x", "--store", store, option, value), option.strip("-").replace("-", "_"))
        check_refused(run("query", " ", "--store", store), "the question is empty")
        check_refused(run("query", "why " * 5000, "--store", store), "context window")

    def test_usage_errors_are_code_2_too(self, run: Run) -> None:
        assert run("index").code == 2
        assert run("frobnicate").code == 2
        assert run("query", "x", "--store", "y", "--top-k", "many").code == 2

    def test_a_port_in_use(self, run: Run, store: Path) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            check_refused(run("serve", "--store", store, "--port", port), "cannot listen on")


def test_an_interrupt_says_that_all_is_well(
    run: Run, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ragcache.indexer.sources.open_source", interrupted)
    outcome = run("index", corpus, "--store", tmp_path / "s")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err


def test_what_a_model_or_document_says_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9bc\td\n☃:smile:") == "a[2Jbc\td\n☃:smile:"


def test_texts_are_printed_as_they_are(run: Run, tmp_path: Path, tiny: list[object], store: Path) -> None:
    folder = tmp_path / "[bold]:100:\x1b[2J"
    folder.mkdir()
    (folder / "a.md").write_text("Text.")
    assert run("index", folder, "--store", tmp_path / "odd", *tiny).code == 0
    printed = run("query", "What?", "--store", tmp_path / "odd", "--max-tokens", 1)
    assert "[bold]:100:[2J/a.md#0" in printed.out
    check_refused(run("serve", "--store", store, "--port", -1), ":-1:")


def test_progress_without_a_terminal_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragcache.console.PLAIN_INTERVAL", 0)
    console = Console(file=io.StringIO(), emoji=False)
    with IndexingProgress(console) as progress:
        progress.start(3)
        progress.advance(1, 4, 1000)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("encoding: 1 of 3 documents, 4 chunks, ")


def test_version(run: Run) -> None:
    assert run("--version").out == f"ragcache {ragcache.__version__}\n"


def test_a_full_disk_under_the_output(store: Path) -> None:
    command = [sys.executable, "-c", "from ragcache.cli import main; main()", "stats", "--store", str(store)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    check_refused(Outcome(done.returncode, "", done.stderr), "No space left on device")
