"""python -m pagedvllm.teach {sync,check,coverage,execute,alter,source,truncate,player,source-map}"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagedvllm.teach import roadmap, source_map_command


def main(argv: list[str]) -> int:
    """Run one command; returns the exit status. Each command's module is loaded only for it."""
    parser = argparse.ArgumentParser(prog="python -m pagedvllm.teach", description="The book's tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("sync", "rewrite live cells from the package"),
        ("check", "fail when a live cell is not what sync would write"),
        ("coverage", "print what part of each module live cells show"),
        ("execute", "run notebooks again, in place"),
        ("alter", "prove that altered outputs fail, with every live cell installed"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("notebooks", nargs="*", type=Path, help="default: every notebook of roadmap.toml")
        if name == "execute":
            command.add_argument("--remeasure", action="store_true", help="also run the cells that measure anew")
    source = commands.add_parser("source", help="write the pages of the annotated source")
    source.add_argument("directory", type=Path)
    truncate = commands.add_parser("truncate", help="write the package as it stands after a chapter")
    truncate.add_argument("chapter")
    truncate.add_argument("directory", type=Path)
    player = commands.add_parser("player", help="write a page that shows a trace, and print what the trace holds")
    player.add_argument("trace", type=Path, help="a file of `pagedvllm replay` lines")
    player.add_argument("page", type=Path)
    player.add_argument("--budget", type=int, help="max_num_batched_tokens of the run")
    player.add_argument("--block-size", type=int)
    sources = commands.add_parser("source-map", help="verify and show the map from this book to vLLM's source")
    source_map_command.add_arguments(sources)
    return _run(parser.parse_args(argv))


def _run(args: argparse.Namespace) -> int:
    if args.command == "source-map":
        return source_map_command.run(args)
    if args.command == "truncate":
        from pagedvllm.teach.truncate import write

        write(args.chapter, args.directory)
        return 0
    if args.command == "source":
        from pagedvllm.teach.source import write_pages

        write_pages(args.directory)
        return 0
    if args.command == "player":
        from pagedvllm.teach.trace_player import player

        limits = {"max_num_batched_tokens": args.budget, "block_size": args.block_size}
        shown = player(args.trace, limits, title=args.trace.name)
        shown.save(args.page)
        print(shown)
        return 0
    paths = args.notebooks or existing_notebooks()
    if args.command == "execute":
        from pagedvllm.teach.execute import execute

        return execute(paths, remeasure=args.remeasure)
    if args.command == "alter":
        from pagedvllm.teach.alter import alter

        return alter(paths)
    from pagedvllm.teach import check

    if args.command == "check":
        return check.check(paths, everything=not args.notebooks)
    return check.sync(paths) if args.command == "sync" else check.coverage(paths)


def existing_notebooks() -> list[Path]:
    """Every notebook of roadmap.toml. A chapter that names one must have it."""
    return [roadmap.ROOT / path for path in roadmap.notebooks()]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
