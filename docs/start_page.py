"""A hook of MkDocs: the README is the start page of the site, CONTRIBUTING one of its pages."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_files(files: Any, config: Any) -> None:
    """Add both to the pages, with their links as they are from here."""
    for name, page in ("README.md", "index.md"), ("CONTRIBUTING.md", "CONTRIBUTING.md"):
        text = Path(config.config_file_path).with_name(name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
