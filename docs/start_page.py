"""A hook of MkDocs: the README is the start page of the site."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_files(files: Any, config: Any) -> None:
    """Add the README to the pages, with its links as they are from here."""
    readme = Path(config.config_file_path).with_name("README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
