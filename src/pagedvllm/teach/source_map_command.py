"""python -m pagedvllm.teach source-map {verify,drift,page,index}"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pagedvllm.teach import roadmap, source_drift, source_index, source_map


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    verify = actions.add_parser("verify", help="check every place against the committed index; status 1 on a problem")
    verify.add_argument("--tree", type=Path, help="an unpacked wheel's vllm folder: check the index against it, too")
    drift = actions.add_parser("drift", help="what became of each place in a newer release, chapter by chapter")
    drift.add_argument("--against", type=Path, help="an index or an unpacked vllm folder (default: the committed one)")
    drift.add_argument("--all", action="store_true", help="also name the places that stayed as they were")
    page = actions.add_parser("page", help="the page of the map, in Markdown")
    page.add_argument("out", type=Path, nargs="?", help="the file to write (default: print)")
    index = actions.add_parser("index", help="make an index of the map's files from an unpacked wheel")
    index.add_argument("--tree", type=Path, required=True, help="the wheel's vllm folder")
    index.add_argument("--also", nargs="*", default=[], metavar="FILE", help="more files, relative to that folder")
    index.add_argument("out", type=Path, help="book/anchors/vllm-VERSION.json; files that it already has stay in it")


def run(args: argparse.Namespace) -> int:
    """Do it; what is wrong is printed, and gives status 1."""
    try:
        return ACTIONS[args.action](args)
    except (OSError, TypeError, ValueError) as error:
        print(f"source-map {args.action}: {error}", file=sys.stderr)
        return 1


def _verify(args: argparse.Namespace) -> int:
    map_ = source_map.read()
    index = source_index.read(source_map.index_file(map_.version))
    bad = source_map.verify(map_, index, tree=args.tree)
    for problem in bad:
        print(problem, file=sys.stderr)
    where = f"{len(map_.anchors)} places in {len(map_.files)} files of vLLM {map_.version}"
    print(f"source-map verify: {len(bad)} problems, {where}" if bad else f"source-map verify: {where}, all there")
    return int(bool(bad))


def _drift(args: argparse.Namespace) -> int:
    map_ = source_map.read()
    old = source_index.read(source_map.index_file(map_.version))
    new = source_index.read(args.against or source_map.index_file(map_.newer))
    for line in source_drift.report(map_, old, new, everything=args.all):
        print(line)
    return 0


def _page(args: argparse.Namespace) -> int:
    from pagedvllm.teach.source_map_page import page

    if args.out:
        args.out.write_text(page(), "utf-8")
    else:
        print(page(), end="")
    return 0


def _index(args: argparse.Namespace) -> int:
    known = source_index.read(args.out).files if args.out.exists() else {}
    names = sorted({*source_map.read(roadmap.ROOT).files, *known, *args.also})
    index = source_index.of_tree(args.tree, names)
    for name in names:
        if name not in index.files:
            print(f"not in vLLM {index.version}: {name}", file=sys.stderr)
    args.out.write_text(source_index.dumps(index), "utf-8")
    symbols = sum(len(file.symbols) for file in index.files.values())
    print(f"vLLM {index.version}: {symbols} symbols of {len(index.files)} files")
    return 0


ACTIONS = {"verify": _verify, "drift": _drift, "page": _page, "index": _index}
