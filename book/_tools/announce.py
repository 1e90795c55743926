"""Say what `make test` is about to download, and how big it is, before pip starts."""

from __future__ import annotations

import platform
from importlib import metadata


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    print("== Installing everything: PyTorch, transformers, JupyterLab, test tools, and this package (editable)")
    torch = installed("torch")
    if torch is not None:
        print(f"   PyTorch {torch} is here and is kept if requirements.txt accepts it; the rest is about 400 MB, once.")
    elif platform.system() == "Linux":
        print(
            "   On Linux, PyPI's PyTorch comes with the CUDA libraries: several GB. Without a GPU, stop here (Ctrl-C)"
        )
        print("   and take PyTorch's CPU build first: 200 MB (README.md, 'Without a GPU'). The rest is about 400 MB.")
    else:
        print("   About 600 MB, once.")


if __name__ == "__main__":
    main()
