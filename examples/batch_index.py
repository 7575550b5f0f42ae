"""The offline batch job: `ragcache index` over a JSONL file, run twice; the second run has nothing left to do.

python examples/batch_index.py --store /tmp/harbour
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CORPUS = Path(__file__).with_name("harbour.jsonl")


def ragcache(*arguments: str) -> None:
    """Run the command line that is installed beside this Python."""
    command = [str(Path(sys.executable).with_name("ragcache")), *arguments]
    print("$", "ragcache", *arguments, flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    """Index the corpus, index it again, and show what the store holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="folder of the state store")
    store = str(parser.parse_args().store)
    ragcache("index", str(CORPUS), "--store", store)
    ragcache("index", str(CORPUS), "--store", store)
    ragcache("stats", "--store", store)


if __name__ == "__main__":
    main()
