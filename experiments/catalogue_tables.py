"""The tables and pictures of docs/results.md.

python -m experiments.catalogue_tables [--out docs]    prints the tables; with --out it writes the pictures there

It reads the records of `python -m experiments.catalogue` and of `experiments.equal_bytes`
(`results/readme.smollm2.json`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from docs.generate.catalogue import CHOSEN, choose_front, chosen_table, draw_picture, read_results, summary
from experiments.bench.measuring import output_folder


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=output_folder, help="writes the pictures here")
    args = p.parse_args(argv)
    print(f"## {CHOSEN.stem}\n\n{chosen_table()}\n")
    results = read_results()
    for name, result in results.items():
        print(f"## {name}\n\n{summary(result)}")
        if args.out is not None:
            (args.out / f"catalogue.{name}.png").write_bytes(draw_picture(result))
    if results:
        print("The front, by the rule of `choose_front`:", *choose_front(list(results.values())), sep="\n- ")


if __name__ == "__main__":
    main()
