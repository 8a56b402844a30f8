"""Negative controls: put seeded faults into a copy of this code, one at a time, and run the tests that should notice.

    python scripts/mutations.py [WORD ...]    only faults whose names contain a word

A fault that no test notices is reported as survived, and the exit status is 1. The checkout is not touched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("uma_trio", "protocol", "sim", "cluster", "tests", "docs", "fuzz", "scripts", "benches")


class Mutation(NamedTuple):
    """A fault: in `path`, `old` (which occurs once) becomes `new`. `tests` is what should notice, for pytest."""

    name: str
    path: str
    old: str
    new: str
    tests: str


_CELLS = "uma_trio/engine/cells.py"
_LISTENER = "uma_trio/sockets/listener.py"
_CONNECTION = "protocol/uma_protocol/connection.py"
_CONFORMS = "tests/test_conformance.py::test_this_daemon_conforms"

MUTATIONS = (
    Mutation(
        "a slot is leaked",
        _CELLS,
        "        self._free.append(sequence.slot)\n        self.reserve(sequence, 0)\n",
        "        self.reserve(sequence, 0)\n",
        "tests/test_cells.py tests/test_engine.py",
    ),
    Mutation(
        "reserved cells are not given back",
        _CELLS,
        "        self._free.append(sequence.slot)\n        self.reserve(sequence, 0)\n",
        "        self._free.append(sequence.slot)\n",
        "tests/test_cells.py tests/test_engine.py",
    ),
    Mutation(
        "a request has two terminal events",
        "uma_trio/engine/registry.py",
        "                self._inbox.left_queue(now - sequence.submit.submitted)\n"
        "        self._finish(sequence, reason, now, code, message)\n",
        "                self._inbox.left_queue(now - sequence.submit.submitted)\n"
        "        self._finish(sequence, reason, now, code, message)\n"
        "        self._finish(sequence, reason, now, code, message)\n",
        "tests/test_engine.py tests/test_connection.py",
    ),
    Mutation(
        "rows of logits are swapped",
        "uma_trio/engine/chunk.py",
        "self.sampler(rows[first:], self.guesses)",
        "self.sampler(rows[first:][::-1], self.guesses)",
        "tests/test_engine.py tests/test_connection.py",
    ),
    Mutation(
        "credit is not returned",
        "uma_trio/engine/intake.py",
        "registry.give_credit(handle, n)",
        "pass",
        "tests/test_engine.py tests/test_engine_task.py",
    ),
    Mutation(
        "a full KV cache is a failed decode",
        "uma_trio/engine/recovery.py",
        "if status == DecodeStatus.NO_KV_ROOM:",
        "if status is None:",
        "tests/test_engine.py tests/test_connection.py",
    ),
    Mutation(
        "numbers that are not finite are sampled",
        "uma_trio/engine/sampling/sampler.py",
        "finite = np.isfinite(values[:, 0])",
        "finite = np.ones(len(values), bool)",
        "tests/test_sampling.py tests/test_sampled_requests.py tests/test_engine.py",
    ),
    Mutation(
        "a stop string is sent",
        "uma_trio/text/stream.py",
        "return known[: end - len(self.stopped)]",
        "return known[:end]",
        "tests/test_text_stream.py",
    ),
    Mutation(
        "the lock of the socket is released too early",
        _LISTENER,
        "        note_holder(fd)\n",
        "        note_holder(fd)\n        fcntl.flock(fd, fcntl.LOCK_UN)\n",
        "tests/test_listener.py",
    ),
    Mutation(
        "the socket of another daemon is removed",
        _LISTENER,
        "self._identity is not None and self.is_linked()",
        "self._identity is not None",
        "tests/test_listener.py",
    ),
    Mutation(
        "a socket that somebody answers is replaced",
        _LISTENER,
        "    _refuse_if_answered(path, flag)\n    os.unlink(path)\n",
        "    os.unlink(path)\n",
        "tests/test_listener.py",
    ),
    Mutation(
        "the settings file wins over the command line",
        "uma_trio/config/settings.py",
        "    if item.key in flags:\n        return flags[item.key], item.flag\n",
        "    if item.key in flags and item.key not in file:\n        return flags[item.key], item.flag\n",
        "tests/test_config.py",
    ),
    Mutation(
        "any key opens HTTP",
        "uma_trio/http/settings.py",
        "if hmac.compare_digest(key, given):",
        "if key is not given:",
        "tests/test_http_rights.py tests/test_http_hostile.py",
    ),
    Mutation(
        "any token opens a port",
        _CONNECTION,
        "if token is not None and not hmac.compare_digest(",
        "if token is None and not hmac.compare_digest(",
        "protocol/tests/test_hello.py",
    ),
    Mutation(
        "refusals are not counted", _CONNECTION, "self._refused_in_a_row += 1", "pass", _CONFORMS
    ),
    Mutation(
        "a cancel with any id ends what runs",
        _CONNECTION,
        "if request.id is not None and request.id != running:",
        "if request.id is not None and running is None:",
        _CONFORMS,
    ),
    Mutation(
        "a second request replaces the first",
        _CONNECTION,
        "            if running is not None:\n                raise RemoteProtocolError(\n"
        "                    Code.E_PROTO_004,",
        "            if running is request:\n                raise RemoteProtocolError(\n"
        "                    Code.E_PROTO_004,",
        _CONFORMS,
    ),
    Mutation(
        "a frame may be empty",
        "protocol/uma_protocol/frames.py",
        "            if not 0 < length <= self.max_frame_bytes:",
        "            if not 0 <= length <= self.max_frame_bytes:",
        _CONFORMS,
    ),
)


def failing_test(copy: Path, tests: str) -> str:
    """Return the first test that fails in a copy of the code, "" if all pass.

    Raises:
        SystemExit: the tests could not be run.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *tests.split()],
            cwd=copy,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (copy / "protocol", copy))),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1) is (found is None):
        raise SystemExit(f"pytest did not run\n{done.stdout}{done.stderr}")
    return found.group(1) if found else ""


def main(words: list[str]) -> int:
    """Run the faults, and report."""
    chosen = [each for each in MUTATIONS if not words or any(word in each.name for word in words)]
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__", "node_modules")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        for file in ROOT.iterdir():
            if file.is_file() and not file.name.startswith("."):
                shutil.copy2(file, copy)
        tests = dict.fromkeys(test for each in chosen for test in each.tests.split())
        if failure := failing_test(copy, " ".join(tests)):
            raise SystemExit(f"{failure} fails without any fault: mend that first")
        for mutation in chosen:
            path = copy / mutation.path
            right = path.read_text(encoding="utf-8")
            path.write_text(right.replace(mutation.old, mutation.new), encoding="utf-8")
            failure = failing_test(copy, mutation.tests)
            path.write_text(right, encoding="utf-8")
            print(
                f"{mutation.name}: {f'caught by {failure}' if failure else 'SURVIVED'}", flush=True
            )
            survived += [] if failure else [mutation]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} seeded faults caught")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
