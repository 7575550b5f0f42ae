from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ragcache import Document
from ragcache.errors import SourceError
from ragcache.indexer.documents import checked
from ragcache.indexer.sources import PYDOC_TOPICS, Source, open_source
from tests.unprivileged import ordinary_user, reachable_folder


def read(source: Source) -> list[Document]:
    return list(checked(source, source.name))


def refused(location: Path | str) -> str:
    with pytest.raises(SourceError) as caught:
        read(open_source(str(location)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestFolder:
    def test_text_and_markdown_by_path(self, tmp_path: Path) -> None:
        root = tmp_path / "docs"
        (root / "sub").mkdir(parents=True)
        for name in ("b.md", "a.txt", "sub/c.TXT", "image.png", ".hidden.md"):
            (root / name).write_text(f"text of {name}", encoding="utf-8")
        (root / ".git").mkdir()
        (root / ".git" / "x.md").write_text("no")
        documents = read(open_source(str(root)))
        assert [d.id for d in documents] == ["docs/a.txt", "docs/b.md", "docs/sub/c.TXT"]
        assert documents[0].text == "text of a.txt"
        assert documents[0].title == "a"

    def test_can_be_read_twice(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("one")
        source = open_source(str(tmp_path))
        assert read(source) == read(source)

    def test_empty(self, tmp_path: Path) -> None:
        (tmp_path / "image.png").write_bytes(b"\x89PNG")
        assert "holds no documents" in refused(tmp_path)

    def test_binary(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"\x89PNG\x00\xff\xfe")
        assert "a.txt is not UTF-8" in refused(tmp_path)
        (tmp_path / "a.txt").write_bytes(b"text with \x00 bytes")
        assert "a.txt is binary" in refused(tmp_path)

    def test_unreadable(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
        assert "a.txt cannot be read" in refused(tmp_path)

    def test_without_permission(self) -> None:
        with reachable_folder() as folder:
            sub = folder / "sub"
            sub.mkdir(mode=0o000)
            with ordinary_user():
                assert "sub cannot be read" in refused(folder)
            sub.chmod(0o755)


class TestJsonLines:
    def write(self, tmp_path: Path, *lines: str) -> Path:
        path = tmp_path / "corpus.jsonl"
        path.write_text("\n".join(lines))
        return path

    def test_documents(self, tmp_path: Path) -> None:
        path = self.write(
            tmp_path,
            json.dumps({"id": "a", "text": "one", "title": "One", "metadata": {"page": 3}}),
            "",
            json.dumps({"id": 7, "text": "zwei ☃", "extra": "ignored"}),
        )
        assert read(open_source(str(path))) == [
            Document("a", "one", "One", {"page": 3}),
            Document("7", "zwei ☃", "", {}),
        ]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{not json", "line 2: not JSON"),
            ("[1]", "line 2: not a JSON object"),
            ("[" * 100_000, "line 2: not JSON"),
            ('{"id": "b", "text": "x", "metadata": {"n": ' + "9" * 5000 + "}}", "line 2: not JSON"),
            ('{"text": "x"}', "line 2: 'id' is missing"),
            ('{"id": true, "text": "x"}', "line 2: 'id' is missing"),
            ('{"id": "b"}', "line 2: 'text' is missing"),
            ('{"id": "b", "text": 5}', "line 2: 'text' is missing or not a string"),
            ('{"id": "b", "text": "x", "metadata": [1]}', "line 2: 'title' must be"),
            ('{"id": "a", "text": "again"}', "'a' comes twice"),
            ('{"id": "", "text": "x"}', "empty id"),
            ('{"id": "b", "text": "\\ud800"}', "half a surrogate pair"),
        ],
    )
    def test_bad_lines(self, tmp_path: Path, line: str, reason: str) -> None:
        assert reason in refused(self.write(tmp_path, '{"id": "a", "text": "one"}', line))

    def test_empty(self, tmp_path: Path) -> None:
        assert "holds no documents" in refused(self.write(tmp_path, "", "  "))

    def test_binary(self, tmp_path: Path) -> None:
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(b"\x89PNG\xff\xfe\x00")
        assert "not UTF-8" in refused(path)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"id": "a", "text": "one"}', encoding="utf-8-sig")
    assert [d.text for d in read(open_source(str(tmp_path)))] == ["one"]
    assert [d.text for d in read(open_source(str(tmp_path / "b.jsonl")))] == ["one"]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.md")
    assert "no regular file" in refused(tmp_path)


def test_the_python_reference() -> None:
    documents = read(open_source(PYDOC_TOPICS))
    assert len(documents) > 70
    assert documents == sorted(documents, key=lambda d: d.id)
    assert any(d.id == "pydoc:topics/with" and "context manager" in d.text for d in documents)


def test_unknown_locations(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "gone")
    assert "pydoc:topics" in refused("pydoc:keywords")
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    assert "not a .jsonl file" in refused(tmp_path / "a.pdf")
