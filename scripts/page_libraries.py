"""Fetch the JavaScript libraries that the chat page is served with.

`libraries.json` beside them pins a version and the registry's checksum (`integrity`) of each package, and the SHA-256 of each file
that is committed. Without arguments: fetch the pinned packages with npm, check them, write their files. With `NAME@VERSION`
arguments: pin these versions first. The files are served as they were published.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parent.parent / "uma_trio/http/page/static/vendor"
TABLE = VENDOR / "libraries.json"


def main(pins: list[str]) -> None:
    """Bring the vendored files to the pinned versions."""
    table: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    new = dict(pin.rsplit("@", 1) for pin in pins)
    unknown = new.keys() - {library["name"] for library in table}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: not in {TABLE.name}")
    for library in table:
        if library["name"] in new:
            library |= {"version": new[library["name"]], "integrity": ""}
        fetch(library)
        print(f"{library['name']} {library['version']}: {len(library['files'])} files")
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def fetch(library: dict[str, Any]) -> None:
    """Write the files of one package, and note their checksums in its entry."""
    with tempfile.TemporaryDirectory() as folder:
        package = f"{library['name']}@{library['version']}"
        command = ["npm", "pack", "--silent", "--pack-destination", folder, package]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).iterdir()
        digest = hashlib.sha512(archive.read_bytes()).digest()
        integrity = f"sha512-{base64.b64encode(digest).decode()}"
        if integrity != (library["integrity"] or integrity):
            sys.exit(f"{package} is {integrity}, not {library['integrity']}")
        library["integrity"] = integrity
        library["files"] = {}
        with tarfile.open(archive) as packed:
            for member in sorted(packed.getmembers(), key=lambda member: member.name):
                name = member.name.partition("/")[2]
                content = packed.extractfile(member)
                if content and any(fnmatch(name, pattern) for pattern in library["include"]):
                    data = content.read()
                    # Without the folder of builds: dist/fonts/a.woff2 is fonts/a.woff2.
                    path = name.split("/", 1)[-1]
                    library["files"][path] = hashlib.sha256(data).hexdigest()
                    target = VENDOR / library["folder"] / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1:])
