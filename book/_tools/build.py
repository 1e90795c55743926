"""Build both editions of the site: English into _build/html, Simplified Chinese into _build/html/zh.

Nothing is executed and PyTorch is not needed: outputs are committed, and the annotated source is read from text.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import polib
import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "_build"
CATALOGUES = ROOT / "book/locale/zh_CN/LC_MESSAGES"
CHINESE_TITLE = "从零构建大模型推理引擎"
CHINESE_AUTHOR = "pagedvllm 作者"
CHINESE_SOURCE = "带注解的源码"  # the generated pages have no catalogue: their title comes from here
CHINESE_CONFIG = {
    "language": "zh_CN",
    "togglebutton_hint": "点击显示",
    "togglebutton_hint_hide": "点击隐藏",
    "nb_code_prompt_show": "显示代码",
    "nb_code_prompt_hide": "隐藏代码",
}


def write_source_pages() -> None:
    """The annotated source in book/source; an unchanged page keeps its time, so Sphinx need not read it again."""
    fresh, target = BUILD / "source", ROOT / "book/source"
    shutil.rmtree(fresh, ignore_errors=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pagedvllm.teach", "source", str(fresh)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)
    target.mkdir(exist_ok=True)
    names = {page.name for page in fresh.iterdir()}
    for old in target.iterdir():
        if old.name not in names:
            old.unlink()
    for name in names:
        if not (target / name).exists() or not filecmp.cmp(fresh / name, target / name, shallow=False):
            shutil.copyfile(fresh / name, target / name)


def caption_words() -> dict[str, str]:
    """English to Chinese for the part captions of _toc.yml: Sphinx files them with the root page's messages."""
    return {entry.msgid: entry.msgstr for entry in polib.pofile(str(CATALOGUES / "book/index.po"))}


def write_chinese_config(work: Path) -> None:
    """_config.yml and _toc.yml of the Chinese edition, made from the English ones."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text("utf-8"))
    config.update(title=CHINESE_TITLE, author=CHINESE_AUTHOR)
    settings = config["sphinx"]["config"]
    settings.update(CHINESE_CONFIG)
    settings["html_theme_options"]["logo"].update(text=CHINESE_TITLE, alt_text=CHINESE_TITLE)
    extensions = config["sphinx"]["local_extensions"]
    config["sphinx"]["local_extensions"] = {name: str(ROOT / folder) for name, folder in extensions.items()}
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    words = caption_words()
    for part in toc["parts"]:
        part["caption"] = words.get(part["caption"]) or part["caption"]
        for page in part["chapters"]:
            if page["file"] == "book/source/index":
                page["title"] = CHINESE_SOURCE
    for name, value in (("_config.yml", config), ("_toc.yml", toc)):
        write_if_changed(work / name, yaml.safe_dump(value, allow_unicode=True, sort_keys=False))


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def jupyter_book(output: Path, *options: str) -> None:
    """One build in which a warning is an error.

    Raises:
        SystemExit: it failed. What Sphinx remembers of the run is dropped: it would not repeat the warning next time.
    """
    program = str(Path(sys.executable).with_name("jupyter-book"))
    command = [program, "build", ".", "-W", "--keep-going", "-q", "--path-output", str(output), *options]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        shutil.rmtree(output / "_build/.doctrees", ignore_errors=True)
        print(done.stdout)
        raise SystemExit(f"jupyter-book failed ({done.returncode}); its messages are above")


def edition(name: str, output: Path, *options: str) -> None:
    start = time.monotonic()
    print(f"== Building the {name} edition ...", end=" ", flush=True)
    jupyter_book(output, *options)
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def main() -> None:
    BUILD.mkdir(exist_ok=True)
    write_source_pages()
    work = BUILD / "zh"
    work.mkdir(exist_ok=True)
    write_chinese_config(work)
    edition("English", ROOT)
    edition("Chinese", work, "--config", str(work / "_config.yml"), "--toc", str(work / "_toc.yml"))
    target = BUILD / "html/zh"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(work / "_build/html", target)
    print("== The site is in _build/html (中文版: _build/html/zh). To read it:")
    print("       make serve-book         then open http://127.0.0.1:8000/")
    print("   Diagrams and icons need a server: they do not load when the files are opened directly.")


if __name__ == "__main__":
    main()
