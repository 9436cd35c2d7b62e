"""The commands: `python -m perflab --help` lists them. Each imports what it needs, and no more."""

import argparse
import signal
import sys
from collections.abc import Callable

from perflab.errors import PerflabError


def lab(args: argparse.Namespace) -> None:
    from perflab.lab import main

    main(args.port)


def data(args: argparse.Namespace) -> None:
    from perflab.loading.synthetic import make

    print(f"Images: {make(quick=not args.full)}")


def doctor(args: argparse.Namespace) -> None:
    from perflab.bench.machine import describe

    print(describe())


def notebooks(args: argparse.Namespace) -> None:
    from perflab.course import run_notebooks

    run_notebooks(args.names)


def check(args: argparse.Namespace) -> int:
    from perflab.course import check

    faults = check(args.names)
    print("\n".join(faults) or "The notebooks are as they should be.")
    return 1 if faults else 0


def course(args: argparse.Namespace) -> int:
    from perflab.course import course

    outcomes = course(args.names)
    print("Open report/index.html")
    return 1 if any(outcome.reason for outcome in outcomes) else 0


def record(args: argparse.Namespace) -> None:
    from perflab.course import record

    record(args.name, args.names)


def parser() -> argparse.ArgumentParser:
    """One sub-command for each function above."""
    top = argparse.ArgumentParser(prog="python -m perflab", description="The commands of the course.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.set_defaults(run=run)
        return command

    add(lab, "open the course in JupyterLab").add_argument("--port", type=int, help="this port and no other")
    full = add(data, "make the images that the course reads")
    full.add_argument("--full", action="store_true", help="all of them, for recordings")
    add(doctor, "say what this machine is and what it lacks")
    of_notebooks = [
        add(notebooks, "replay notebooks from the recorded results and write them back in their normal form"),
        add(check, "say what is wrong with the committed notebooks"),
        add(course, "run notebooks on this machine and write report/index.html"),
        add(record, "measure all studies in full and keep the results under this machine's name"),
    ]
    for command in of_notebooks:
        command.add_argument("names", nargs="*", metavar="NB", help="such as 03; all if none is named")
    of_notebooks[-1].add_argument("--name", help="the machine's name in the records")
    return top


def main(words: list[str] | None = None) -> int:
    """Run one command; its exit status. What the user can mend is one sentence and status 2."""
    args = parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that kernels and workers are ended, too
    try:
        return args.run(args) or 0
    except PerflabError as error:
        print(f"perflab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nperflab: stopped.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
