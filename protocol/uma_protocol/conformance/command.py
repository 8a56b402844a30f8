"""`uma-conformance`: run the cases against a server and report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from . import cases_documents, cases_events, cases_requests  # noqa: F401  they register their cases
from .peer import CASES, Case, Server

NOT_TESTED = {
    "3.5": "only between the terminal event and its last byte, a moment that a client cannot choose",
    "3.9": "a matter of time: what a token is delayed by cannot be told from what it takes to compute",
    "4.6": "when a prompt is computed cannot be seen from outside",
    "4.10": "what a choice computes while nothing is read cannot be seen from outside",
    "6.5": "about files of the server",
    "6.6": "about clients",
    "6.7": "about users of the machine that the kernel does not attest",
}
"""Rules without a case, each with the reason."""


class Result(NamedTuple):
    """The outcome of a case: `passed`, `failed` or `skipped`."""

    case: Case
    outcome: str
    why: str
    seconds: float


def as_json(results: list[Result]) -> str:
    """Return a report as JSON."""
    counts = {
        outcome: sum(result.outcome == outcome for result in results)
        for outcome in ("passed", "failed", "skipped")
    }
    cases = [
        {
            "id": result.case.id,
            "rule": result.case.rule,
            "title": result.case.title,
            "outcome": result.outcome,
            "why": result.why,
            "seconds": round(result.seconds, 4),
        }
        for result in results
    ]
    return json.dumps({**counts, "cases": cases, "not_tested": NOT_TESTED}, indent=2)


def as_junit(results: list[Result]) -> str:
    """Return a report as JUnit XML."""
    suite = ET.Element(
        "testsuite",
        name="uma-conformance",
        tests=str(len(results)),
        failures=str(sum(result.outcome == "failed" for result in results)),
        skipped=str(sum(result.outcome == "skipped" for result in results)),
    )
    for result in results:
        element = ET.SubElement(
            suite,
            "testcase",
            classname=f"rule {result.case.rule}",
            name=f"{result.case.id} {result.case.title}",
            time=f"{result.seconds:.4f}",
        )
        if result.outcome != "passed":
            kind = "failure" if result.outcome == "failed" else "skipped"
            ET.SubElement(element, kind, message=result.why)
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)


def chosen(wanted: list[str]) -> list[Case]:
    """Return the cases of sections, rules or numbers, in order; all if none is named.

    Raises:
        ValueError: nothing has that number.
    """
    order = sorted(CASES.values(), key=lambda case: [int(part) for part in case.id.split(".")])
    for number in wanted:
        if not any(f"{case.id}.".startswith(f"{number}.") for case in order):
            raise ValueError(f"no case, rule or section is numbered {number}: see --list")
    return [
        case
        for case in order
        if not wanted or any(f"{case.id}.".startswith(f"{number}.") for number in wanted)
    ]


def run(server: Server, cases: list[Case], *, slow: bool) -> list[Result]:
    """Run cases one after the other, with a line for each on a terminal's error output."""
    results = []
    for case in cases:
        if case.slow and not slow:
            outcome, why, seconds = "skipped", f"takes {case.slow:g} s: --slow runs it", 0.0
        else:
            timeout_s = server.timeout_s
            server.timeout_s = timeout_s + case.slow
            outcome, why, seconds = server.run(case)
            server.timeout_s = timeout_s
        results.append(Result(case, outcome, why, seconds))
    return results


def as_text(results: list[Result]) -> str:
    """Return a report for a terminal."""
    signs = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}
    lines = []
    section = ""
    names = {
        "1": "Frames",
        "2": "Documents",
        "3": "Requests",
        "4": "Events",
        "5": "Errors",
        "6": "A TCP port",
        "7": "Time and sizes",
    }
    for result in results:
        if (number := result.case.id.partition(".")[0]) != section:
            section = number
            lines.append(f"\n{number}. {names[number]}")
        lines.append(f"  {signs[result.outcome]}  {result.case.id:<7} {result.case.title}")
        if result.why:
            lines.append(f"                {result.why}")
    counts = [
        f"{sum(result.outcome == outcome for result in results)} {outcome}"
        for outcome in ("passed", "failed", "skipped")
    ]
    return "\n".join([*lines, "", ", ".join(counts)]).lstrip("\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="uma-conformance",
        description="Test a server of the uma-trio wire protocol against the rules of docs/reference/protocol.md.",
    )
    parser.add_argument(
        "cases", nargs="*", metavar="NUMBER", help="section, rule or case: 2, 2.3, 2.3.1"
    )
    parser.add_argument(
        "--socket",
        default=os.environ.get("UMA_SOCKET"),
        metavar="ADDRESS",
        help="path of the Unix socket, or tcp:HOST:PORT; default: UMA_SOCKET",
    )
    parser.add_argument(
        "--token-file",
        default=os.environ.get("UMA_TOKEN_FILE"),
        metavar="FILE",
        help="file with the token for a TCP port; default: UMA_TOKEN_FILE",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="to wait for an event; default 10",
    )
    parser.add_argument(
        "--slow", action="store_true", help="run the cases that wait for a time limit too"
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "junit"),
        default="text",
        help="of the report; default text",
    )
    parser.add_argument("--list", action="store_true", help="list the cases and run none")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns 0 if no case failed, 1 if one did, 2 if nothing could be tested."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        cases = chosen(args.cases)
    except ValueError as exc:
        parser.error(str(exc))
    if args.list:
        print("\n".join(f"{case.id:<7} {case.title}" for case in cases))
        for rule, reason in NOT_TESTED.items():
            print(f"{rule:<7} not tested: {reason}")
        return 0
    if not args.socket:
        parser.error("--socket is missing: give the path of the socket, or tcp:HOST:PORT")
    token = None
    try:
        if args.token_file and args.socket.startswith("tcp:"):
            token = Path(args.token_file).read_text(encoding="utf-8").strip()
        server = Server(args.socket, token, args.timeout)
        server.dial().close()
    except (OSError, ValueError) as exc:
        print(f"cannot connect to {args.socket}: {exc}", file=sys.stderr)
        return 2
    results = run(server, cases, slow=args.slow)
    reports = {"text": as_text, "json": as_json, "junit": as_junit}
    print(reports[args.format](results))
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
